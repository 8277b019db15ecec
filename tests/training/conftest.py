"""A small real run that several tests make."""

import pytest

TEXT = "".join(f"The {n} sheep of farm {n % 7} saw the {n * n % 13} wolves.\n" for n in range(400))


@pytest.fixture
def recipe(tmp_path):
    """The fields of a recipe that trains in about a second."""
    path = tmp_path / "farm.txt"
    path.write_text(TEXT, encoding="utf-8")
    return {
        "out": str(tmp_path / "run"),
        "data": {"path": str(path)},
        "tokenizer": {"kind": "char"},
        "model": {"n_layers": 2, "d_model": 32, "n_heads": 2, "max_seq_len": 32},
        "training": {
            "dtype": "fp32",
            "max_steps": 12,
            "batch_size": 8,
            "eval_interval": 4,
            "save_interval": 3,
            "log_interval": 1,
        },
    }
