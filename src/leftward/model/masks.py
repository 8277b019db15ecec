"""Who may look at whom. A mask is data: a few rules over places in the sequence, composed freely. It becomes a tensor
only where no kernel can do without one, and then for a block of queries and the keys that these can reach.

Rows of a batch are padded on the right, never on the left, so that what lies beyond a row's length is to the right of
everything real. "The query at place p sees places ≤ p" then covers prefill, decode, chunks, and rows of unequal length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from leftward.config import Config

_KEPT = 1 << 20  # elements of a mask that a layer leaves for the next


@dataclass(frozen=True, kw_only=True)
class Mask:
    """The keys that a batch of queries sees."""

    queries: Tensor
    """[B or 1, T]: the place of each query in its sequence."""
    keys: Tensor
    """[B or 1, S]: the place of each key; −1 where there is none."""
    causal: bool = True
    window: int | None = None
    """Keys this far away, or further, are unseen."""
    prefix_lengths: Tensor | None = None
    """[B, 1]: places below it see each other, whatever their order (prefix-LM)."""
    documents: tuple[Tensor, Tensor] | None = None
    """Numbers of the queries' documents [B, T] and of the keys' [B, S]: only equal ones see each other."""
    ends: Tensor | None = None
    """[B, 1]: places from it on are padding, which only itself sees. Not needed where all that is right is unseen."""
    slopes: Tensor | None = None
    """[H]: ALiBi: a score falls by the head's slope a place of distance."""
    offset: int | None = None
    """Query i's own key is in column i + offset, and the columns are in the order of their places. None: not so."""
    shortcut: Literal["causal", "all"] | None = None
    """What the rules come to, where a kernel can apply it without a tensor: queries and keys are the same places and
    each sees those up to its own; every key is seen."""

    _made: dict[tuple[int, ...], Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def visible(self, rows: slice, columns: slice) -> Tensor:
        """bool [B or 1, 1, t, s]: True where the query sees the key."""
        key = (rows.start, rows.stop, columns.start, columns.stop)
        if key in self._made:
            return self._made[key]
        seen = self._visible(rows, columns)
        if seen.numel() <= _KEPT:
            self._made[key] = seen
        return seen

    @property
    def _looks_ahead(self) -> bool:
        return not self.causal or self.prefix_lengths is not None

    def _visible(self, rows: slice, columns: slice) -> Tensor:
        queries, keys = self.queries[:, rows, None], self.keys[:, None, columns]
        seen = keys >= 0
        if self.causal:
            past = keys <= queries
            seen = seen & (past if self.prefix_lengths is None else past | (keys < self.prefix_lengths[..., None]))
        if self.ends is not None:
            seen = seen & ((keys < self.ends[..., None]) | (keys == queries))
        if self.window is not None:
            seen = seen & (keys > queries - self.window)
            if self._looks_ahead:
                seen = seen & (keys < queries + self.window)
        if self.documents is not None:
            of_queries, of_keys = self.documents
            seen = seen & (of_queries[:, rows, None] == of_keys[:, None, columns])
        # Rules that look at keys alone leave one row for all queries.
        return seen.expand(-1, queries.shape[1], -1).unsqueeze(1)

    def bias(self, rows: slice, columns: slice) -> Tensor:
        """fp32 [B or 1, H, t, s]: what ALiBi adds to the scores."""
        assert self.slopes is not None
        distance = (self.queries[:, rows, None].float() - self.keys[:, None, columns].float()).unsqueeze(1)
        return self.slopes[:, None, None] * -distance.abs()

    def columns(self, start: int, stop: int) -> slice:
        """The columns that queries start … stop − 1 can reach at most."""
        n_keys = self.keys.shape[1]
        if self.offset is None:
            return slice(0, n_keys)
        last = n_keys if self._looks_ahead else stop + self.offset
        if self.window is None:
            return slice(0, last)
        if self._looks_ahead:
            last = min(last, stop + self.offset + self.window - 1)
        return slice(max(0, start + self.offset - self.window + 1), last)


def document_positions(documents: Tensor) -> Tensor:
    """Positions that begin anew in each document: [B, T] numbers of documents → [B, T]."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - places.where(begins, 0).cummax(dim=1).values


@dataclass(frozen=True)
class Layout:
    """Where the keys that `append` returns come from; as in `Mask`."""

    keys: Tensor
    """[B or 1, S]: the place of each key; −1 where there is none."""
    offset: int | None
    all_seen: bool = False
    """Every key is real, and in the past and the window of every query."""


def make_mask(
    config: Config,
    local: bool,
    places: Tensor,
    layout: Layout,
    starts: list[int],
    counts: list[int],
    documents: Tensor | None,
    prefix_lengths: list[int] | None,
    slopes: Tensor | None = None,
) -> Mask:
    """Who sees whom in layers of one kind."""
    n_new, device = places.shape[1], places.device
    window = config.window if local else None
    prefix = None
    if prefix_lengths is not None:
        prefix = torch.tensor(prefix_lengths, device=device)[:, None]
    of_documents = None
    if documents is not None:
        batch = documents.shape[0]
        of_queries = documents.gather(1, places.expand(batch, -1))
        of_documents = (of_queries, documents.gather(1, layout.keys.clamp(min=0).expand(batch, -1)))
    ends = None
    if not config.causal:
        real = [start + count for start, count in zip(starts, counts, strict=True)]
        ends = torch.tensor(real, device=device)[:, None]
    shortcut: Literal["causal", "all"] | None = None
    fits = window is None or max(starts) + n_new <= window
    if documents is None and prefix is None:
        if config.causal:
            is_whole = layout.offset == 0 and fits
            shortcut = "causal" if is_whole else "all" if layout.all_seen else None
        elif fits and layout.offset == max(starts) and set(counts) == {n_new}:
            shortcut = "all"
    return Mask(
        queries=places,
        keys=layout.keys,
        causal=config.causal,
        window=window,
        prefix_lengths=prefix,
        documents=of_documents,
        ends=ends,
        slopes=slopes,
        offset=layout.offset,
        shortcut=shortcut,
    )
