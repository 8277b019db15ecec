"""One new token of each of several sequences, in few fixed shapes: what a GPU records once, as a CUDA graph, and
repeats in one call. A pass of one token is hundreds of small kernels, and to launch each of them from Python takes
longer than most of them work.

On a CPU the same is computed without being recorded, which is how it is tested.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder
from leftward.model.slots import Pool, Slots

_LEAST_SPAN = 256
_WARM_UPS = 3  # passes before one is recorded, in which libraries choose their kernels and take their memory
_MOST_COMPILED = 256  # of what one process has compiled of this step; PyTorch's own limit is 8

Work = Callable[[], Tensor]
Capture = Callable[[Work], Work]
"""Gives what repeats the work: it reads from the same addresses, and has its result always in the same place."""


def can_be_recorded(decoder: Decoder) -> bool:
    """Whether the same kernels in the same shapes are every step of the model. Experts are called for as many tokens as
    choose them; a hook would be called when the step is recorded, and not when it is repeated."""
    modules = decoder.modules()
    return not decoder.config.n_experts and not any(
        module._forward_hooks or module._forward_pre_hooks for module in modules
    )


class Steps:
    """Reads one token of each of some rows of a `pool`, and says how in `path`. The decoder's weights must stay where
    they are while it is in use.

    A step reads the first n rows and the first slots of each, both rounded up to powers of two, so that there are few
    shapes, and that one short sequence doesn't pay for the whole pool. Each shape is compiled and recorded when it is
    first needed; what doesn't succeed in either is done without, with a warning.

    Args:
        compile: by torch.compile, before it is recorded.
        capture: records and repeats; None: CUDA graphs on a GPU, where the model allows it.
    """

    def __init__(self, decoder: Decoder, pool: Pool, *, compile: bool = False, capture: Capture | None = None) -> None:
        self._decoder, self._pool = decoder, pool
        if capture is None and decoder.device.type == "cuda" and can_be_recorded(decoder):
            capture = CudaGraphs(decoder.device)
        self._capture = capture
        self._compiled = torch.compile(self._read, fullgraph=True, dynamic=False) if compile else None
        self._inputs = torch.zeros(2, len(pool.rows), dtype=torch.long, device=decoder.device)
        """A token of each row, and its place."""
        self._works: dict[tuple[int, int], Work] = {}

    @property
    def path(self) -> str:
        """How a step is done."""
        parts = ["compiled"] * (self._compiled is not None) + ["recorded as CUDA graphs"] * (self._capture is not None)
        return f"steps of fixed shapes{''.join(f', {part}' for part in parts)}"

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int], caches: Sequence[KVCache]) -> Tensor:
        """`Decoder.hidden` of a token each behind what `caches`, rows of the pool, hold: [B, D]."""
        numbers = [self._pool.rows.index(cache) for cache in caches]
        places = [cache.lengths[0] for cache in caches]
        for cache in caches:
            cache.begin(1, [1])
        inputs = torch.zeros_like(self._inputs, device="cpu")
        inputs[1] = -1
        inputs[:, numbers] = torch.tensor([ids, places])
        self._inputs.copy_(inputs)
        n_rows = min(_power_of_two(max(numbers) + 1), len(self._pool.rows))
        span = min(max(_power_of_two(max(places) + 1), _LEAST_SPAN), self._pool.capacity)
        if (n_rows, span) not in self._works:
            self._works[n_rows, span] = self._work(n_rows, span)
        hidden = self._works[n_rows, span]()
        for cache in caches:
            cache.advance()
        return hidden[numbers, 0]  # a copy: the next step's result comes to the same place

    def _read(self, inputs: Tensor, n_rows: int, span: int) -> Tensor:
        return self._decoder.hidden(inputs[0, :n_rows, None], Slots(self._pool, inputs[1, :n_rows], span))

    def _work(self, n_rows: int, span: int) -> Work:
        """The step of one shape. To try it is no harm: what it writes is written again by the step itself."""
        work = functools.partial(self._read, self._inputs, n_rows, span)
        if self._compiled is not None:
            compiled = functools.partial(self._compiled, self._inputs, n_rows, span)
            try:
                with torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED):
                    compiled()
                work = compiled
            except Exception as error:  # whatever a compiler can fail with
                self._compiled = None
                _warn("compiled", error)
        if self._capture is not None:
            try:
                return self._capture(work)
            except RuntimeError as error:
                self._capture = None
                _warn("recorded as a CUDA graph", error)
        return work


class CudaGraphs:
    """Records work as CUDA graphs, which share their memory: the result of one must be read before another runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Raises: RuntimeError: it can't be recorded."""
        with torch.cuda.device(self._device):
            aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UPS):
                    work()
            here.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # Other threads, which load data, may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                result = work()

        def repeated() -> Tensor:
            graph.replay()
            return result

        return repeated


def _power_of_two(n: int) -> int:
    """The least one that is not below n."""
    return 1 << (n - 1).bit_length()


def _warn(how: str, error: Exception) -> None:
    why = next(iter(str(error).splitlines()), "")
    warnings.warn(
        f"generation goes on without steps that are {how}: {type(error).__name__}: {why}", RuntimeWarning, stacklevel=2
    )
