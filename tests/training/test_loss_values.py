"""Losses of five small runs as numbers, so that whoever changes training sees it.

How they were made: this file's RECIPES, seed 1, in fp32 with PyTorch 2.13 on one thread of an x86 processor with AVX2,
native kernels; `python tests/training/test_loss_values.py` prints them. The runs are so short that another processor,
another number of threads or the plain kernels differ by rounding only: by 3e-7 of the loss at most, between 1 and 2
threads, native and plain, and PyTorch's code for processors without AVX. 1e-4 is what is allowed.

What a change means: the same recipe and seed give another run. That is a fault, unless it is the purpose (another
initialisation, order of the data, optimizer or schedule); then make the numbers anew and say so in CHANGELOG.md.
The first number of each run is that of its initialisation and its data alone; from the second on the optimizer shows.
"""

import contextlib

import pytest

import leftward as lw
from leftward.kernels import native
from leftward.training.progress import Observer

TEXT = "".join(f"The {n} sheep of farm {n % 7} saw the {n * n % 13} wolves.\n" for n in range(400))
STEPS = (1, 2, 5, 10, 15)
SHAPE = {"n_layers": 2, "d_model": 64, "n_heads": 4, "max_seq_len": 64}
COMMON = {"dtype": "fp32", "max_steps": 15, "batch_size": 8, "eval_interval": 0, "log_interval": 1}
RATES = {"lr": 0.005, "adamw_lr": 0.002}

RECIPES = {
    "default": {
        "model": {**SHAPE, "n_kv_heads": 2},
        "tokenizer": {"vocab_size": 300},
        "optimizer": RATES,
    },
    "adamw, cosine": {
        "model": {**SHAPE, "positions": "learned", "norm": "layernorm", "qk_norm": "none", "feed_forward": "gelu_tanh"},
        "tokenizer": {"vocab_size": 300},
        "optimizer": {"name": "adamw", "adamw_lr": 0.001, "weight_decay": 0.1, "betas": [0.9, 0.99]},
        "schedule": {"decay": "cosine", "warmup_steps": 4, "final_fraction": 0.1},
    },
    "experts, balance loss": {
        "model": {**SHAPE, "n_experts": 4, "n_experts_per_token": 2, "window": 16, "attention_pattern": "LG"},
        "tokenizer": {"vocab_size": 300},
        "training": {"balance_loss": 0.05},
        "optimizer": RATES,
    },
    "packed documents, dropout": {
        "data": {"packing": "documents", "document_separator": "\n"},
        "model": {**SHAPE, "dropout": 0.1},
        "tokenizer": {"kind": "word"},
        "optimizer": RATES,
    },
    "characters, post-norm, accumulation": {
        "model": {**SHAPE, "block": "post", "norm": "layernorm", "tie_embeddings": False},
        "tokenizer": {"kind": "char"},
        "training": {"micro_batch_size": 2},
        "optimizer": {**RATES, "grad_clip": 0.5},
    },
}
LOSSES = {
    "default": [5.687249, 5.601597, 5.082756, 4.247041, 3.912092, 3.899079],
    "adamw, cosine": [5.698441, 5.619451, 5.120493, 4.666045, 4.486754, 4.476019],
    "experts, balance loss": [5.740357, 5.65678, 5.174849, 4.316208, 3.981177, 3.968573],
    "packed documents, dropout": [6.43323, 6.361376, 5.868278, 5.111139, 4.786852, 4.761959],
    "characters, post-norm, accumulation": [3.334402, 3.269269, 2.909912, 2.439277, 2.271041, 2.272135],
}
"""Of the batches of STEPS, in nats a token, and of the validation split at the end."""


def losses(name, directory):
    (directory / "farm.txt").write_text(TEXT, encoding="utf-8")
    given = RECIPES[name]
    recipe = {
        **given,
        "out": str(directory / "run"),
        "data": {"path": str(directory / "farm.txt"), **given.get("data", {})},
        "training": {**COMMON, **given.get("training", {})},
    }
    history = lw.train(recipe, observer=Observer()).history
    by_step = {line["step"]: line["loss"] for line in history if "loss" in line}
    return [by_step[step] for step in STEPS], history[-1]["val_loss"]


@pytest.mark.parametrize("kernels", ["native", "plain"])
@pytest.mark.parametrize("name", RECIPES)
def test_training_is_what_it_was(name, kernels, tmp_path, monkeypatch):
    if kernels == "plain":
        monkeypatch.setattr(native, "in_use", lambda: contextlib.nullcontext("plain: for the test"))
    elif native._load()[0] is None:
        pytest.skip(f"no native kernels here: {native._load()[1]}")
    of_steps, of_validation = losses(name, tmp_path)
    assert [*of_steps, of_validation] == pytest.approx(LOSSES[name], rel=1e-4)


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    for name in RECIPES:
        with tempfile.TemporaryDirectory() as directory:
            of_steps, of_validation = losses(name, Path(directory))
        print(f'    "{name}": {[round(value, 6) for value in (*of_steps, of_validation)]},')
