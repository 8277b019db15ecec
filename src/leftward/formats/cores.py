"""Many small operations on all cores. PyTorch's own threads meet after every one of them, and where cores are shared
with other work they wait for each other ten times as long as they work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import torch
from torch import Tensor

_pool: ContextVar[ThreadPoolExecutor | None] = ContextVar("pool")


@contextlib.contextmanager
def one_thread_an_operation() -> Iterator[ThreadPoolExecutor | None]:
    """PyTorch's operations run on the thread that calls them. Gives as many threads as it had, None where that is one:
    starting them anew for every tensor of a model would cost a tenth of the time."""
    if (pool := _pool.get(...)) is not ...:
        yield pool
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) if threads > 1 else contextlib.nullcontext() as pool:
            token = _pool.set(pool)
            try:
                yield pool
            finally:
                _pool.reset(token)
    finally:
        torch.set_num_threads(threads)


def on_all_cores(work: Callable[[Tensor, Tensor], object], parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    """`work` on each of `parts`, which don't share anything that is written. Its errors are raised."""

    def work_on(part: tuple[Tensor, Tensor]) -> None:
        with torch.inference_mode():  # a thread doesn't have its caller's mode
            work(*part)

    parts = list(parts)
    with one_thread_an_operation() as pool:
        list(map(work_on, parts) if pool is None or len(parts) < 2 else pool.map(work_on, parts))
