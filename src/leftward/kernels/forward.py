"""forward.cpp from Python: operations and what they work on, field by field as they stand there, and the call."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from leftward.kernels import native

EMBED, POSITION, RMS_NORM, LAYER_NORM, LINEAR, ATTEND, ACTIVATE, ADD = range(8)
"""Kinds of operations."""
FP32, BF16, Q4, Q8, INT8 = range(5)
"""Kinds of numbers."""
ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped", "gelu", "gelu_tanh", "relu", "relu2")
ADDS, AGAIN = 1 << 8, 1 << 9
"""Variants of LINEAR: it adds to what is there; its input is that of the operation before."""


class Rounded(NamedTuple):
    """Room for activations in 8 bits."""

    numbers: Tensor
    """int8 [n_tokens, width]"""
    steps: Tensor
    """fp32 [n_tokens, width / 32, 3]: of each block what a number counts, that times their sum, and their sum."""

    @classmethod
    def of(cls, n_tokens: int, width: int) -> Rounded:
        return cls(torch.empty(n_tokens, width, dtype=torch.int8), torch.empty(n_tokens, -(-width // 32), 3))


class Op(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("kind", "in_", "out", "width", "rows", "out_width", "offset", "variant")),
        *((name, c_void_p) for name in ("weights", "bias")),
        *((name, c_float) for name in ("scale", "eps")),
    )


class Attention(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("layer", "n_heads", "n_kv_heads", "head_dim", "rope_dim", "adjacent")),
        *((name, c_int64) for name in ("window", "norms_whole")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "cosines", "sines", "slopes", "sinks")),
        *((name, c_float) for name in ("eps", "scale", "softcap")),
        ("has_norm", c_int32),
    )


CACHE_FIELDS = 5
"""Whole numbers that describe a layer's and row's part of a KV cache: the addresses of keys, values, and where they are
int8 of their scales, and the number of slots."""


class _Pass(ctypes.Structure):
    _fields_ = (
        ("buffers", c_void_p),
        ("n_tokens", c_int64),
        *((name, c_void_p) for name in ("ids", "rows", "places", "caches")),
        *((name, c_int64) for name in ("n_rows", "cache_type")),
        *((name, c_void_p) for name in ("overwrites", "rounded", "steps")),
    )


class Work:
    """Operations on buffers, to be worked off again and again: what stays is looked up once.

    Args:
        ops: in their order.
        buffers: [n_tokens, width] each, as the operations count them.
        rounded: room for the widest input of packed weights.
    """

    def __init__(self, ops: Sequence[Op], buffers: Sequence[Tensor], rounded: Rounded | None = None) -> None:
        self._kept = ((Op * len(ops))(*ops), buffers, rounded)
        self.addresses = (c_void_p * len(buffers))(*map(address, buffers))
        """Of the buffers; another one may take a place."""
        self._pass = _Pass(buffers=ctypes.addressof(self.addresses))
        if rounded is not None:
            self._pass.rounded, self._pass.steps = address(rounded.numbers), address(rounded.steps)
        self._arguments = self._kept[0], c_int64(len(ops)), ctypes.byref(self._pass)

    def __call__(
        self,
        n_tokens: int,
        tokens: array[int] | None = None,
        caches: Tensor | None = None,
        cache_type: int = 0,
        overwrites: Tensor | None = None,
    ) -> None:
        """On the first `n_tokens` rows of the buffers.

        Args:
            tokens: int64 [3 · n_tokens]: the tokens' ids, then their rows of the cache, then their places; the tokens
                of a row follow one another.
            caches: int64 [layers, rows, CACHE_FIELDS].
            cache_type: the kind of its numbers.
            overwrites: int64 [layers], 1 where what is written takes the place of what the pass's own first tokens see.
        """
        this = self._pass
        this.n_tokens = n_tokens
        if tokens is not None:
            assert caches is not None
            first = tokens.buffer_info()[0]
            this.ids, this.rows, this.places = first, first + 8 * n_tokens, first + 16 * n_tokens
            this.caches, this.n_rows, this.cache_type = address(caches), caches.shape[1], cache_type
            this.overwrites = address(overwrites)
        native.library().leftward_forward(*self._arguments)


def address(tensor: Tensor | None) -> int | None:
    """Of a contiguous tensor's first number."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def kind_of(dtype: torch.dtype) -> int:
    """Raises: KeyError, for a dtype that there is no kernel for."""
    return {torch.float32: FP32, torch.bfloat16: BF16, torch.int8: INT8}[dtype]
