"""Reading and writing .safetensors: the one format that our weights and training state are kept in. We never write a
pickle; pickled.py reads those of others."""

from __future__ import annotations

import re
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leftward.errors import UserError, printable
from leftward.files import write_atomic

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The numbers that a model can compute with, under the names that recipes and commands have for them."""


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write `tensors` to `path`, whole or not at all. Raises: UserError where the disk refuses."""
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    write_atomic(path, lambda temporary: _save(temporary, contiguous))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of `path`. Raises: UserError where the file is missing, cut short or not safetensors."""
    if not path.is_file():
        raise UserError(f"{path} is missing")
    try:
        return load_file(path)
    except (safetensors.SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({printable(str(error), 300)})") from None


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        path.touch()
        mode = path.stat().st_mode  # what the user's umask gives any file; the library makes its own private
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)
    except safetensors.SafetensorError as error:
        # The library reports the operating system's error as text alone: "… (os error 28)".
        if number := re.search(r"os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), str(error), str(path)) from error
        raise
