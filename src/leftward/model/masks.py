"""Who may look at whom. A mask is data, and becomes a dense tensor only where no kernel can do without one.

A key's slot in the cache is its position, so one rule covers prefill, decode, and rows of unequal length: the query
at position p sees the keys at slots ≤ p. What lies beyond a row's length (padding, a rewound tail) is to its right,
unseen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """The visible keys of a batch of queries.

    is_causal: queries and keys are the same positions 0 … T−1, so the kernel's own causal rule is right. (With fewer
        queries than keys PyTorch's rule would be aligned to the top left, which is wrong for a cached decode.)
    dense: bool [B or 1, 1, T, S], True where the query sees the key; None with is_causal False: every key is seen.
    """

    is_causal: bool
    dense: Tensor | None = None


def causal_mask(starts: list[int], n_queries: int, device: torch.device) -> Mask:
    """The mask of queries at positions start, start + 1, … of each row, over keys in all slots up to the last query."""
    if not any(starts):
        return Mask(is_causal=True)
    same = len(set(starts)) == 1
    if same and n_queries == 1:
        return Mask(is_causal=False)
    first = torch.tensor(starts[:1] if same else starts, device=device)  # [B or 1]
    queries = first[:, None] + torch.arange(n_queries, device=device)  # [B or 1, T]
    keys = torch.arange(max(starts) + n_queries, device=device)  # [S]
    return Mask(is_causal=False, dense=(keys <= queries[..., None]).unsqueeze(1))
