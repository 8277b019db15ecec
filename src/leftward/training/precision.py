"""What the machine offers a run: its devices, its memory, and the arithmetic that is measured to be faster on it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import torch

from leftward.errors import UserError
from leftward.formats.tensors import DTYPES
from leftward.training.recipe import Recipe


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


def check_fits(recipe: Recipe, learning: int, frozen: int = 0) -> None:
    """Refuse what this machine cannot hold before it is built.

    Args:
        learning: parameters that are trained: weights, gradients and two averages of each, in fp32.
        frozen: parameters that are only kept.

    Raises: UserError.
    """
    memory = physical_memory()
    step = 8 * recipe.training.batch_size * (recipe.seq_len + 1)  # the ids of one step
    of_model = f"a model of {learning + frozen:,} parameters" + (f", {frozen:,} of them frozen," if frozen else "")
    for what, needed in ((of_model, 16 * learning + 4 * frozen), ("a batch", step)):
        if needed > memory:
            raise UserError(
                f"{what} takes {needed / 1e9:,.0f} GB to train, and this machine has {memory / 1e9:,.0f} GB: make the "
                "model (n_layers, d_model, vocab_size …) or the batch (batch_size, seq_len) smaller"
            )


def choose_dtype(name: str, device: torch.device) -> str:
    """ "fp32" or "bf16": as named, or for "auto" the faster on this device.

    The product that decides is large enough to tell one processor from another whatever else it is doing: a choice that
    hung on the noise would give one seed two results.
    """
    if name != "auto":
        return name
    seconds = product_seconds(512 if device.type == "cpu" else 4096, device)
    return "bf16" if seconds["bf16"] * 1.5 < seconds["fp32"] else "fp32"


def product_seconds(size: int, device: torch.device, kinds: Iterable[str] = DTYPES) -> dict[str, float]:
    """The best time of a square product in each dtype, taken in turn so that a busy moment hits both."""
    square = torch.ones(size, size, device=device)
    squares = {kind: square.to(DTYPES[kind]) for kind in kinds}
    best = dict.fromkeys(squares, float("inf"))
    for turn in range(20):
        for kind, operand in squares.items():
            start = time.perf_counter()
            (operand @ operand)[0, 0].item()  # waits for the device
            best[kind] = min(best[kind], time.perf_counter() - start)
        # What is clear is not measured further: a processor without bf16 would take seconds.
        if turn >= 2 and max(best.values()) > 4 * min(best.values()):
            break
    return best
