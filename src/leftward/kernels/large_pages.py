"""Memory in pages of 2 MB instead of 4 kB: who reads all weights for every token waits less for their addresses."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable

from torch import Tensor

_LARGE = 1 << 21
_COLLAPSE = 25  # MADV_COLLAPSE of Linux' madvise, from 6.1 on


def use_large_pages(tensors: Iterable[Tensor]) -> None:
    """Have the system put the memory of `tensors`, and what is between them, into large pages where it is. It may
    refuse, and other systems can't: then all stays as it is."""
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
