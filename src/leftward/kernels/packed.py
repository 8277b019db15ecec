"""Matrices in 4 or 8 bits a number, in the order in which forward.cpp reads them: blocks of 16 outputs × 32 inputs.

A block of Q4 says step · q + least, q from 0 to 15; one of Q8 says step · q, q from −127 to 127; a step and a least
number, both in fp16, serve 32 inputs of one output. That is what GGUF's Q4_0, Q4_1 and Q8_0 say too, so those are kept
bit for bit: 5 bits a number and 8.5.
"""

from __future__ import annotations

import ctypes
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leftward.kernels import forward, large_pages, native
from leftward.kernels.forward import Op, Rounded, Work

ROWS, COLUMNS = 16, 32
_BYTES = {"q4": 320, "q8": 544}  # of our blocks, and
_BYTES_IN_FILES = {"q4": 20, "q8": 34}  # of those of 1 × 32


class Packed(NamedTuple):
    """A matrix [rows, columns]."""

    kind: Literal["q4", "q8"]
    data: Tensor
    """uint8 [⌈rows / 16⌉, columns / 32, bytes of a block]"""
    rows: int
    columns: int

    @property
    def number(self) -> int:
        return forward.Q4 if self.kind == "q4" else forward.Q8

    @property
    def nbytes(self) -> int:
        return self.data.numel()


def pack(raw: Tensor, kind: Literal["q4", "q8"]) -> Packed:
    """Put a file's blocks in order: uint8 [rows, bytes], a row blocks of GGUF's Q4_1 or Q8_0."""
    raw = raw.contiguous()
    rows, n_blocks = len(raw), raw.shape[1] // _BYTES_IN_FILES[kind]
    data = large_pages.zeros(-(-rows // ROWS), n_blocks, _BYTES[kind])
    addresses = (ctypes.c_void_p(forward.address(tensor)) for tensor in (raw, data))
    numbers = (ctypes.c_int64(number) for number in (kind == "q4", rows, n_blocks))
    native.library().leftward_pack(*addresses, *numbers)
    return Packed(kind, data, rows, n_blocks * COLUMNS)


def unpack(packed: Packed, rows: Tensor | None = None) -> Tensor:
    """The numbers, fp32 [rows, columns]; of some `rows` [n] only: [n, columns]."""
    blocks = packed.data if rows is None else packed.data[rows // ROWS]  # [strips, columns / 32, bytes]
    n = len(blocks)
    of_q = blocks[..., : 256 if packed.kind == "q4" else 512]
    if packed.kind == "q4":
        q = torch.cat((of_q & 15, of_q >> 4), dim=-1).float()
    else:
        q = of_q.contiguous().view(torch.int8).float()
    q = q.view(n, -1, 8, ROWS, 4).permute(0, 3, 1, 2, 4).reshape(n, ROWS, -1, COLUMNS)
    behind = blocks[..., of_q.shape[-1] :].contiguous().view(torch.float16).float().unflatten(-1, (-1, ROWS))
    numbers = q * behind[:, :, 0].transpose(1, 2)[..., None]
    if packed.kind == "q4":
        numbers = numbers + behind[:, :, 1].transpose(1, 2)[..., None]
    numbers = numbers.flatten(2)  # [strips, 16, columns]
    if rows is None:
        return numbers.flatten(0, 1)[: packed.rows]
    return numbers[torch.arange(n), rows % ROWS]


def packed_of(module: nn.Module) -> dict[str, list[Packed]]:
    """The packed matrices in it, under the names that they would have in a state dict."""
    named = module.named_modules(remove_duplicate=False)
    return {f"{path}.weight": m.parts for path, m in named if isinstance(m, (PackedLinear, PackedEmbedding))}


class PackedLinear(nn.Module):
    """x Wᵀ + b for a W of packed parts, one below the other: q, k and v of one file may differ in kind."""

    def __init__(self, parts: list[Packed], bias: Tensor | None = None) -> None:
        super().__init__()
        self.parts = parts
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.in_features, self.out_features = parts[0].columns, sum(part.rows for part in parts)

    def forward(self, x: Tensor) -> Tensor:  # fp32 [..., in_features] → [..., out_features]
        flat = x.float().reshape(-1, self.in_features).contiguous()
        out = torch.empty(len(flat), self.out_features)
        ops = self.ops(source=0, target=1, out_width=self.out_features)
        Work(ops, [flat, out], Rounded.of(len(flat), self.in_features))(len(flat))
        return out.view(*x.shape[:-1], self.out_features)

    def ops(self, source: int, target: int, out_width: int, adds: bool = False, scale: float = 1.0) -> list[Op]:
        """The operations of `forward`, between two buffers; `adds`: `scale` times the result to what is there."""
        ops, offset = [], 0
        bias = None if self.bias is None else self.bias.detach()
        for part in self.parts:
            op = Op(kind=forward.LINEAR, in_=source, out=target, width=self.in_features, rows=part.rows)
            op.out_width, op.offset, op.scale = out_width, offset, scale
            op.variant = part.number | (forward.ADDS if adds else 0) | (forward.AGAIN if offset else 0)
            op.weights = forward.address(part.data)
            op.bias = None if bias is None else forward.address(bias[offset : offset + part.rows])
            ops.append(op)
            offset += part.rows
        return ops

    @property
    def weight(self) -> Tensor:
        """The numbers of W, fp32, made anew."""
        return torch.cat([unpack(part) for part in self.parts])

    def extra_repr(self) -> str:
        kinds = "+".join(dict.fromkeys(part.kind for part in self.parts))
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={kinds}"


class PackedEmbedding(nn.Module):
    """Rows of a packed table, which a tied head shares."""

    def __init__(self, parts: list[Packed]) -> None:
        super().__init__()
        (self.table,) = self.parts = parts

    def forward(self, ids: Tensor) -> Tensor:  # [...] → fp32 [..., columns]
        some, places = ids.unique(return_inverse=True)
        return F.embedding(places, unpack(self.table, some))

    @property
    def weight(self) -> Tensor:
        return unpack(self.table)
