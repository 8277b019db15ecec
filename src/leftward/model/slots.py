"""The KV cache of a step whose shapes and addresses never change: what a GPU can record once and repeat.

A `Pool` is memory for a number of rows, all of one capacity. Each of them is a `KVCache` too, a view of its part, so
that prompts, guesses and stored beginnings work on it as on any other. `Slots` are its first rows, and the first slots
of each, for one pass over one token of each row. Where a row stands is a number in a tensor, so that nothing of the
pass but numbers differs from the next one's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leftward.config import Config
from leftward.model.cache import KVCache, dequantised, quantised, ring_places, row_bytes, slot_bytes
from leftward.model.masks import Mask
from leftward.model.positions import Angles, head_slopes, rotary_angles


class Pool:
    """Memory for `n_rows` sequences.

    Args:
        capacity, dtype, device, rewindable: of each row, as of a `KVCache`.

    Raises:
        ValueError: rows, capacity or rewindable that cannot be.
    """

    def __init__(
        self,
        config: Config,
        n_rows: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rewindable: int = 16,
    ) -> None:
        if n_rows < 1:
            raise ValueError(f"a pool of {n_rows} rows cannot be")
        self.config, self.capacity = config, capacity
        self.rows = [KVCache(config, 1, capacity, dtype, "meta", rewindable) for _ in range(n_rows)]
        """Each row as a cache by itself."""
        self.held: list[tuple[Tensor, ...]] = []
        """As `KVCache.held`, a layer, of all rows [n_rows, n_kv_heads, slots + 1, …]: the last slot is a spare one,
        which is written by rows that take no part in a step, and read by nobody."""
        for layer in range(config.n_layers):
            shapes = [(n_rows, one.shape[1], one.shape[2] + 1, one.shape[3]) for one in self.rows[0].held(layer)]
            dtypes = [one.dtype for one in self.rows[0].held(layer)]
            held = tuple(torch.zeros(*of, device=device, dtype=kind) for of, kind in zip(shapes, dtypes, strict=True))
            self.held.append(held)
            for number, row in enumerate(self.rows):
                row.hold(layer, tuple(tensor[number : number + 1, :, :-1] for tensor in held))
        # Tables, since what a step computes from Python's numbers would be copied to the device in every step.
        self.slopes = head_slopes(config)
        if self.slopes is not None:
            self.slopes = self.slopes.to(device)
        self.angles: dict[bool, Angles] = {}
        """Of all places, in local layers and in others."""
        if config.positions == "rotary":
            places = torch.arange(capacity, device=device)[None]
            for local in {config.is_local(layer) for layer in range(config.n_layers)}:
                self.angles[local] = rotary_angles(config, places, torch.float32, local)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for held in self.held for tensor in held)

    def clear(self, number: int) -> None:
        """Make a row as new. What lies beyond a row's length has no weight, but no weight times a NaN that a former
        sequence has left would be a NaN."""
        row = self.rows[number]
        row.rewind([0])
        for layer in range(self.config.n_layers):
            for tensor in row.held(layer):
                tensor.zero_()


class Slots:
    """The first rows of a pool, for one pass over one token of each. The rows' own lengths are not looked at, nor do
    they move.

    Args:
        places: int64 [n], on the pool's device: where the token of each of the first n rows stands, behind those that
            the row holds; −1: the row takes no part. Its outputs mean nothing then, and its memory stays as it is.
        span: slots that are read of each row. All places must be below it.
    """

    def __init__(self, pool: Pool, places: Tensor, span: int) -> None:
        self.config = pool.config
        self.n_rows = places.shape[0]
        self.positions = places.clamp(min=0)[:, None]
        """[n, 1]: of rows that take no part 0, where they see something, so that their outputs are numbers."""
        self._pool, self._places, self._span = pool, places, span
        self._rows = torch.arange(self.n_rows, device=places.device)
        self._written: dict[int, Tensor] = {}  # [n], for layers of so many slots

    def masks(self, local: bool, knows_positions: bool) -> list[Mask]:
        """Who sees whom in layers of a kind, whose keys are those that `append` returns."""
        layer = next(layer for layer in range(self.config.n_layers) if self.config.is_local(layer) == local)
        n_slots = self._n_slots(layer)
        keys = ring_places(self.positions, min(n_slots, self._span), n_slots)
        window = self.config.window if local else None
        slopes = self._pool.slopes if knows_positions else None
        # The last token sees what a causal one sees, in a model that is not causal too.
        return [Mask(queries=self.positions, keys=keys, window=window, slopes=slopes)]

    def angles(self, local: bool, dtype: torch.dtype) -> Angles:
        """As `rotary_angles` of the positions."""
        cos, sin, adjacent = self._pool.angles[local]
        return Angles(cos[0][self.positions].to(dtype), sin[0][self.positions].to(dtype), adjacent)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write [n, n_kv_heads, 1, head_dim] where each row stands. Returns the keys and values of the first `span`
        slots: [n, n_kv_heads, S, head_dim]."""
        held, n_slots = self._pool.held[layer], self._n_slots(layer)
        if n_slots not in self._written:
            self._written[n_slots] = torch.where(self._places >= 0, self._places % n_slots, n_slots)
        slots = self._written[n_slots]
        for mine, theirs in zip(held, quantised(keys, values, held[0].dtype), strict=True):
            mine[self._rows, :, slots] = theirs[:, :, 0]
        seen = tuple(tensor[: self.n_rows, :, : min(n_slots, self._span)] for tensor in held)
        return dequantised(seen, keys.dtype)

    def _n_slots(self, layer: int) -> int:
        return self._pool.held[layer][0].shape[2] - 1


def pool_row_bytes(config: Config, capacity: int, dtype: torch.dtype, rewindable: int = 0) -> int:
    """Of one row of a `Pool`: a cache, and a spare slot in each layer."""
    return row_bytes(config, capacity, dtype, rewindable) + config.n_layers * slot_bytes(config, dtype)
