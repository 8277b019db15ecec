"""Direct logit attribution: what each part of a model adds to the logit of one token at one position.

The stream is a sum, and behind it only norms and the head's row of the token. With each norm's mean and scale held as
they were in this pass, all of that is linear, so that the logit is a sum over what was added to the stream: walked from
the head back to the embedding, each part is weighed with a direction [D]. That is a part's direct share, not what it
does through the layers behind it. The sum is the logit before a soft cap, which is no sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leftward.errors import UserError
from leftward.inspection.record import id_of, ids_of
from leftward.inspection.sites import Value, attach, find
from leftward.kernels.packed import PackedLinear, unpack
from leftward.model.block import Block
from leftward.model.decoder import Decoder
from leftward.model.feedforward import FeedForward
from leftward.model.lora import Adapted
from leftward.model.norms import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from leftward.language_model import LanguageModel


@dataclass(frozen=True)
class Attribution:
    """`logit` as the sum of `parts` and of `rounding`."""

    position: int
    token: int
    against: int | None
    """The token whose logit is taken from the other's."""
    logit: float
    """The model's own, before a soft cap; or the difference of two."""
    parts: dict[str, float]
    """embed.token, embed.position, layers.N.attn.heads.H, layers.N.ff, and the biases of sublayers, norms and head: in
    the order of a pass."""
    heads: tuple[tuple[float, ...], ...]
    """[n_layers, n_heads]: those of the parts that are heads."""

    @property
    def rounding(self) -> float:
        """What the parts don't explain. Packed weights (4 and 8 bits) round their inputs too."""
        return self.logit - math.fsum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """What JSON can say."""
        return {
            "position": self.position,
            "token": self.token,
            "against": self.against,
            "logit": self.logit,
            "rounding": self.rounding,
            "parts": [[name, value] for name, value in self.parts.items()],
            "heads": [list(row) for row in self.heads],
        }


def logit_attribution(
    model: LanguageModel,
    text: str | Sequence[int],
    token: int | str,
    *,
    against: int | str | None = None,
    position: int = -1,
) -> Attribution:
    """What adds to the logit of `token` as the one behind `position` of a text or of ids; see `attribution`.

    Args:
        against: another token: then it is the difference of the two.
        position: from 0 on, or from the end, −1 the last.

    Raises:
        UserError: a position or a token that there isn't.
    """
    ids = ids_of(model, text)[0].tolist()
    other = None if against is None else id_of(model, against)
    return attribution(model.decoder, ids, position, id_of(model, token), other)


def attribution(
    decoder: Decoder, ids: Sequence[int], position: int, token: int, against: int | None = None
) -> Attribution:
    """The same of a decoder and ids. Raises: UserError: a position that there isn't."""
    if not -len(ids) <= position < len(ids):
        raise UserError(f"position is {position}: the text has {len(ids)} tokens")
    position %= len(ids)
    with torch.inference_mode():
        seen = _Seen(decoder, ids, position)
        parts, heads = _parts(decoder, seen, token, against)
        products = decoder.head(seen.output)[0, 0].double() * decoder.config.logit_scale
        logit = float(products[token] - (0 if against is None else products[against]))
    return Attribution(position, token, against, logit, parts, heads)


_STREAM_NORMS = ("attn_norm", "attn_out_norm", "ff_norm", "ff_out_norm")


class _Seen:
    """What was at one position, in fp64: the inputs of norms, and sites by name."""

    def __init__(self, decoder: Decoder, ids: Sequence[int], position: int) -> None:
        self.inputs: dict[nn.Module, Tensor] = {}
        self.at: dict[str, Tensor] = {}

        def keep_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.inputs[module] = args[0][0, position].double()

        norms = [getattr(block, name) for block in decoder.blocks for name in _STREAM_NORMS]
        with ExitStack() as hooks:
            for norm in (decoder.embed_norm, *norms, decoder.norm):
                if norm is not None:
                    hooks.callback(norm.register_forward_pre_hook(keep_input).remove)
            for site in find(decoder, ["embed", "layers.0.resid.pre", "attn.heads", "ff.out"]):

                def keep(value: Value, name: str = site.name, take: Callable[[Value], Tensor] = site.read) -> None:
                    self.at[name] = take(value)[0, position].double()

                hooks.callback(attach(site, keep).remove)
            hidden = decoder.hidden(torch.tensor([list(ids)], device=decoder.device))
        self.output = hidden[:, position : position + 1]


def _parts(
    decoder: Decoder, seen: _Seen, token: int, against: int | None
) -> tuple[dict[str, float], tuple[tuple[float, ...], ...]]:
    """Shares by name in the order of a pass, and those of heads by layer. Found from the end on."""
    found: list[tuple[str, float]] = []
    heads: list[tuple[float, ...]] = []

    def add(name: str, direction: Tensor, value: Tensor | None) -> float:
        share = 0.0 if value is None else float(direction @ value.double())
        if value is not None:
            found.append((name, share))
        return share

    def before(norm: nn.Module | None, direction: Tensor, name: str) -> tuple[Tensor, float]:
        """The direction before a norm, and the share of its bias."""
        if not isinstance(norm, LayerNorm | RMSNorm):
            return direction, 0.0
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        share = add(f"{name}.bias", direction, bias)
        return _through(norm, seen.inputs[norm], direction), share

    rows, bias = _head_rows(decoder.head, [token] if against is None else [token, against])
    signs = torch.tensor([1.0, -1.0][: len(rows)], dtype=torch.float64, device=rows.device)
    add("head.bias", signs * decoder.config.logit_scale, bias)
    direction = signs @ rows * decoder.config.logit_scale
    direction, _ = before(decoder.norm, direction, "norm")
    for layer in reversed(range(len(decoder.blocks))):
        block, name = decoder.blocks[layer], f"layers.{layer}"
        assert isinstance(block, Block)
        is_post = block.kind == "post"
        if is_post:
            direction, _ = before(block.ff_norm, direction, f"{name}.ff_norm")
        of_ff, biases = direction * block.scale, 0.0
        if not is_post:
            of_ff, biases = before(block.ff_out_norm, of_ff, f"{name}.ff_out_norm")
        if isinstance(block.ff, FeedForward):
            biases += add(f"{name}.ff.bias", of_ff, block.ff.down.bias)
        found.append((f"{name}.ff", float(direction @ seen.at[f"{name}.ff.out"]) - biases))

        if is_post:
            direction, _ = before(block.attn_norm, direction, f"{name}.attn_norm")
        of_attn = direction * block.scale
        if not is_post:
            of_attn, _ = before(block.attn_out_norm, of_attn, f"{name}.attn_out_norm")
        add(f"{name}.attn.bias", of_attn, block.attn.o.bias)
        mixes = seen.at[f"{name}.attn.heads"]  # [H, head_dim]
        shares = (of_attn @ _matrix(block.attn.o)).view_as(mixes).mul(mixes).sum(dim=-1).tolist()
        found += [(f"{name}.attn.heads.{head}", share) for head, share in reversed([*enumerate(shares)])]
        heads.append(tuple(shares))
    _embedding(decoder, seen, direction, before, add)
    return dict(reversed(found)), tuple(reversed(heads))


def _embedding(decoder: Decoder, seen: _Seen, direction: Tensor, before: Any, add: Any) -> None:
    direction, _ = before(decoder.embed_norm, direction, "embed_norm")
    embedded = seen.at["embed"] * decoder.config.embed_scale
    if decoder.config.positions in ("learned", "sinusoidal"):
        whole = seen.at["layers.0.resid.pre"] if decoder.embed_norm is None else seen.inputs[decoder.embed_norm]
        add("embed.position", direction, whole - embedded)
    add("embed.token", direction, embedded)


def _through(norm: LayerNorm | RMSNorm, x: Tensor, direction: Tensor) -> Tensor:
    """The direction [D] before a norm whose statistics are those of `x` [D]."""
    factor = norm.factor
    if factor is not None:
        direction = direction * factor.double()
    if isinstance(norm, RMSNorm):
        return direction / (x.square().mean() + norm.eps).sqrt()
    direction = direction / (x.var(correction=0) + norm.eps).sqrt()
    return direction - direction.mean()


def _matrix(linear: nn.Module) -> Tensor:
    """[out, in] in fp64, with its adapter."""
    assert isinstance(linear, nn.Linear | PackedLinear | Adapted)
    weight = linear.weight.double()
    if isinstance(linear, Adapted):
        weight = weight + linear.scale * (linear.lora_b.double() @ linear.lora_a.double())
    return weight


def _head_rows(head: nn.Module, tokens: list[int]) -> tuple[Tensor, Tensor | None]:
    """Rows [tokens, D] of the head in fp64, and their biases, without making all of a packed one."""
    assert isinstance(head, nn.Linear | PackedLinear | Adapted)
    bias = None if head.bias is None else head.bias[tokens]
    if isinstance(head, PackedLinear):
        (table,) = head.parts
        return unpack(table, torch.tensor(tokens)).double(), bias
    rows = head.weight[tokens].double()
    if isinstance(head, Adapted):
        rows = rows + head.scale * (head.lora_b[tokens].double() @ head.lora_a.double())
    return rows, bias
