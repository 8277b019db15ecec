"""Many small operations on all cores. PyTorch's own threads meet after every one of them, and where cores are shared
with other work they wait for each other ten times as long as they work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import torch
from torch import Tensor

_threads: ContextVar[int] = ContextVar("threads")


@contextlib.contextmanager
def one_thread_an_operation() -> Iterator[int]:
    """PyTorch's operations run on the thread that calls them. Gives how many threads there may be."""
    if threads := _threads.get(0):
        yield threads
        return
    threads = torch.get_num_threads()
    token = _threads.set(threads)
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
        _threads.reset(token)


def on_all_cores(work: Callable[[Tensor, Tensor], object], parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    """`work` on each of `parts`, which don't share anything that is written. Its errors are raised."""

    def work_on(part: tuple[Tensor, Tensor]) -> None:
        with torch.inference_mode():  # a thread doesn't have its caller's mode
            work(*part)

    parts = list(parts)
    with one_thread_an_operation() as threads:
        if min(threads, len(parts)) < 2:
            for part in parts:
                work_on(part)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work_on, parts))
