"""The KV cache: keys and values of the tokens already seen, so that each new token costs one short pass.

Preallocated, with a length for each row. In a global layer a token's slot is its place in the sequence. In a local
layer the slots are a ring: a new token takes that of one which has left the window, so that memory is bounded by it.

A `KVCache` has rows of one size, read together. `Rows` are caches of one row each, read together too: sequences that
come and go, each with memory of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from leftward.config import Config
from leftward.model.masks import Layout


class KVCache:
    """2 · n_kv_heads · head_dim numbers a slot and row, in each layer.

    Args:
        batch: rows.
        capacity: tokens that a row can hold.
        dtype: of what is kept, which all queries see so, those of the same pass too. int8 keeps the numbers of a token
            and head as −127 … 127 and one fp32 scale.
        rewindable: how many of a row's last tokens can be taken back where a window has rolled. That many slots more
            than the window are kept.
    """

    def __init__(
        self,
        config: Config,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rewindable: int = 16,
    ) -> None:
        if batch < 1 or capacity < 1 or rewindable < 0:
            raise ValueError(f"a KV cache of {batch} rows, {capacity} tokens, {rewindable} rewindable cannot be")
        self.config = config
        self.capacity = capacity
        self.window = config.window
        self.rewindable = rewindable
        slots = _slots(config, capacity, rewindable)
        shapes = [(batch, config.n_kv_heads, n, config.head_dim) for n in slots]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        scales = [shape[:-1] for shape in shapes] if dtype == torch.int8 else []
        self.key_scales = [torch.zeros(*shape, 1, device=device) for shape in scales]
        """[batch, n_kv_heads, slots, 1] a layer, where the numbers are int8."""
        self.value_scales = [torch.zeros(*shape, 1, device=device) for shape in scales]
        self.lengths = [0] * batch  # tokens held, a row
        self.documents: Tensor | None = None
        """[batch, places]: the number of each place's document, where there are several."""
        self.prefix_lengths = [0] * batch
        """How many of each row's tokens have seen each other, whatever their order."""
        self._ring = _ring(config, capacity, rewindable)
        self._longest = [0] * batch  # that each row has been, which says what its rings have overwritten
        self._n_new, self._counts = 0, [0] * batch

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.keys + self.values + self.key_scales + self.value_scales)

    def held(self, layer: int) -> tuple[Tensor, ...]:
        """Keys and values [batch, n_kv_heads, slots, head_dim]; where they are int8, each with its scales behind it."""
        if self.key_scales:
            return self.keys[layer], self.key_scales[layer], self.values[layer], self.value_scales[layer]
        return self.keys[layer], self.values[layer]

    def hold(self, layer: int, tensors: tuple[Tensor, ...]) -> None:
        """Keep a layer in these, of the shapes that `held` has."""
        if self.key_scales:
            self.keys[layer], self.key_scales[layer], self.values[layer], self.value_scales[layer] = tensors
        else:
            self.keys[layer], self.values[layer] = tensors

    def begin(self, n_new: int, counts: list[int]) -> None:
        """Announce a forward pass over `n_new` tokens, of which `counts[row]` are real and the rest is padding.

        Raises:
            ValueError: there is no room for them.
        """
        needed = max(length + count for length, count in zip(self.lengths, counts, strict=True))
        if needed > self.capacity:
            raise ValueError(f"the KV cache holds {self.capacity} tokens a row; {needed} are needed")
        self._n_new, self._counts = n_new, counts

    def layout(self, local: bool) -> Layout:
        """What `append` will return in layers of this kind."""
        device = self.keys[0].device
        if not any(self.lengths):
            return Layout(torch.arange(self._n_new, device=device)[None], offset=0)
        equal = self._rows_are_equal()
        if not (local and self._rolls):
            end = self._end
            last = self.lengths[0] + self._n_new
            fits = self.window is None or not local or end <= self.window
            return Layout(
                torch.arange(end, device=device)[None],
                offset=self.lengths[0] if equal and end == last else None,
                all_seen=equal and self._n_new == 1 and end == last and fits,
            )
        assert self.window is not None
        lengths = torch.tensor(self.lengths[:1] if equal else self.lengths, device=device)[:, None]
        if self._is_one_each:
            n_slots = min(self._ring, self._end)
            places = ring_places(lengths, n_slots, self._ring)
            return Layout(places, offset=None, all_seen=equal and n_slots <= self.window)
        before = lengths - (self.window - 1) + torch.arange(self.window - 1, device=device)
        new = lengths + torch.arange(self._n_new, device=device)
        return Layout(torch.cat((before.clamp(min=-1), new), dim=1), offset=self.window - 1)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the real ones of [B, n_kv_heads, T, head_dim] behind each row's length.

        Returns the keys and values that the new tokens' queries may see, in the order that `layout` says:
        [B, n_kv_heads, S, head_dim]. The lengths move once a forward pass, in `advance`.
        """
        held = self.held(layer)
        new = quantised(keys, values, held[0].dtype)
        seen: tuple[Tensor, ...]
        if not any(self.lengths):
            seen = new
            self._write(held, new)
        elif held[0].shape[2] == self.capacity:
            self._write(held, new)
            seen = tuple(tensor[:, :, : self._end] for tensor in held)
        elif self._is_one_each:
            self._write(held, new)
            n = min(self._ring, self._end)
            seen = tuple(tensor[:, :, :n] for tensor in held)
        else:  # what is overwritten now may still be seen by the first of the new queries
            seen = tuple(map(self._behind_window, held, new))
            self._write(held, new)
        return dequantised(seen, keys.dtype)

    def documents_up_to(self, end: int, new: Tensor | None) -> Tensor | None:
        """The numbers of the documents of all places below `end`, [batch, end], with the `new` ones [batch, T] behind
        each row's length; without new ones, each row goes on with its last. None: nobody has spoken of documents."""
        if new is None and self.documents is None:
            return None
        if self.documents is None:
            self.documents = torch.zeros(len(self.lengths), end, dtype=torch.int64, device=self.keys[0].device)
        if (short := end - self.documents.shape[1]) > 0:
            self.documents = F.pad(self.documents, (0, short))
        for row, length in enumerate(self.lengths):
            if new is not None:
                self.documents[row, length : length + self._n_new] = new[row]
            else:
                last = self.documents[row, length - 1].clone() if length else 0
                self.documents[row, length : length + self._n_new] = last
        return self.documents[:, :end]

    def advance(self) -> None:
        """Count the tokens that the forward pass has written."""
        self.lengths = [length + count for length, count in zip(self.lengths, self._counts, strict=True)]
        self._longest = list(map(max, self._longest, self.lengths))

    def rewind(self, lengths: list[int]) -> None:
        """Forget each row's tokens beyond its new length.

        Raises:
            ValueError: a row is shorter than that, or its window has rolled too far to get back what it held then.
        """
        if any(type(new) is not int or not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)):
            raise ValueError(f"cannot rewind rows of {self.lengths} tokens to {lengths}")
        if any(0 < new < prefix for new, prefix in zip(lengths, self.prefix_lengths, strict=True)):
            raise ValueError(
                f"cannot rewind to {lengths}, into prefixes of {self.prefix_lengths}: what is kept has seen the rest"
            )
        if self._rolls:
            assert self.window is not None
            for new, longest in zip(lengths, self._longest, strict=True):
                oldest = max(0, longest - self._ring)
                if new and max(0, new - self.window + 1) < oldest:
                    raise ValueError(
                        f"cannot rewind a row of {longest} tokens to {new}: its window of {self.window} has rolled on, "
                        f"and {self._ring - self.window} tokens can be taken back (rewindable)"
                    )
        self.lengths = list(lengths)
        self.prefix_lengths = [prefix if new else 0 for new, prefix in zip(lengths, self.prefix_lengths, strict=True)]
        self._longest = [longest if new else 0 for new, longest in zip(lengths, self._longest, strict=True)]

    def fork(self, rows: list[int]) -> KVCache:
        """A cache whose row i starts as a copy of this one's row rows[i]; the two share nothing."""
        if not rows or not all(0 <= row < len(self.lengths) for row in rows):
            raise ValueError(f"cannot fork rows {rows} of a cache of {len(self.lengths)}")
        child = copy.copy(self)
        child.keys = [keys[rows] for keys in self.keys]  # a list as index copies
        child.values = [values[rows] for values in self.values]
        child.key_scales = [scales[rows] for scales in self.key_scales]
        child.value_scales = [scales[rows] for scales in self.value_scales]
        child.documents = None if self.documents is None else self.documents[rows]
        child.lengths = [self.lengths[row] for row in rows]
        child.prefix_lengths = [self.prefix_lengths[row] for row in rows]
        child._longest = [self._longest[row] for row in rows]
        child._counts = [0] * len(rows)
        return child

    def grow(self, capacity: int) -> None:
        """Room for more tokens a row; what is held stays."""
        if capacity < self.capacity:
            raise ValueError(f"a KV cache for {self.capacity} tokens cannot grow to {capacity}")
        self.capacity = capacity
        self._ring = _ring(self.config, capacity, self.rewindable)
        # Layer by layer, so that no more than one is there twice.
        for tensors in (self.keys, self.values, self.key_scales, self.value_scales):
            for layer, n in zip(range(len(tensors)), _slots(self.config, capacity, self.rewindable), strict=False):
                if (more := n - tensors[layer].shape[2]) > 0:
                    tensors[layer] = F.pad(tensors[layer], (0, 0, 0, more))

    def cut(self, start: int, stop: int) -> list[tuple[Tensor, ...]]:
        """A copy of what a cache of one row holds of the places start … stop − 1, for each layer; of a ring the last
        ones. `paste` puts it into another cache."""
        parts = []
        for layer in range(self.config.n_layers):
            held = self.held(layer)
            n = min(stop - start, held[0].shape[2])
            slots = torch.arange(stop - n, stop, device=held[0].device) % held[0].shape[2]
            parts.append(tuple(tensor.index_select(2, slots) for tensor in held))
        return parts

    def paste(self, stop: int, parts: list[tuple[Tensor, ...]]) -> None:
        """Go on with what another cache held of the places behind this one's length, up to `stop`."""
        for layer, part in enumerate(parts):
            held = self.held(layer)
            n = min(part[0].shape[2], held[0].shape[2])
            slots = torch.arange(stop - n, stop, device=held[0].device) % held[0].shape[2]
            for mine, theirs in zip(held, part, strict=True):
                mine.index_copy_(2, slots, theirs[:, :, theirs.shape[2] - n :])
        self.lengths = [stop]
        self._longest = list(map(max, self._longest, self.lengths))

    @property
    def _rolls(self) -> bool:
        return self._ring < self.capacity

    @property
    def _end(self) -> int:
        """The largest length after this pass."""
        return max(length + count for length, count in zip(self.lengths, self._counts, strict=True))

    @property
    def _is_one_each(self) -> bool:
        return self._n_new == 1 and min(self._counts) == 1

    def _rows_are_equal(self) -> bool:
        return len(set(zip(self.lengths, self._counts, strict=True))) == 1

    def _write(self, held: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> None:
        n_slots, device = held[0].shape[2], held[0].device
        if self._is_one_each and not self._rows_are_equal():
            slots = torch.tensor([length % n_slots for length in self.lengths], device=device)
            rows = torch.arange(len(slots), device=device)
            for mine, theirs in zip(held, new, strict=True):
                mine[rows, :, slots] = theirs[:, :, 0]
            return
        all_rows = self._rows_are_equal()
        for row in [slice(None)] if all_rows else range(len(self.lengths)):
            first = 0 if isinstance(row, slice) else row
            length, count = self.lengths[first], self._counts[first]
            start, kept = length % n_slots, min(count, n_slots)
            for mine, theirs in zip(held, new, strict=True):
                if count <= n_slots - start:
                    mine[row, ..., start : start + count, :] = theirs[row, ..., :count, :]
                else:
                    slots = torch.arange(length + count - kept, length + count, device=device) % n_slots
                    mine[row].index_copy_(-2, slots, theirs[row, ..., count - kept : count, :])

    def _behind_window(self, held: Tensor, new: Tensor) -> Tensor:
        """The window − 1 tokens before each row's new ones, then these: [B, n_kv_heads, window − 1 + T, head_dim]."""
        assert self.window is not None
        lengths = torch.tensor(self.lengths, device=held.device)[:, None]
        slots = (lengths - (self.window - 1) + torch.arange(self.window - 1, device=held.device)) % self._ring
        before = held.gather(2, slots[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3]))
        return torch.cat((before, new), dim=2)


class Rows:
    """Caches of one row each, to be read in one pass: they have nothing in common but the model. Each is attended to by
    itself, so that its result has no part in how many others there are, and how long."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches = caches
        self.config = caches[0].config

    @property
    def lengths(self) -> list[int]:
        return [cache.lengths[0] for cache in self.caches]

    @property
    def capacity(self) -> int:
        """Of the largest."""
        return max(cache.capacity for cache in self.caches)

    def begin(self, n_new: int, counts: list[int]) -> None:
        """As of a `KVCache`: `counts[row]` of `n_new` tokens are real."""
        for cache, count in zip(self.caches, counts, strict=True):
            cache.begin(count, [count])

    def advance(self) -> None:
        for cache in self.caches:
            cache.advance()


def row_bytes(config: Config, capacity: int, dtype: torch.dtype, rewindable: int = 0) -> int:
    """Of a KV cache of one row."""
    return slot_bytes(config, dtype) * sum(_slots(config, capacity, rewindable))


def slot_bytes(config: Config, dtype: torch.dtype) -> int:
    """Of one token's keys and values in one layer."""
    return 2 * config.n_kv_heads * (config.head_dim * dtype.itemsize + (4 if dtype == torch.int8 else 0))


def ring_places(lengths: Tensor, n_slots: int, ring: int) -> Tensor:
    """[B, n_slots]: the newest place that each of the first slots of a ring has held, once the token at place `lengths`
    [B, 1] is written; −1: none yet. A ring that has not rolled has each place in the slot of its number."""
    return (lengths - (lengths - torch.arange(n_slots, device=lengths.device)) % ring).clamp(min=-1)


def _ring(config: Config, capacity: int, rewindable: int) -> int:
    return capacity if config.window is None else min(capacity, config.window + rewindable)


def _slots(config: Config, capacity: int, rewindable: int) -> list[int]:
    """Of each layer."""
    ring = _ring(config, capacity, rewindable)
    return [ring if config.is_local(layer) else capacity for layer in range(config.n_layers)]


def quantised(keys: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Keys and values [B, n_kv_heads, T, head_dim] as a cache of `dtype` keeps them; int8 ones each with its scales
    behind it."""
    if dtype == torch.int8:
        return (*_quantised(keys), *_quantised(values))
    return keys.to(dtype), values.to(dtype)


def dequantised(held: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Back from that."""
    if len(held) == 2:
        return held[0].to(dtype), held[1].to(dtype)
    keys, of_keys, values, of_values = held
    return (keys * of_keys).to(dtype), (values * of_values).to(dtype)


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [B, n_kv_heads, T, head_dim] and the fp32 scales [B, n_kv_heads, T, 1] that bring it back."""
    scales = x.detach().float().abs().amax(dim=-1, keepdim=True) / 127
    return (x.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8), scales
