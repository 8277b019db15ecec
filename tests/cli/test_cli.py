"""The command line as a user meets it: real processes, their output and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

COMMAND = [sys.executable, "-m", "leftward.cli.main"]
TEXT = "".join(f"The {n} sheep of farm {n % 7} saw the {n * n % 13} wolves.\n" for n in range(400))
SMALL = ["model.n_layers=1", "model.d_model=32", "model.n_heads=2", "model.max_seq_len=32", "training.batch_size=8"]


def leftward(*arguments, cwd=None, stdin=None, env=None):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, cwd=cwd, input=stdin, env={**os.environ, **(env or {})}
    )


@pytest.fixture(scope="module")
def farm(tmp_path_factory):
    """A directory with a text and a trained run."""
    directory = tmp_path_factory.mktemp("farm")
    (directory / "farm.txt").write_text(TEXT)
    done = leftward(
        "train", "--data", "farm.txt", "--out", "run", "training.max_steps=20", "tokenizer.kind=char", *SMALL,
        "--json", cwd=directory,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (directory / "summary").write_text(done.stdout)
    return directory


def test_help_needs_no_torch():
    script = (
        "import sys; sys.argv = ['leftward', '--help']\n"
        "from leftward.cli import main\n"
        "try: main.run()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in ("quickstart", "train", "generate"))


@pytest.mark.parametrize("arguments", [["train", "--data", "x", "modle.n=1"], ["train", "none.yaml"], ["train"]])
def test_a_wrong_recipe_needs_no_torch(arguments, tmp_path):
    script = (
        f"import sys; sys.argv = ['leftward', *{arguments!r}]\n"
        "from leftward.cli import main\n"
        "try: main.run()\n"
        "except SystemExit as end: assert end.code == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("leftward: ") and done.stderr.count("\n") == 1


def test_train_prints_plain_lines_in_a_pipe_and_json_on_stdout(farm):
    summary = json.loads((farm / "summary").read_text())
    assert summary["steps"] == 20 and summary["run"] == "run"
    assert {"val_loss", "val_bits_per_byte", "wall_s", "params", "tokens"} <= summary.keys()


def test_generate_writes(farm):
    done = leftward("generate", "run", "The ", "--max-tokens", "20", "--seed", "1", cwd=farm)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) >= 20
    again = leftward("generate", "run", "The ", "--max-tokens", "20", "--seed", "1", cwd=farm)
    assert again.stdout == done.stdout
    piped = leftward("generate", "run", "--max-tokens", "20", "--seed", "1", cwd=farm, stdin="The ")
    assert piped.stdout == done.stdout


def test_dry_run_prints_the_whole_recipe_and_makes_nothing(farm):
    before = sorted(os.listdir(farm))
    done = leftward("train", "--data", "farm.txt", "optimizer.lr=1e-3", "--dry-run", cwd=farm)
    assert done.returncode == 0 and "lr: 0.001" in done.stdout and "warmup_steps" in done.stdout
    assert sorted(os.listdir(farm)) == before


def test_a_recipe_file_with_overrides(farm):
    (farm / "recipe.yaml").write_text("data: {path: farm.txt}\ntraining: {max_steps: 3, batch_size: 4}\n")
    done = leftward("train", "recipe.yaml", *SMALL, "training.max_steps=2", "--out", "from-recipe", "--json", cwd=farm)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2


def test_text_from_stdin(farm):
    done = leftward("train", "--data", "-", "--out", "piped", "training.max_steps=2", *SMALL, cwd=farm, stdin=TEXT)
    assert done.returncode == 0, done.stderr
    assert "the data is a single document" in done.stderr  # said aloud


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["train", "--data", "none.txt"], "none.txt"),
        (["train", "--data", ""], "data.path is missing"),
        (["train", "farm.txt"], "goes behind --data"),
        (["train", "--minutes", "1"], "No such option: --minutes"),
        (["generate"], "leftward generate --help"),
        (["generate", "run", "The", "upon"], "unexpected extra argument"),
        (["generate", "run", "The ", "-n", "1000000000"], "4096"),
        (["train", "--data", "farm.txt", "tokenizer.vocab_size=1000000000"], "vocab_size is 1000000000"),
        (["train", "--data", "farm.txt", "--out", "/proc/x"], "/proc/x"),
        (["train", "--data", "empty.txt"], "empty"),
        (["train", "--data", "binary.bin"], "binary"),
        (["train", "--data", "blank.txt"], "no documents"),
        (["train", "--data", "tiny.txt", "tokenizer.kind=char"], "fewer than one window"),
        (["train", "--data", "farm.txt", "tokenizer.vocab_size=60000"], "60"),
        (["train", "--data", "farm.txt", "data.val_fraction=0.0"], "validation"),
        (["train", "--data", "farm.txt", "model.d_model=100", "model.n_heads=3"], "not divisible by n_heads"),
        (["train", "--data", "farm.txt", "model.n_heads=4", "model.n_kv_heads=3"], "not divisible by n_kv_heads"),
        (["train", "--data", "farm.txt", "training.lr=3"], "unknown key training.lr"),
        (["train", "--data", "farm.txt", "training.batch_size=many"], "training.batch_size is 'many'"),
        (["train", "--data", "farm.txt", "--out", "run"], "already used"),
        (["train", "--data", "farm.txt", "--out", "farm.txt/run"], "not a directory"),
        (["train", "--resume", "nowhere"], "not a run directory"),
        (["train", "--resume", "run", "training.max_steps=9"], "--resume"),
        (["generate", "nowhere", "x"], "nowhere"),
        (["generate", "run", "naïve ☃"], "☃"),
        (["generate", "run", "The " * 50], "32"),
        (["generate", "run", "The ", "--top-p", "0"], "top_p"),
        (["quickstart", "--minutes", "0"], "training.minutes"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(farm, arguments, expected):
    (farm / "empty.txt").write_text("")
    (farm / "blank.txt").write_text("  \n \n")
    (farm / "tiny.txt").write_text("abc")
    (farm / "binary.bin").write_bytes(bytes(range(256)) * 20)
    before = sorted(os.listdir(farm))
    done = leftward(*arguments, cwd=farm)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("leftward: ") and expected in last, done.stderr
    assert "Traceback" not in done.stderr
    assert set(os.listdir(farm)) - set(before) <= {"runs"} and not os.path.exists(farm / "runs" / "farm")


def test_closed_streams_are_no_obstacle(farm):
    generate = [*COMMAND, "generate", "run", "--max-tokens", "3"]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *generate], capture_output=True, text=True, cwd=farm)
    assert "Traceback" not in done.stderr and done.returncode in (0, 2)
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *generate, "The "], capture_output=True, text=True, cwd=farm
    )
    assert "Traceback" not in done.stderr and done.returncode == 0
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            command = [*generate, "The "]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=farm)
        assert done.returncode == 2 and "the disk is full" in done.stderr and "Traceback" not in done.stderr


def test_a_path_of_any_name_is_taken(farm):
    name = os.fsencode("fä:rm = {x}.txt") + b"\x7f"
    with open(os.path.join(os.fsencode(farm), name), "w") as file:
        file.write(TEXT)
    command = [*COMMAND, "train", "--data", name, "--out", "odd = name", "training.max_steps=2", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=farm, env={**os.environ, "LC_ALL": "C"})
    assert done.returncode == 0, done.stderr
    assert "leftward generate 'odd = name'" in done.stdout


def test_debug_shows_the_traceback(farm):
    done = leftward("--debug", "train", "--data", "none.txt", cwd=farm)
    assert "Traceback" in done.stderr and "none.txt" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(farm, number):
    out = f"stopped-{number.name}"
    process = subprocess.Popen(
        [*COMMAND, "train", "--data", "farm.txt", "--out", out, "training.max_steps=100000", *SMALL],
        cwd=farm, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(600):  # until the first step
        if os.path.exists(farm / out / "metrics.jsonl") and (farm / out / "metrics.jsonl").stat().st_size:
            break
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"saved; go on with: leftward train --resume {out}" in errors
    assert leftward("generate", out, "The ", "--max-tokens", "3", cwd=farm).returncode == 0


def test_an_ascii_terminal_is_no_obstacle(farm):
    done = leftward(
        "quickstart", "--data", "farm.txt", "--minutes", "0.03", "--out", "ascii", cwd=farm,
        env={"PYTHONIOENCODING": "ascii", "COLUMNS": "30"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "sample 3" in done.stdout and "leftward generate ascii" in done.stdout
