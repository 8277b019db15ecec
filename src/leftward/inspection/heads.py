"""What attention heads do, in numbers, and how the stream grows over the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from leftward.config import Config
from leftward.errors import UserError
from leftward.inspection.record import ids_of, record

if TYPE_CHECKING:
    from leftward.language_model import LanguageModel


class Entropies(NamedTuple):
    """How widely each query of each head looks, beside how widely it could."""

    bits: Tensor
    """[n_layers, n_heads, T]"""
    maximum: Tensor
    """[n_layers, T]: log2 of how many keys the query sees, fewer in layers with a window."""


@dataclass(frozen=True)
class HeadScores:
    """Means of attention weights, from 0 to 1, [n_layers, n_heads] each."""

    previous: Tensor
    """What a token gives to the one before it."""
    sink: Tensor
    """What a token gives to the first of the text."""
    induction: Tensor
    """In random tokens that are read twice: what a token gives to the one behind its first occurrence (Olsson et al.
    2022, arXiv 2209.11895)."""


class StreamStatistics(NamedTuple):
    """Of the numbers of the stream at a position, before the first layer and behind each: [n_layers + 1, T]."""

    mean: Tensor
    std: Tensor
    rms: Tensor


def row_entropy(weights: Tensor) -> Tensor:
    """−Σ p log2 p of each row [..., S], in bits. A row that a sink took a part of is made to sum to 1."""
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return torch.special.entr(weights).sum(dim=-1) / math.log(2)


def most_bits(config: Config, layer: int, length: int) -> Tensor:
    """The entropy of a query that looks everywhere alike: log2(i + 1) at position i, or of the window. [length]."""
    if not config.causal:
        seen = torch.arange(length)
        reach = length if not config.is_local(layer) or config.window is None else config.window
        return ((seen + reach).clamp(max=length) - (seen - reach + 1).clamp(min=0)).float().log2()
    seen = torch.arange(1, length + 1)
    if config.is_local(layer) and config.window is not None:
        seen = seen.clamp(max=config.window)
    return seen.float().log2()


def entropies(model: LanguageModel, text: str | Sequence[int]) -> Entropies:
    """Of every row of every head, for a text or ids. Raises: UserError: a text longer than the context."""
    ids = ids_of(model, text)
    rows = [row_entropy(weights) for weights in _weights(model, ids)]
    most = [most_bits(model.config, layer, ids.shape[1]) for layer in range(model.config.n_layers)]
    return Entropies(torch.stack(rows), torch.stack(most))


def head_scores(
    model: LanguageModel, text: str | Sequence[int] | None = None, *, length: int = 50, seed: int = 0
) -> HeadScores:
    """Which heads look at the token before, at the beginning, or for what came after the same token earlier.

    Args:
        text: for `previous` and `sink`. None: the random tokens that show induction.
        length: of the random tokens, which are read twice, behind the token that begins a text where there is one.

    Raises:
        UserError: a text of one token, or twice `length` is more than the context.
    """
    bos = [] if model.tokenizer.bos_id is None else [model.tokenizer.bos_id]
    if not 2 <= length <= (model.config.max_seq_len - len(bos)) // 2:
        raise UserError(f"length is {length}: it must be at least 2, and twice that fit the context of the model")
    drawn = _random_tokens(model, length, seed)
    repeated = torch.tensor([bos + drawn + drawn], device=model.decoder.device)
    of_repeated = _weights(model, repeated)
    second = torch.arange(len(bos) + length, len(bos) + 2 * length)
    induction = [weights[:, second, second - length + 1].mean(dim=-1) for weights in of_repeated]
    of_text = of_repeated if text is None else _weights(model, ids_of(model, text))
    if of_text[0].shape[-1] < 2:
        raise UserError("the text has 1 token, which looks at itself: it must have at least 2")
    previous = [weights.diagonal(-1, dim1=-2, dim2=-1).mean(dim=-1) for weights in of_text]
    sink = [weights[:, 1:, 0].mean(dim=-1) for weights in of_text]
    return HeadScores(torch.stack(previous), torch.stack(sink), torch.stack(induction))


def stream_statistics(model: LanguageModel, text: str | Sequence[int]) -> StreamStatistics:
    """How the stream grows, for a text or ids. Raises: UserError: a text longer than the context."""
    ids = ids_of(model, text)
    with torch.inference_mode(), record(model.decoder, "layers.0.resid.pre", "resid.post") as rec:
        model.decoder.hidden(ids)
    return statistics_of([rec["layers.0.resid.pre"][0], *(rec[name][0] for name in rec.names[1:])])


def statistics_of(streams: Sequence[Tensor]) -> StreamStatistics:
    """Of a stream [T, D] before the first layer and behind each."""
    found = [(x.mean(dim=-1), x.std(dim=-1, correction=0), x.square().mean(dim=-1).sqrt()) for x in streams]
    return StreamStatistics(*(torch.stack(parts) for parts in zip(*found, strict=True)))


def _weights(model: LanguageModel, ids: Tensor) -> list[Tensor]:
    """[n_heads, T, T] of each layer."""
    with torch.inference_mode(), record(model.decoder, "attn.weights") as rec:
        model.decoder.hidden(ids)
    return [rec[name][0] for name in rec.names]


def _random_tokens(model: LanguageModel, length: int, seed: int) -> list[int]:
    """Ids that stand for text, each equally likely."""
    tokenizer = model.tokenizer
    known = min(model.config.vocab_size, tokenizer.vocab_size)
    usual = sorted(set(range(known)).difference(tokenizer.special_ids, tokenizer.holes))
    drawn = torch.randint(len(usual), (length,), generator=torch.Generator().manual_seed(seed))
    return [usual[i] for i in drawn.tolist()]
