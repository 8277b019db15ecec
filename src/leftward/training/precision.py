"""What the machine offers a run: its devices, its memory, and the arithmetic that is measured to be faster on it."""

from __future__ import annotations

import os
import time

import torch

from leftward.errors import UserError
from leftward.formats.tensors import DTYPES


def choose_device(name: str) -> torch.device:
    """The device that a recipe's `device` means. Raises: UserError where it is not there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    if not available[name]:
        raise UserError(f"training.device is {name!r}, which PyTorch does not find here: use auto or cpu")
    return torch.device(name)


def physical_memory() -> int:
    """Bytes of main memory; where the system does not say, more than any machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 60


def choose_dtype(name: str, device: torch.device) -> str:
    """ "fp32" or "bf16": as named, or for "auto" the faster on this device.

    The product that decides is large enough to tell one processor from another whatever else it is doing: a choice that
    hung on the noise would give one seed two results.
    """
    if name != "auto":
        return name
    seconds = product_seconds(512 if device.type == "cpu" else 4096, device)
    return "bf16" if seconds["bf16"] * 1.5 < seconds["fp32"] else "fp32"


def product_seconds(size: int, device: torch.device) -> dict[str, float]:
    """The best time of a square product in each dtype, taken in turn so that a busy moment hits both."""
    square = torch.ones(size, size, device=device)
    squares = {kind: square.to(dtype) for kind, dtype in DTYPES.items()}
    best = dict.fromkeys(squares, float("inf"))
    for turn in range(20):
        for kind, operand in squares.items():
            start = time.perf_counter()
            (operand @ operand)[0, 0].item()  # waits for the device
            best[kind] = min(best[kind], time.perf_counter() - start)
        if turn >= 2 and best["bf16"] > 4 * best["fp32"]:  # a processor without bf16 would take seconds to say so
            break
    return best
