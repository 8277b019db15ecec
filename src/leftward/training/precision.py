"""Which arithmetic a run computes in: measured on this machine when it starts, never assumed from its name."""

from __future__ import annotations

import time

import torch

from leftward.config import Config
from leftward.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def choose_device(name: str) -> torch.device:
    """The device that a recipe's `device` means. Raises: UserError where it is not there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    if not available[name]:
        raise UserError(f"training.device is {name!r}, which PyTorch does not find here: use auto or cpu")
    return torch.device(name)


def choose_dtype(name: str, config: Config, tokens: int, device: torch.device) -> str:
    """ "fp32" or "bf16": as named, or for "auto" the faster in this run's largest product, [tokens, D] × [D, d_ff].

    bf16 must win clearly: a tie is not worth its rounding.
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    if device.type != "cpu":
        return "fp32"
    seconds = _product_seconds(min(tokens, 4096), config.d_model, config.d_ff)
    return "bf16" if seconds["bf16"] * 1.2 < seconds["fp32"] else "fp32"


def _product_seconds(rows: int, width: int, columns: int) -> dict[str, float]:
    """The best time of a product in each dtype, taken in turn so that a busy moment hits both."""
    # Its own generator: measuring must not move the run's random numbers.
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, width, generator=generator)
    right = torch.randn(width, columns, generator=generator)
    pairs = {kind: (left.to(dtype), right.to(dtype)) for kind, dtype in DTYPES.items()}
    best = dict.fromkeys(pairs, float("inf"))
    for _ in range(20):
        for kind, (a, b) in pairs.items():
            start = time.perf_counter()
            a @ b
            best[kind] = min(best[kind], time.perf_counter() - start)
    return best
