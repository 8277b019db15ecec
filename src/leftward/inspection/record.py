"""Keep what a model computes on its way: `with record(decoder, "attn.weights") as rec: decoder(ids)`.

Hooks copy what passes by. The kernels that compute it stay the ones that they are: attention weights, which a kernel
never gives, are taken anew from its queries and keys, and must give its output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from leftward.errors import UserError, nearest
from leftward.inspection import readable
from leftward.inspection.sites import Site, Value, at_each_pass, attach, find, n_places, the_mask, with_weights
from leftward.model.attention import Attended
from leftward.model.decoder import Decoder
from leftward.model.masks import Mask

if TYPE_CHECKING:
    from leftward.language_model import LanguageModel

LIMIT_BYTES = 2 << 30

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""How far weights · v may be from what the kernel made of the same q, k and v, for values up to 1."""

_NOWHERE = torch.empty(1, 0, dtype=torch.int64)


@contextmanager
def record(decoder: Decoder, *patterns: str, limit_bytes: int = LIMIT_BYTES) -> Iterator[Recording]:
    """Keep what is at the named sites (inspection/sites.py) in every pass inside the `with`.

    Args:
        patterns: "layers.3.attn.weights", "resid.post" (of every layer), "layers.*.attn.*" …
        limit_bytes: a pass that would make the recording larger is an error before it computes.

    Raises:
        UserError: a name that this model doesn't have; inside, a recording that grows too large, several sequences read
            at once, or weights that don't give the kernel's output.
    """
    recording = Recording(decoder, find(decoder, patterns), limit_bytes)
    with ExitStack() as hooks:
        hooks.callback(at_each_pass(decoder, recording._begin).remove)
        for site in recording._sites.values():
            hooks.callback(attach(site, recording._keeper(site)).remove)
        yield recording


class Recording:
    """What was recorded, as copies on the CPU, at least in fp32.

    `recording[name]` is the sequence that was read last as a whole: passes behind a cache are put together. Where keys
    are an axis, a column is a place in the sequence.
    """

    def __init__(self, decoder: Decoder, sites: list[Site], limit_bytes: int) -> None:
        self._decoder, self._sites, self._limit = decoder, {site.name: site for site in sites}, limit_bytes
        self._parts: dict[str, list[tuple[Tensor, Tensor]]] = {site.name: [] for site in sites}
        self._places = _NOWHERE  # of the pass under way
        self._dtype = torch.promote_types(decoder.dtype, torch.float32)
        self.nbytes = 0
        """Held so far."""

    @property
    def names(self) -> list[str]:
        return list(self._sites)

    def bytes(self, n_tokens: int, batch: int = 1) -> int:
        """What a pass over so many tokens adds at most."""
        return self._bytes(batch, n_tokens, n_tokens)

    def passes(self, name: str) -> list[Tensor]:
        """What was there in each pass, in their order.

        Raises: UserError: it was not asked for, or nothing was read.
        """
        return [tensor for _, tensor in self._recorded(name)]

    def __getitem__(self, name: str) -> Tensor:
        """The sequence that was read last, from where the recording met it. A pass that begins at a place which was
        read before, as after tokens were taken back, counts in the stead of what was read from there on.

        Weights are 0, and scores, keys and values NaN, where a pass had no such key. The head reads some positions
        only when texts are generated or scored: then logits are [positions read, V].

        Raises: UserError: as `passes`; rows of unequal length.
        """
        parts, site = self._recorded(name), self._sites[name]
        if name == "logits" and any(tensor.shape[1:-1] != places.shape[1:] for places, tensor in parts):
            return torch.cat([tensor.flatten(0, -2) for _, tensor in parts])
        if any(len(places) > 1 for places, _ in parts):
            raise UserError(f"{name}: rows of unequal length have no common positions: look at passes({name!r})")
        if "T" not in site.axes:
            return _latest([tensor for _, tensor in _last_sequence(parts)])
        kept = [tensor.movedim(site.axes.index("T"), 0) for _, tensor in _last_sequence(parts, site.axes.index("T"))]
        if site.axes.endswith("S"):
            absent, end = 0.0 if site.kind == "attn.weights" else torch.nan, max(tensor.shape[-1] for tensor in kept)
            kept = [F.pad(tensor, (0, end - tensor.shape[-1]), value=absent) for tensor in kept]
        return torch.cat(kept).movedim(0, site.axes.index("T"))

    def stack(self, kind: str) -> Tensor:
        """The same site of all layers that were recorded: "resid.post" → [layers, B, T, D].

        Raises: UserError: as `recording[name]`.
        """
        names = [name for name, site in self._sites.items() if site.kind == kind and name != kind]
        if not names:
            kinds = sorted({site.kind for name, site in self._sites.items() if site.kind != name})
            raise UserError(f"{kind!r} was not recorded of any layer: {nearest(kind, kinds)}")
        return torch.stack([self[name] for name in names])

    # ---- while it records

    def _begin(self, x: Tensor, masks: list[Mask]) -> None:
        mask = the_mask(masks)
        batch, n_new, _ = x.shape
        more = self._bytes(batch, n_new, n_places(mask))
        if self.nbytes + more > self._limit:
            held = f" beside the {_size(self.nbytes)} that it holds" if self.nbytes else ""
            raise UserError(
                f"recording {n_new:,} tokens at {len(self._sites)} places takes {_size(more)}{held}, more than "
                f"limit_bytes allows ({_size(self._limit)}): record fewer places, or raise limit_bytes"
            )
        self._places = mask.queries.detach().cpu()
        if embedded := self._parts.get("embed"):  # which came before anybody knew of places
            tensor = embedded[-1][1]
            embedded[-1] = self._places[:, n_new - tensor.shape[1] :], tensor

    def _bytes(self, batch: int, n_new: int, n_keys: int) -> int:
        config = self._decoder.config
        of_heads = (config.n_heads, config.n_kv_heads, config.head_dim)
        of_layers = (config.d_model, config.d_ff, config.n_experts, config.vocab_size)
        widths = dict(zip("BTSHKdDFEV", (batch, n_new, n_keys, *of_heads, *of_layers), strict=True))
        numbers = sum(math.prod(widths[axis] for axis in site.axes) for site in self._sites.values())
        return numbers * self._dtype.itemsize

    def _keeper(self, site: Site) -> Callable[[Value], None]:
        @torch.no_grad()
        def keep(value: Value) -> None:
            seen = site.read(value)
            if site.kind == "attn.weights":
                self._check(site.name, value, seen)
            with torch.inference_mode(False):
                copied = torch.empty(seen.shape, dtype=self._dtype).copy_(seen.detach())
            self.nbytes += copied.nbytes
            self._parts[site.name].append((_NOWHERE if site.name == "embed" else self._places, copied))

        return keep

    def _check(self, name: str, value: Attended, weights: Tensor) -> None:
        config = self._decoder.config
        if self._decoder.training and config.dropout:
            return  # the kernel has dropped some of them
        differs = (with_weights(value, weights).mixed - value.mixed).abs().amax(dim=-1)
        allowed = _TOLERANCE[value.q.dtype] * value.v.abs().max().clamp(min=1e-30)
        if bool(((differs > allowed) & weights.any(dim=-1)).any()):
            raise UserError(
                f"{name}: weights · v and what the kernel made of the same q, k and v differ by {differs.max():.1e}, "
                f"where rounding explains {allowed:.1e}: the kernel does not compute what the Config says"
            )

    def _recorded(self, name: str) -> list[tuple[Tensor, Tensor]]:
        if name not in self._parts:
            raise UserError(f"{name!r} was not recorded: {nearest(name, self._parts)}")
        if not self._parts[name]:
            raise UserError(
                f"nothing was read while {name} was recorded: call the model inside the `with` (an engine that was "
                "made before it doesn't know of it)"
            )
        return self._parts[name]


def _last_sequence(parts: list[tuple[Tensor, Tensor]], axis: int | None = None) -> list[tuple[int, Tensor]]:
    """Passes with the place at which each begins, without what later ones have read again; cut along `axis`."""
    kept: list[tuple[int, Tensor]] = []
    for places, tensor in parts:
        start = int(places[0, 0])
        while kept and kept[-1][0] >= start:
            kept.pop()
        if kept and axis is not None:
            first, before = kept[-1]
            kept[-1] = first, before.narrow(axis, 0, min(before.shape[axis], start - first))
        kept.append((start, tensor))
    return kept


def _latest(parts: list[Tensor]) -> Tensor:
    """Keys or values [B, n_kv_heads, S, head_dim] of all passes, each from the last one that had it."""
    result = parts[0]
    for part in parts[1:]:
        result = F.pad(result, (0, 0, 0, part.shape[2] - result.shape[2]), value=torch.nan)
        result = part.where(~part.isnan(), result)
    return result


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"


# ---- what is read


def ids_of(model: LanguageModel, text: str | Sequence[int]) -> Tensor:
    """The ids of a text from its beginning on, or these ids, to be read at once: [1, T].

    Raises: UserError: none, more than the model's context, or ids that it doesn't have.
    """
    ids = model.tokenizer.encode(text, add_bos=True) if isinstance(text, str) else [int(each) for each in text]
    context, size = model.config.max_seq_len, model.config.vocab_size
    if not 0 < len(ids) <= context:
        raise UserError(
            f"the text has {len(ids)} tokens: it must have at least 1, and the model's context is {context}"
        )
    if wrong := [each for each in ids if not 0 <= each < size]:
        raise UserError(f"token id {wrong[0]} is not in the vocabulary of {size} (ids from 0)")
    return torch.tensor([ids], device=model.decoder.device)


def id_of(model: LanguageModel, token: int | str) -> int:
    """The id of a text that is one token, or this id.

    Raises: UserError: it is several, or not in the vocabulary.
    """
    ids = model.tokenizer.encode(token) if isinstance(token, str) else [token]
    if len(ids) != 1:
        raise UserError(f"{token!r} is {len(ids)} tokens, and not one: {' | '.join(labels(model, ids))}")
    ids_of(model, ids)
    return ids[0]


def labels(model: LanguageModel, ids: Sequence[int]) -> list[str]:
    """Each token as people can read it."""
    return [str(piece["label"]) for piece in readable.pieces(model.tokenizer, ids)]
