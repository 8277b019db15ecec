"""`leftward runs`, `eval`, `tune`, and recipes by name: as a user meets them."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from leftward.cli.chart import MOST_CURVES, charts
from leftward.cli.table import Column, table
from leftward.training.recipe import recipes
from terminals import shown_on_a_terminal

COMMAND = [sys.executable, "-m", "leftward.cli.main"]
TEXT = "".join(f"The {n} sheep of farm {n % 7} saw the {n * n % 13} wolves.\n" for n in range(400))
SMALL = ["model.n_layers=1", "model.d_model=32", "model.n_heads=2", "model.max_seq_len=32", "training.batch_size=8"]
SHORT = [*SMALL, "tokenizer.kind=char", "training.max_steps=10", "training.eval_interval=5"]


def leftward(*arguments, cwd=None, stdin=None):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=cwd, input=stdin)


@pytest.fixture(scope="module")
def farm(tmp_path_factory):
    """A directory with a text, two runs, one that is damaged and one that was never begun."""
    directory = tmp_path_factory.mktemp("farm")
    (directory / "farm.txt").write_text(TEXT)
    for name, setting in (("a", "optimizer.lr=0.02"), ("b", "optimizer.lr=0.0001")):
        done = leftward("train", "--data", "farm.txt", "--out", f"runs/{name}", setting, *SHORT, cwd=directory)
        assert done.returncode == 0, done.stderr
    (directory / "runs" / "damaged").mkdir()
    (directory / "runs" / "damaged" / "recipe.yaml").write_text("data: {path: x}\n")
    (directory / "nothing").mkdir()
    return directory


def without_torch(arguments, cwd):
    """What a command prints, if it does so without torch."""
    script = (
        f"import sys; sys.argv = ['leftward', *{arguments!r}]\n"
        "from leftward.cli import main\n"
        "try: main.run()\n"
        "except SystemExit as end: print(end.code, file=sys.stderr)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


# ---- runs


def test_runs_are_listed_the_best_first_without_torch(farm):
    lines = without_torch(["runs"], farm).stdout.splitlines()
    assert lines[0].split() == ["run", "parameters", "steps", "tokens", "val", "loss", "bits/byte", "minutes", "state"]
    assert [line.split()[:2] for line in lines[1:4]] == [["1", "runs/a"], ["2", "runs/b"], ["3", "runs/damaged"]]
    assert [line.split()[-1] for line in lines[1:4]] == ["finished", "finished", "damaged"]
    assert lines[4].startswith("runs/damaged: ") and "recipe.yaml is cut short" in lines[4]
    summary = json.loads((farm / "runs/a/summary.json").read_text())
    assert f"{summary['params']:,}" in lines[1] and f"{summary['val_bits_per_byte']:.4f}" in lines[1]


def test_runs_as_json(farm):
    lines = [json.loads(line) for line in leftward("runs", "--json", cwd=farm).stdout.splitlines()]
    summary = json.loads((farm / "runs/a/summary.json").read_text())
    assert [line["state"] for line in lines] == ["finished", "finished", "damaged"]
    assert lines[0]["directory"] == "runs/a" and lines[0]["val_loss"] == summary["val_loss"]
    assert lines[2]["val_loss"] is None and "cut short" in lines[2]["problem"]


def test_runs_are_compared(farm):
    done = leftward("runs", "--compare", "--axis", "steps", cwd=farm)
    assert done.returncode == 0, done.stderr
    assert "validation bits/byte against steps" in done.stdout
    assert "• 1 runs/a" in done.stdout and "× 2 runs/b" in done.stdout
    assert "  optimizer.lr: 0.02 in 1; 0.0001 in 2" in done.stdout.splitlines()
    assert done.stdout.count(" in 1; ") == 1  # where it is kept is no difference


def test_a_picture_of_runs(farm):
    pytest.importorskip("matplotlib")
    done = leftward("runs", "runs/a", "--plot", "curves.png", cwd=farm)
    assert done.returncode == 0 and (farm / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("columns", [30, 44, 80])
def test_a_narrow_terminal_gets_the_columns_that_matter(farm, columns):
    output, code = shown_on_a_terminal([*COMMAND, "runs", str(farm / "runs/a"), str(farm / "runs/b")], columns)
    rows = output.replace("\r", "").splitlines()
    name = len(str(farm / "runs/a"))
    assert code == 0 and "bits/byte" in rows[0]
    if columns == 30:  # nothing is left to leave out
        assert rows[0].split() == ["run", "bits/byte"]
    assert all(len(row) <= max(columns, name + 16) for row in rows)


def test_a_table_leaves_out_the_highest_ranks(monkeypatch):
    columns = [Column("a", ["1"]), Column("bb", ["22"], rank=2), Column("c", ["333"], rank=1, left=True)]
    assert table(columns).splitlines() == ["a  bb  c", "1  22  333"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "8")
    assert table(columns).splitlines() == ["a  c", "1  333"]


def test_several_curves_in_one_chart(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    curves = {f"run {n}": [(1, n), (10, n + 0.5), (100, n)] for n in range(MOST_CURVES)}
    lines = charts(curves, "loss", "steps", log_x=True).splitlines()
    assert max(map(len, lines)) <= 60
    first = next(line for line in lines if "•" in line and "run" not in line)
    places = [i for i, character in enumerate(first) if character == "•"]
    assert places == [10, 57] or len(places) >= 1  # a decade is as far as the next
    assert [line.split()[1:] for line in lines[-MOST_CURVES:]] == [["run", str(n)] for n in range(MOST_CURVES)]


# ---- eval


def test_eval_of_a_run_is_its_summary(farm):
    summary = json.loads((farm / "runs/a/summary.json").read_text())
    got = json.loads(leftward("eval", "runs/a", "--json", cwd=farm).stdout)
    assert got["loss"] == pytest.approx(summary["val_loss"], rel=1e-3)
    assert got["bits_per_byte"] == pytest.approx(summary["val_bits_per_byte"], rel=1e-3)
    assert set(got) == {"model", "loss", "perplexity", "bits_per_byte", "tokens", "bytes"}


def test_eval_of_text(farm):
    done = leftward("eval", "runs/a", "--data", "farm.txt", "--stride", "32", cwd=farm)
    assert done.returncode == 0, done.stderr
    assert f"over {len(TEXT):,} tokens and {len(TEXT):,} bytes" in done.stdout and done.stdout.count("\n") == 1
    piped = leftward("eval", "runs/a", "--data", "-", "--stride", "32", cwd=farm, stdin=TEXT)
    assert piped.stdout == done.stdout
    nearer = json.loads(leftward("eval", "runs/a", "--data", "farm.txt", "--stride", "4", "--json", cwd=farm).stdout)
    assert nearer["tokens"] == len(TEXT)
    (farm / "farm.jsonl").write_text("".join(json.dumps({"content": line}) + "\n" for line in TEXT.splitlines()[:9]))
    records = leftward("eval", "runs/a", "--data", "farm.jsonl", "--text-field", "content", "--json", cwd=farm)
    assert json.loads(records.stdout)["bytes"] == sum(map(len, TEXT.splitlines()[:9]))


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["eval", "nowhere"], "nowhere"),
        (["eval", "runs/a", "--data", "none.txt"], "none.txt does not exist"),
        (["eval", "runs/a", "--dtype", "fp8"], "dtype is 'fp8'"),
        (["runs", "none"], "none is not a directory"),
        (["runs", "nothing"], "no run in nothing"),
        (["runs", "--axis", "epochs"], "axis is 'epochs'"),
        (["runs", "--plot", "x.txt"], "x.txt is no picture"),
        (["tune"], "nothing to tune"),
        (["tune", "--data", "farm.txt", "optimizer.lr"], "is no recipe|is neither a recipe"),
        (["tune", "--data", "farm.txt", "optimizer.lr=0.1,fast"], "optimizer.lr is 'fast'"),
        (["tune", "--data", "farm.txt", "--seeds", "0"], "seeds is 0"),
        (["tune", "--find-lr", "--data", "farm.txt", "--out", "x"], "keeps no run"),
        (["train", "gpt3"], "gpt3 is neither a recipe file"),
        (["train", "--data", "farm.txt", "size=10X"], "size is '10X'"),
    ],
)
def test_a_mistake_is_one_line_and_needs_no_torch(farm, arguments, expected):
    done = without_torch(arguments, farm)
    *messages, code = done.stderr.splitlines()
    assert code == "2" and len(messages) == 1 and re.search(expected, messages[0]), done.stderr


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["eval", "runs/a", "--data", "farm.txt", "--stride", "99"], "stride is 99"),
        (["eval", "runs/damaged"], "not a model directory"),
    ],
)
def test_a_mistake_that_only_the_model_shows(farm, arguments, expected):
    done = leftward(*arguments, cwd=farm)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr


# ---- tune


def test_tune_prints_the_best_first_and_repeats_nothing(farm):
    command = ["tune", "--data", "farm.txt", *SHORT, "optimizer.lr=0.0001,0.02", "--seeds", "2", "--out", "sweep"]
    done = leftward(*command, cwd=farm)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["optimizer.lr", "bits/byte", "val", "loss", "runs"]
    assert [line.split()[0] for line in lines[1:]] == ["0.02", "0.0001"]
    assert all("±" in line and line.endswith("2 of 2") for line in lines[1:])
    again = leftward(*command, "--json", cwd=farm)
    outcomes = json.loads(again.stdout)["outcomes"]
    assert [outcome["settings"] for outcome in outcomes] == [{"optimizer.lr": 0.02}, {"optimizer.lr": 0.0001}]
    assert f"{outcomes[0]['val_loss']:.4f} ± {outcomes[0]['val_loss_deviation']:.4f}" in lines[1]
    assert "step" not in again.stderr  # nothing was trained
    listed = leftward("runs", "sweep", cwd=farm)
    assert listed.stdout.count("finished") == 4


def test_the_recipe_of_a_run_of_a_sweep_can_be_trained_and_tuned(farm):
    best = "named/lr=0.02,seed=1/recipe.yaml"
    (farm / best).parent.mkdir(parents=True)
    (farm / best).write_text((farm / "runs" / "a" / "recipe.yaml").read_text())
    done = leftward("train", best, "--out", "again", "optimizer.lr=0.03", "--dry-run", cwd=farm)
    assert (done.returncode, "lr: 0.03\n" in done.stdout, "max_steps: 10\n" in done.stdout) == (0, True, True)
    done = leftward("tune", best, "training.max_steps=1", "--seeds", "1", "--out", "one", "--json", cwd=farm)
    assert json.loads(done.stdout)["outcomes"][0]["runs"][0]["summary"]["steps"] == 1, done.stderr


def test_find_lr_draws_and_suggests(farm):
    before = sorted(os.listdir(farm))
    done = leftward("tune", "--data", "farm.txt", *SMALL, "tokenizer.kind=char", "--find-lr", cwd=farm)
    assert done.returncode == 0, done.stderr
    assert "smoothed loss against what the recipe's rates were multiplied by" in done.stdout
    assert re.search(r"^  optimizer\.lr=[\d.]+ optimizer\.adamw_lr=[\d.]+$", done.stdout, re.MULTILINE)
    assert sorted(os.listdir(farm)) == before


# ---- recipes by name, and sizes


def test_a_recipe_is_found_by_its_name(farm):
    by_name = leftward("train", "shakespeare-char", "--data", "x", "--dry-run", cwd=farm)
    by_path = leftward("train", str(recipes()["shakespeare-char"]), "--data", "x", "--dry-run", cwd=farm)
    assert by_name.returncode == 0 and by_name.stdout == by_path.stdout and "kind: char" in by_name.stdout


def test_the_wheel_has_the_recipes():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {"recipes": "leftward/recipes"}


def test_what_a_size_settles_is_printed(farm):
    dry = leftward("train", "--data", "farm.txt", "size=100K", "model.n_layers=3", "--dry-run", cwd=farm)
    assert dry.returncode == 0, dry.stderr
    first, *rest = dry.stdout.splitlines()
    assert first.startswith("# size 100K settles") and any(line.startswith("#   model.d_model: ") for line in rest)
    assert not any(line.startswith("#   model.n_layers") for line in rest)  # given, not settled
    (farm / "sized.yaml").write_text(dry.stdout)
    again = leftward("train", "sized.yaml", "--dry-run", cwd=farm)  # nothing is open any more
    assert again.returncode == 0 and [line for line in again.stdout.splitlines() if not line.startswith("#")] == [
        line for line in rest if not line.startswith("#")
    ]


def test_a_model_of_a_size_trains(farm):
    done = leftward(
        "train", "--data", "farm.txt", "size=100K", "tokenizer.kind=char", "training.max_epochs=0.3", "--out", "sized",
        "--json", cwd=farm,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["params"] == pytest.approx(100_000, rel=0.15)  # 28 characters, not 128
    assert "where max_epochs ends it" in done.stderr and "# size 100K settles" in done.stderr
    # What was counted on is said once the text is known, and how to have the size exactly.
    (hint,) = re.findall(r"set (tokenizer.vocab_size=\d+) beside the size", done.stderr)
    command = ["train", "--data", "farm.txt", "size=100K", "tokenizer.kind=char", "training.max_epochs=0.1", "--json"]
    known = leftward(*command, hint, "--out", "known", cwd=farm)
    assert known.returncode == 0 and "beside the size" not in known.stderr
    assert json.loads(known.stdout)["params"] == pytest.approx(100_000, rel=0.05)
