"""Quantised tensors of a file as the packed matrices that kernels/packed.py computes with, their rows in our order."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor, nn

from leftward.config import Config
from leftward.errors import UserError
from leftward.formats.family import Op
from leftward.formats.kinds import KINDS
from leftward.formats.model_directory import build_decoder
from leftward.formats.quants import AS_Q4_1, dequantise, quantise
from leftward.kernels import native
from leftward.kernels.packed import COLUMNS, Packed, pack
from leftward.model.decoder import Decoder

WEIGHTS: dict[str, str] = {"q8": "Q8_0", "q4": "Q4_1"}
"""Kinds of packed weights, and the kind of GGUF that says the same."""


def pack_tensors(config: Config, op: Op, tensors: list[tuple[str, Tensor]]) -> list[Packed]:
    """One matrix of ours out of a file's tensors, a part for each of them.

    Args:
        op: which moves whole rows.
        tensors: the kind of each, and its bytes, uint8 [rows, bytes].
    """
    ends = [0]
    for _, raw in tensors:
        ends.append(ends[-1] + len(raw))
    # Where each row of ours comes from: the operation is done to the rows' numbers, from 1 on. 0 is a row of zeros.
    numbers = [torch.arange(a + 1, b + 1)[:, None] for a, b in itertools.pairwise(ends)]
    rows = op.read(config, numbers).flatten()
    parts = []
    while len(rows):
        source = int(torch.searchsorted(torch.tensor(ends[1:]), rows[0]))
        kind, raw = tensors[source]
        elsewhere = ((rows <= ends[source]) & (rows > 0)) | (rows > ends[source + 1])
        n = int(elsewhere.int().argmax()) if elsewhere.any() else len(rows)
        own = rows[:n] - ends[source] - 1
        taken = raw if torch.equal(own, torch.arange(len(raw))) else raw[own.clamp(min=0)]
        if (rows[:n] == 0).any():
            taken = taken.masked_fill((rows[:n] == 0)[:, None], 0)
        parts.append(pack_rows(kind, taken))
        rows = rows[n:]
    return parts


def pack_rows(kind: str, raw: Tensor) -> Packed:
    """Rows of a quantised kind, uint8 [rows, bytes]. Q4_0, Q4_1 and Q8_0 are kept as they are; Q4_K too, but for its
    steps, which are rounded to fp16; all else becomes Q8_0."""
    if kind in AS_Q4_1:
        return pack(AS_Q4_1[kind](raw.reshape(-1, KINDS[kind].nbytes)).view(len(raw), -1), "q4")
    if kind == "Q8_0":
        return pack(raw, "q8")
    columns = raw.shape[1] // KINDS[kind].nbytes * KINDS[kind].block
    return pack_numbers(dequantise(kind, raw.flatten()).view(len(raw), columns), "q8")


def pack_numbers(tensor: Tensor, kind: Literal["q4", "q8"]) -> Packed:
    """A matrix of floats [rows, columns], rounded. Raises: UserError, as `quantise`."""
    name = WEIGHTS[kind]
    return pack_rows(name, quantise(name, tensor).view(len(tensor), -1))


def with_packed_weights(decoder: Decoder, kind: Literal["q4", "q8"]) -> Decoder:
    """`decoder` with its matrices rounded; those whose rows are no whole number of blocks, and those of experts, are as
    they were. Raises: UserError, where there are no kernels for that."""
    if not native.available():
        raise UserError(f"weights in {kind} need a C++ compiler (g++ or clang++), and there is none: load them as fp32")
    state, packed = decoder.state_dict(), {}
    for path, module in decoder.named_modules():
        is_matrix = isinstance(module, (nn.Linear, nn.Embedding)) and path != "position_embed"
        if is_matrix and state[f"{path}.weight"].shape[1] % COLUMNS == 0:
            packed[f"{path}.weight"] = [pack_numbers(state.pop(f"{path}.weight"), kind)]
    return build_decoder(decoder.config, state, packed)
