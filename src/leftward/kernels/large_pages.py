"""Memory in pages of 2 MB instead of 4 kB: who reads all weights for every token waits less for their addresses.

Where the weights are made here they are put into such memory at once (`zeros`); where they come from elsewhere the
system is asked to move them (`use_large_pages`). It may refuse either, and other systems can't: then pages are small.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

_LARGE = 1 << 21
_PIECE = 1 << 25  # that is asked for at once
_LINE = 64  # of a cache
_COLLAPSE = 25  # MADV_COLLAPSE of Linux' madvise, from 6.1 on


def use_large_pages(tensors: Iterable[Tensor]) -> None:
    """Have the system put the memory of `tensors`, and what is between them, into large pages where it is."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors):
        if spans and begin - spans[-1][1] < _LARGE:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
    with contextlib.suppress(AttributeError, OSError, TypeError):
        madvise = ctypes.CDLL(None).madvise
        for begin, end in spans:
            first, last = -(-begin // _LARGE) * _LARGE, end // _LARGE * _LARGE
            if last > first:
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _COLLAPSE)


def zeros(*shape: int) -> Tensor:
    """uint8 of this shape. Small ones lie next to each other in one piece of memory, so that they share large pages; it
    is given back when all of them are gone."""
    global _free
    n_bytes = math.prod(shape)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=torch.uint8)
    if n_bytes >= _PIECE:
        return _mapped(n_bytes).view(shape)
    with _lock:
        if len(_free) < n_bytes:
            _free = _mapped(_PIECE)
        taken, _free = _free[:n_bytes], _free[-(-n_bytes // _LINE) * _LINE :]
    return taken.view(shape)


def _mapped(n_bytes: int) -> Tensor:
    """Memory of its own, zeros, from the beginning of a large page on."""
    memory = mmap.mmap(-1, n_bytes + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _LARGE :][:n_bytes]


_free, _lock = torch.empty(0, dtype=torch.uint8), threading.Lock()
"""What is left of a piece."""
