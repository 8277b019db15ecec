"""`leftward plan` as a user meets it: real processes, their output and exit codes."""

import json
import os
import re
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "leftward.cli.main", "plan"]


def plan(*arguments, cwd=None, env=None):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, cwd=cwd, env={**os.environ, **(env or {})}
    )


def numbers_of(text):
    """Each line's first word or words, and its numbers."""
    return {re.split(r"\s{2,}", line.strip())[0]: re.findall(r"[\d,.]+", line) for line in text.splitlines()}


@pytest.mark.parametrize(
    "arguments",
    [
        ["gpt2"],
        ["gpt2", "n_layers=24", "--device", "h200", "--tokens", "1e10", "--flops", "1e21"],
        ["vocab_size=50257", "d_model=768", "n_heads=12"],
        ["--flops", "1e21"],
        ["--list"],
        ["gtp2"],
        ["gpt2", "n_layer=3"],
        ["gpt2", "--dtype", "bf15"],
    ],
)
def test_no_torch_is_needed_for_presets_and_settings(arguments):
    script = (
        f"import sys; sys.argv = ['leftward', 'plan', *{arguments!r}]\n"
        "from leftward.cli import main\n"
        "try: main.run()\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'rich', 'leftward.training.recipe'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout


def test_a_preset():
    done = plan("gpt2")
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith("gpt2: 124,439,808 parameters\n")
    numbers = numbers_of(done.stdout)
    assert numbers["without embeddings and head"] == ["85,056,000"]
    # 291,648,307,200 and three times that; 272,339,828,736
    assert "  total                                291.65 G        874.94 G" in done.stdout
    assert "272.34 G" in done.stdout
    assert numbers["KV cache of a token"] == ["36,864"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["gpt3-175b", "--tokens", "300e9", "--device", "a100-80gb", "--devices", "1024", "--mfu", "0.4"],
        ["qwen3-235b-a22b", "--flops", "3e17", "--batch-size", "64", "--bandwidth", "1e12"],
        ["gemma3-27b", "--device", "mi300x", "--tokens-per-second", "3000", "--optimizer", "adamw"],
        ["vocab_size=1", "n_layers=1", "d_model=2", "n_heads=1", "max_seq_len=1"],
        ["llama3.1-405b", "--dtype", "q4_0", "--kv-dtype", "fp8"],
        ["--list"],
        ["--flops", "1e12"],
    ],
)
def test_fits_eighty_columns(arguments):
    done = plan(*arguments)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert not any(line.endswith(" ") for line in done.stdout.splitlines())


def test_settings_are_laid_over_a_preset_and_others_follow():
    done = plan("gpt2", "n_layers=24", "d_model=1024", "n_heads=16", "--json")
    answer = json.loads(done.stdout)
    assert answer["parameters"]["total"] == 354_823_168  # GPT-2 medium
    assert answer["config"]["head_dim"] == 64
    scaled = plan("llama3.1-8b", "rope_scaling.factor=16", "norm_eps=1e-3", "--json")
    assert json.loads(scaled.stdout)["config"]["rope_scaling"]["factor"] == 16
    assert json.loads(scaled.stdout)["config"]["norm_eps"] == 1e-3


def test_settings_alone():
    done = plan(
        *("vocab_size=50257", "d_model=768", "n_layers=12", "n_heads=12", "max_seq_len=1024", "positions=learned"),
        *("norm=layernorm", "feed_forward=gelu_tanh", "qkv_bias=true", "attn_out_bias=true", "ff_bias=true"),
        *("qk_norm=none", "--json"),
    )
    assert json.loads(done.stdout)["parameters"]["total"] == 124_439_808


def test_a_model_directory(tmp_path):
    (tmp_path / "run").mkdir()
    config = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    done = plan("run", "n_layers=3", "--seq-len", "32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("run: ") and "3 layers × 32 wide" in done.stdout
    assert "FLOPs of a sequence of 32 tokens" in done.stdout


def test_the_laws_side_by_side():
    done = plan("--flops", "5.76e23")
    numbers = numbers_of(done.stdout)
    assert numbers["Hoffmann 2022, printed"][-2] == "92.6"
    assert numbers["Hoffmann 2022, unrounded"][-2] == "58.9"
    assert numbers["Besiroglu 2024"][-2:] == ["18.4", "1.974"]
    assert "disagree" in done.stdout and "no promise" in done.stdout and "extrapolate" in done.stdout
    answer = json.loads(plan("--flops", "5.76e23", "--json").stdout)
    assert answer["optima"][0]["law"] == "Kaplan 2020"


def test_the_list():
    done = plan("--list")
    assert re.search(r"^gpt2 +124,439,808$", done.stdout, re.M)
    assert json.loads(plan("--list", "--json").stdout)["llama3-70b"] == 70_553_706_496


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to plan"),
        (["gtp2"], "did you mean gpt2?"),
        (["./none"], "does not exist"),
        (["gpt2", "n_layer=24"], "unknown key n_layer: did you mean n_layers?"),
        (["gpt2", "n_layers=many"], "n_layers is 'many': it must be int"),
        (["gpt2", "n_layers=[1"], "is not YAML"),
        (["gpt2", "medium"], "write it as key=value"),
        (["n_layers=24"], "vocab_size is missing"),
        (["gpt2", "--seq-len", "4096"], "max_seq_len 1024"),
        (["gpt2", "--device", "a100"], "did you mean a100-80gb or a100-40gb?"),
        (["gpt2", "--optimizer", "sgd"], "valid: adamw, muon"),
        (["--flops", "7"], "flops is 7"),
        (["gpt2", "--batch-size", "two"], "batch"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    done = plan(*arguments)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("leftward: ") and done.stderr.count("\n") == 1
    assert message in done.stderr
