"""The places in a Decoder that can be looked at and changed: their names, the same for all architectures, and for each
the module on which a hook finds it.

A layer's are called layers.N.resid.pre and so on; embed, norm and logits belong to the model as a whole.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from leftward.errors import UserError, nearest
from leftward.model.attention import (
    Attended,
    Attention,
    attention_scores,
    attention_weights,
    for_each_head,
    is_written_out,
)
from leftward.model.block import Block
from leftward.model.decoder import Decoder
from leftward.model.experts import Experts
from leftward.model.masks import Mask

Value = Any
"""What a hook is given: a tensor, or several of attention's."""

_SCORES_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Site:
    """One place. `read` takes a tensor out of what the hook is given, `write` gives that with another tensor in it."""

    name: str
    axes: str
    """A letter for each: B rows, T positions, S places of keys, H heads, K key/value heads, d numbers of a head, D of
    the stream, F of the feed-forward's hidden layer, E experts, V tokens."""
    module: nn.Module
    side: Literal["input", "output"]
    read: Callable[[Value], Tensor]
    write: Callable[[Value, Tensor], Value] | None = None
    instead: str = ""
    """What can be changed, where this can't."""

    @property
    def kind(self) -> str:
        """The name without its layer."""
        return self.name.split(".", 2)[2] if self.name.startswith("layers.") else self.name


GLOBAL = ("embed", "norm", "logits")
LAYER = (
    *("resid.pre", "resid.mid", "resid.post"),
    *("attn.in", "attn.q", "attn.k", "attn.v", "attn.scores", "attn.weights", "attn.heads", "attn.out"),
    *("ff.in", "ff.hidden", "ff.router", "ff.out"),
)
_ABSENT = {
    "resid.mid": "a block whose sublayers work side by side has no stream between them",
    "ff.hidden": "its feed-forwards are experts, of which each token takes some: ff.router, ff.out",
    "ff.router": "it has no experts",
}


def sites(decoder: Decoder) -> dict[str, Site]:
    """All sites of a model by name, in the order in which a pass comes by."""
    blocks = [block for block in decoder.blocks if isinstance(block, Block)]
    last = blocks[-1] if decoder.norm is None else decoder.norm
    found = [
        Site("embed", "BTD", decoder.embed, "output", _itself, _other),
        *(site for layer, block in enumerate(blocks) for site in _of_block(f"layers.{layer}.", block)),
        Site("norm", "BTD", last, "output", _itself, _other),
        Site("logits", "BTV", decoder.head, "output", decoder.scaled, None, "norm, which the head reads"),
    ]
    return {site.name: site for site in found}


def find(decoder: Decoder, patterns: Iterable[str]) -> list[Site]:
    """The sites that the patterns name, in a pass's order. A pattern without its layer means all layers, and `*` and
    `?` stand for any characters.

    Raises: UserError: a pattern names none.
    """
    known = sites(decoder)
    wanted: set[str] = set()
    for pattern in patterns:
        named = {name for name in known if _matches(name, pattern)}
        if not named:
            raise UserError(_problem(pattern, known, len(decoder.blocks)))
        wanted |= named
    return [site for name, site in known.items() if name in wanted]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"layers.*.{pattern}")


def _problem(pattern: str, known: Iterable[str], n_layers: int) -> str:
    split = re.fullmatch(r"(layers\.[^.]*\.)(.*)", pattern)
    of_layer, kind = (split[1], split[2]) if split else ("", pattern)
    if kind in _ABSENT and not any(name.endswith(f".{kind}") for name in known):
        return f"this model has no {kind}: {_ABSENT[kind]}"
    if kind in LAYER:
        return f"there is no {pattern}: the model has layers 0 to {n_layers - 1}"
    kinds = {name.split(".", 2)[2] for name in known if name.startswith("layers.")}
    valid = {of_layer + name for name in kinds} | (set() if of_layer else set(GLOBAL))
    return f"there is nothing called {pattern!r} to look at: {nearest(pattern, valid)}"


def attach(site: Site, look: Callable[[Value], Value | None]) -> RemovableHandle:
    """Call `look` with what is at a site in every pass; what it gives, if anything, takes its place."""
    if site.side == "output":
        return site.module.register_forward_hook(lambda module, args, output: look(output))

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        new = look(args[0])
        return None if new is None else (new, *args[1:])

    return site.module.register_forward_pre_hook(before)


def at_each_pass(decoder: Decoder, begin: Callable[[Tensor, list[Mask]], None]) -> RemovableHandle:
    """Call `begin` with the embedded tokens [B, T, D] and the first layer's masks, before the layers compute."""
    return decoder.blocks[0].register_forward_pre_hook(lambda module, args: begin(args[0], args[1]))


def the_mask(masks: list[Mask]) -> Mask:
    """Of a pass. Raises: UserError: it reads several sequences, each behind a cache of its own."""
    if len(masks) > 1:
        raise UserError(
            f"{len(masks)} sequences are read at once, which have no common positions: look inside while the model "
            "continues one prompt at a time"
        )
    return masks[0]


def _of_block(prefix: str, block: Block) -> list[Site]:
    attn, ff, scale = block.attn, block.ff, block.scale
    # What a sublayer adds to the stream is known behind its norm, where it has one, and before the factor.
    has_norm_behind = block.kind in ("sandwich", "output")
    attn_end, ff_end = (block.attn_out_norm, block.ff_out_norm) if has_norm_behind else (attn, ff)

    def added(value: Value) -> Tensor:
        return value if scale == 1.0 else value * scale

    def unscaled(_: Value, tensor: Tensor) -> Tensor:
        return tensor if scale == 1.0 else tensor / scale

    def of_heads(value: Tensor) -> Tensor:
        return value.unflatten(-1, (attn.n_heads, attn.head_dim))

    def joined(_: Value, tensor: Tensor) -> Tensor:
        return tensor.flatten(2)

    between: list[Site] = []
    if block.kind == "post":
        between = [Site("resid.mid", "BTD", block.attn_norm, "output", _itself, _other)]
    elif not block.kind.startswith("parallel"):
        reached = "attn.out, which is added to it, or resid.pre"
        between = [Site("resid.mid", "BTD", block.ff_norm, "input", _itself, None, reached)]
    if isinstance(ff, Experts):
        inside = Site("ff.router", "BTE", ff, "input", functools.partial(_routed, ff), None, "ff.in or ff.out")
    else:
        inside = Site("ff.hidden", "BTF", ff.down, "input", _itself, _other)
    scores, weights = functools.partial(_scores, attn), functools.partial(weights_of, attn)
    made_from = "attn.q and attn.k, which they follow from, or attn.weights"
    found = [
        Site("resid.pre", "BTD", block, "input", _itself, _other),
        Site("attn.in", "BTD", attn, "input", _itself, _other),
        Site("attn.q", "BHTd", attn.attending, "output", lambda value: value[0], lambda value, q: (q, *value[1:])),
        Site("attn.k", "BKSd", attn.attending, "output", *_at_their_places(1)),
        Site("attn.v", "BKSd", attn.attending, "output", *_at_their_places(2)),
        Site("attn.scores", "BHTS", attn.attended, "output", scores, None, made_from),
        Site("attn.weights", "BHTS", attn.attended, "output", weights, with_weights),
        Site("attn.heads", "BTHd", attn.o, "input", of_heads, joined),
        Site("attn.out", "BTD", attn_end, "output", added, unscaled),
        *between,
        Site("ff.in", "BTD", ff, "input", _itself, _other),
        inside,
        Site("ff.out", "BTD", ff_end, "output", added, unscaled),
        Site("resid.post", "BTD", block, "output", _itself, _other),
    ]
    return [dataclasses.replace(site, name=prefix + site.name) for site in found]


def _itself(value: Value) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _other(_: Value, tensor: Tensor) -> Tensor:
    return tensor


def _routed(experts: Experts, x: Tensor) -> Tensor:
    """The router's scores, before the softmax: [B, T, n_experts]."""
    return experts.router(x.flatten(0, 1)).unflatten(0, x.shape[:2])


# ---- attention: keys stand in a cache's order, and are shown at their places in the sequence


def _at_their_places(which: int) -> tuple[Callable[[Value], Tensor], Callable[[Value, Tensor], Value]]:
    """Keys or values [B, n_kv_heads, S, head_dim] of (q, k, v, mask); NaN where the cache doesn't hold them any more,
    or did not yet."""

    def read(value: Value) -> Tensor:
        return _by_place(value[which], value[3], dim=2, absent=torch.nan)

    def write(value: Value, tensor: Tensor) -> Value:
        slots = _by_slot(tensor, value[3], dim=2)
        kept = value[3].keys[:, None, :, None] < 0  # nothing is there, and nobody sees it
        return (*value[:which], torch.where(kept, value[which], slots), *value[which + 1 :])

    return read, write


def _scores(attn: Attention, value: Attended) -> Tensor:
    """Scaled, capped and with ALiBi's bias, before the mask: [B, n_heads, T, S]; NaN as above."""
    parts = [scores for scores, _ in _scored(attn, value)]
    return _by_place(torch.cat(parts, dim=2), value.mask, dim=3, absent=torch.nan)


def weights_of(attn: Attention, value: Attended) -> Tensor:
    """The weights that made `value.mixed`, taken anew from q and k: [B, n_heads, T, S], at least in fp32. 0 for keys
    that a query doesn't see."""
    weights = value.weights
    if weights is None:
        parts = [
            attention_weights(scores, visible, attn.sinks).masked_fill_(~visible, 0)
            for scores, visible in _scored(attn, value)
        ]
        weights = torch.cat(parts, dim=2)
    return _by_place(weights, value.mask, dim=3, absent=0.0)


def _scored(attn: Attention, value: Attended) -> Iterable[tuple[Tensor, Tensor]]:
    """Scores [B, n_heads, t, S] and who sees whom, for a block of queries after the other, rounded as the kernel has
    them."""
    q, mask = value.q, value.mask
    k, _ = for_each_head(q, value.k, value.v)
    if not is_written_out(q.dtype, mask.slopes is not None, attn.softcap):
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    n_keys = k.shape[2]
    step = max(1, _SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * n_keys))
    for start in range(0, q.shape[2], step):
        rows, columns = slice(start, min(start + step, q.shape[2])), slice(0, n_keys)
        bias = None if mask.slopes is None else mask.bias(rows, columns)
        scores = attention_scores(q[:, :, rows], k, bias, attn.scale, attn.softcap)
        yield scores, mask.visible(rows, columns)


def with_weights(value: Attended, weights: Tensor) -> Attended:
    """As if the softmax had given these."""
    slots = _by_slot(weights, value.mask, dim=3)
    if not _in_order(value.mask):
        slots = slots.masked_fill(value.mask.keys[:, None, None] < 0, 0)
    _, v = for_each_head(value.q, value.k, value.v)
    return value._replace(weights=slots, mixed=slots.to(v.dtype) @ v)


def n_places(mask: Mask) -> int:
    """Places in the sequence up to the last that a query or key stands at."""
    return 1 + int(max(mask.queries.max(), mask.keys.max()))


def _in_order(mask: Mask) -> bool:
    """Whether each key stands where its place is."""
    keys = mask.keys
    return keys.shape == (1, n_places(mask)) and bool((keys[0, 0] == 0) & (keys[0].diff() == 1).all())


def _by_place(x: Tensor, mask: Mask, dim: int, absent: float) -> Tensor:
    """From the order of the keys to that of their places."""
    if _in_order(mask):
        return x
    keys, end = mask.keys, n_places(mask)
    shape = list(x.shape)
    shape[dim] = end + 1  # the last one is nowhere
    placed = x.new_full(shape, absent)
    for row, places in enumerate(keys % (end + 1)):
        own = slice(None) if len(keys) == 1 else slice(row, row + 1)
        placed[own] = placed[own].index_copy(dim, places, x[own])
    return placed.narrow(dim, 0, end)


def _by_slot(x: Tensor, mask: Mask, dim: int) -> Tensor:
    """And back. What nobody sees is of any value."""
    if _in_order(mask):
        return x
    rows = mask.keys.clamp(min=0)
    if len(rows) == 1:
        return x.index_select(dim, rows[0])
    return torch.cat([x[i : i + 1].index_select(dim, places) for i, places in enumerate(rows)])
