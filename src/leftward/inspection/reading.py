"""One text read once, kept so that any layer can be looked at later without reading it again.

Kept are the stream and, of each layer, what its block was called with and its queries, keys and values: a few megabytes
for a prompt. Attention weights are made from those for the head that is asked for, and a block's inside by running that
one block again; so what a page asks for costs a thirtieth of a pass, not a pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leftward.model.attention import Attended, Attention, attention_scores, attention_weights
from leftward.model.block import Block
from leftward.model.decoder import Decoder

_NORMS = ("attn_norm", "attn_out_norm", "ff_norm", "ff_out_norm")


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class _Layer:
    arguments: tuple[Any, ...]
    """Of the block: the stream [1, T, D] first."""
    attended: Attended


@dataclass(frozen=True)
class Stages:
    """How the weights of one head come about, for some of the queries: [t, T] each."""

    products: Tensor
    """q · k, before anything else."""
    scores: Tensor
    """Scaled, capped, with what positions add."""
    visible: Tensor
    weights: Tensor


class Reading:
    """A forward pass over `ids`. Takes no gradients. `cancelled` is asked before each block.

    Raises: Cancelled; ValueError: more ids than max_seq_len.
    """

    def __init__(self, decoder: Decoder, ids: Sequence[int], cancelled: Callable[[], bool] = lambda: False) -> None:
        self.decoder, self.ids = decoder, list(ids)
        self.blocks = [block for block in decoder.blocks if isinstance(block, Block)]
        layers: list[_Layer] = []
        arguments: dict[str, Any] = {}

        def before(block: nn.Module, given: tuple[Any, ...]) -> None:
            if cancelled():
                raise Cancelled
            arguments["block"] = given

        def attended(module: nn.Module, given: Any, value: Attended) -> None:
            layers.append(_Layer(arguments["block"], value))

        with contextlib.ExitStack() as stack:
            for block in self.blocks:
                stack.callback(block.register_forward_pre_hook(before).remove)
                stack.callback(block.attn.attended.register_forward_hook(attended).remove)
            stack.enter_context(torch.inference_mode())
            self.last, hidden = _read(decoder, self.ids)
        self.layers = layers
        self.hidden = hidden[0]
        """[T, D]: what the head reads."""
        self._inside = functools.lru_cache(maxsize=4)(self._run_again)

    @property
    def length(self) -> int:
        return len(self.ids)

    def stream(self, layer: int) -> Tensor:
        """[T, D]: what goes into a layer; behind the last one what comes out of it."""
        x: Tensor = self.layers[layer].arguments[0] if layer < len(self.layers) else self.last
        return x[0]

    @torch.inference_mode()
    def logits(self, positions: slice | Sequence[int]) -> Tensor:
        """[positions, V] in fp32."""
        return self.decoder.logits(self.hidden[positions]).float()

    @torch.inference_mode()
    def stages(self, layer: int, head: int, queries: Sequence[int] | slice = slice(None)) -> Stages:
        """Of one head, as q and k have it that made the model's output."""
        attn, value = self._attention(layer)
        group = attn.n_heads // attn.n_kv_heads
        q, k = value.q[:, head : head + 1].float(), value.k[:, head // group : head // group + 1].float()
        mask, everything = value.mask, slice(0, self.length)
        if mask.slopes is not None:
            mask = dataclasses.replace(mask, slopes=mask.slopes[head : head + 1])
        visible = mask.visible(everything, everything)[0, 0][queries]
        bias = None if mask.slopes is None else mask.bias(everything, everything)[:, :, queries]
        q = q[:, :, queries]
        scores = attention_scores(q, k, bias, attn.scale, attn.softcap)
        sinks = None if attn.sinks is None else attn.sinks[head : head + 1]
        weights = attention_weights(scores.clone(), visible[None, None], sinks).masked_fill(~visible, 0)
        return Stages((q @ k.mT)[0, 0], scores[0, 0], visible, weights[0, 0].float())

    def norms(self, layer: int) -> Mapping[str, tuple[nn.Module, Tensor, Tensor]]:
        """The norms of a block by name (attn_norm, ff_norm …): the module, its input and its output, [T, D] each."""
        return self._inside(layer)

    def _attention(self, layer: int) -> tuple[Attention, Attended]:
        return self.blocks[layer].attn, self.layers[layer].attended

    @torch.inference_mode()
    def _run_again(self, layer: int) -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
        block, found = self.blocks[layer], dict[str, tuple[nn.Module, Tensor, Tensor]]()
        named = {name: getattr(block, name) for name in _NORMS if not isinstance(getattr(block, name), nn.Identity)}

        def keep(name: str, module: nn.Module, given: tuple[Tensor], output: Tensor) -> None:
            found[name] = module, given[0][0].float(), output[0].float()

        with contextlib.ExitStack() as stack:
            for name, module in named.items():
                stack.callback(module.register_forward_hook(functools.partial(keep, name)).remove)
            block(*self.layers[layer].arguments)
        return found


def _read(decoder: Decoder, ids: list[int]) -> tuple[Tensor, Tensor]:
    """The stream behind the last block [1, T, D], and what the head reads of it."""
    last: list[Tensor] = []
    handle = decoder.blocks[-1].register_forward_hook(lambda module, given, output: last.append(output))
    try:
        hidden = decoder.hidden(torch.tensor([ids], device=decoder.device))
    finally:
        handle.remove()
    return last[0], hidden
