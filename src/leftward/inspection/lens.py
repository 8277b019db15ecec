"""The logit lens (nostalgebraist 2020): what a model would say if a layer were its last one.

The stream behind each layer goes through the final norm and the head. Behind the last layer that is what the model
says, by definition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from leftward.inspection.record import id_of, ids_of, labels, record
from leftward.model.decoder import Decoder

if TYPE_CHECKING:
    from leftward.language_model import LanguageModel

_AT_ONCE = 1 << 24  # logits in memory together


class Reading(NamedTuple):
    """What there is to know of a distribution over tokens, for each of any number of them."""

    top_ids: Tensor
    """[..., k]: the likeliest tokens, the likeliest first."""
    top_probs: Tensor
    """[..., k]: their probabilities, among all tokens."""
    entropy: Tensor
    """[...], in bits; at most log2 of vocab_size."""
    logprobs: Tensor
    """[..., wanted]: natural logarithms of the probabilities of the tokens that were asked for."""
    ranks: Tensor
    """[..., wanted]: how many tokens are likelier than that one."""


@dataclass(frozen=True)
class Lens:
    """Row 0 is the stream before the first layer, row i that behind i layers; the last is the model itself."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """Each token as people can read it."""
    read: Reading
    """[n_layers + 1, T, …]"""
    pinned: tuple[int, ...]

    @property
    def next_logprobs(self) -> Tensor:
        """[n_layers + 1, T − 1]: of the token that follows each position."""
        return self.read.logprobs[:, :-1, 0]

    @property
    def next_ranks(self) -> Tensor:
        """[n_layers + 1, T − 1]"""
        return self.read.ranks[:, :-1, 0]

    @property
    def pinned_logprobs(self) -> Tensor:
        """[n_layers + 1, T, pinned]"""
        return self.read.logprobs[..., 1:]

    @property
    def pinned_ranks(self) -> Tensor:
        """[n_layers + 1, T, pinned]"""
        return self.read.ranks[..., 1:]


def logit_lens(
    model: LanguageModel, text: str | Sequence[int], *, top_k: int = 5, pinned: Sequence[int | str] = ()
) -> Lens:
    """What each layer would say next, at each position of a text or of ids.

    Args:
        pinned: tokens whose probability and rank are wanted everywhere.

    Raises:
        UserError: a text longer than the context, or a pinned text that is no token.
    """
    ids, pins = ids_of(model, text), [id_of(model, token) for token in pinned]
    decoder, n = model.decoder, ids.shape[1]
    following = torch.cat((ids[0, 1:], ids[0, :1]))  # nothing follows the last, whatever stands there
    wanted = torch.stack((following, *(torch.full_like(following, pin) for pin in pins)), dim=-1)  # [T, 1 + pinned]
    step = max(1, _AT_ONCE // model.config.vocab_size)
    rows = []
    with torch.inference_mode():
        with record(decoder, "layers.0.resid.pre", "resid.post") as rec:
            decoder.hidden(ids)
        for stream in (rec["layers.0.resid.pre"], *rec.stack("resid.post")):
            parts = [
                read(through(decoder, stream[:, at : at + step])[0], wanted[at : at + step], top_k)
                for at in range(0, n, step)
            ]
            rows.append([torch.cat(tensors) for tensors in zip(*parts, strict=True)])
    found = Reading(*(torch.stack(tensors) for tensors in zip(*rows, strict=True)))
    return Lens(tuple(ids[0].tolist()), tuple(labels(model, ids[0].tolist())), found, tuple(pins))


def through(decoder: Decoder, stream: Tensor) -> Tensor:
    """The logits that follow from a residual stream [B, T, D] by the final norm and the head: [B, T, V]."""
    x = stream.to(decoder.device, decoder.dtype)
    return decoder.logits(x if decoder.norm is None else decoder.norm(x))


def read(logits: Tensor, wanted: Tensor, top_k: int = 5) -> Reading:
    """Of logits [n, V], at `wanted` tokens [n, wanted]; on the CPU."""
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(min(top_k, logprobs.shape[-1]), dim=-1)
    own = logprobs.gather(-1, wanted)
    ranks = torch.stack([(logprobs > own[:, i, None]).sum(dim=-1) for i in range(wanted.shape[-1])], dim=-1)
    entropy = torch.special.entr(logprobs.exp()).sum(dim=-1) / math.log(2)
    return Reading(*(tensor.cpu() for tensor in (best.indices, best.values.exp(), entropy, own, ranks)))
