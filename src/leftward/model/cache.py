"""The KV cache: keys and values of the tokens already seen, so that each new token costs one short pass.

Preallocated. Each row has its own length, and a token's slot is its position; see masks.py for why that is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leftward.config import Config


class KVCache:
    """2 · n_layers · n_kv_heads · head_dim numbers a token and row.

    Args:
        batch: rows.
        capacity: tokens that a row can hold.
    """

    def __init__(
        self,
        config: Config,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.n_layers, batch, config.n_kv_heads, capacity, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * batch  # tokens held, a row

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write [B, n_kv_heads, T, head_dim] behind each row's length.

        Returns all that `layer` now holds: [B, n_kv_heads, S, head_dim] with S = max(lengths) + T. The lengths move
        once a forward pass, in `advance`.
        """
        n_new = keys.shape[2]
        end = max(self.lengths) + n_new
        if end > self.capacity:
            raise ValueError(f"the KV cache holds {self.capacity} tokens a row; {end} are needed")
        for held, new in ((self.keys[layer], keys), (self.values[layer], values)):
            if len(set(self.lengths)) == 1:
                held[:, :, end - n_new : end] = new
            else:
                for row, start in enumerate(self.lengths):
                    held[row, :, start : start + n_new] = new[row]
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, counts: list[int]) -> None:
        """Count the tokens just written: `counts[row]` of them are real, the rest was padding."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def rewind(self, lengths: list[int]) -> None:
        """Forget each row's tokens beyond its new length."""
        if any(not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)):
            raise ValueError(f"cannot rewind rows of {self.lengths} tokens to {lengths}")
        self.lengths = list(lengths)

    def fork(self, rows: list[int]) -> KVCache:
        """A cache whose row i starts as a copy of this one's row rows[i]; the two share nothing."""
        child = object.__new__(KVCache)
        child.keys = self.keys[:, rows]  # a list as index copies
        child.values = self.values[:, rows]
        child.lengths = [self.lengths[row] for row in rows]
        return child
