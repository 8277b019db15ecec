"""The next token: what the model expects at each position, how it comes to it through the layers, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leftward.inspection.attribution import attribution
from leftward.inspection.lens import read, through
from leftward.inspection.parts.about import Answer
from leftward.inspection.parts.attention import WHOLE
from leftward.inspection.readable import label
from leftward.inspection.subject import Subject

_TOP_TEXTS = 200
_TOP = 5
LENS_COLUMNS = 12
"""Positions that a table of the layers shows at once: each is a product with the whole head, in every layer."""
_AT_ONCE = 128


def following(subject: Subject, position: int) -> Answer:
    """Every logit at one position, and the texts of the likeliest tokens."""
    logits = subject.reading.logits([position])[0]
    best = logits.topk(min(_TOP_TEXTS, len(logits))).indices.tolist()
    target = subject.ids[position + 1] if position + 1 < len(subject.ids) else None
    data = {
        "top": [[token_id, label(subject.model.tokenizer, token_id)] for token_id in best],
        "target": None if target is None else [target, label(subject.model.tokenizer, target)],
    }
    return data, {"logits": logits.cpu().numpy()}


def losses(subject: Subject) -> Answer:
    """Of each position: the log-probability and rank of the token that follows, the entropy of what was expected, and
    the likeliest tokens. Natural logarithms; always of the model's own distribution."""
    reading, ids = subject.reading, subject.ids
    parts = [_column(reading.logits(part), ids[part.start + 1 : part.stop + 1]) for part in _portions(len(ids))]
    arrays = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
    return {"texts": _texts(subject, arrays["top_ids"])}, arrays


def lens(subject: Subject, start: int, pin: int) -> Answer:
    """What each layer would say if it were the last, at the 12 positions from `start` on: [L + 1, positions, …].

    Args:
        pin: a token whose probability and rank are wanted; −1: that of the token that follows.
    """
    reading, ids, n_layers = subject.reading, subject.ids, subject.model.config.n_layers
    positions = range(start, min(start + LENS_COLUMNS, len(ids)))
    followers = ids[start + 1 : positions.stop + 1] if pin < 0 else [pin] * len(positions)
    n = len(positions)
    with torch.inference_mode():
        streams = torch.cat([reading.stream(layer)[start : positions.stop] for layer in range(n_layers + 1)])
        logits = [through(reading.decoder, part).float() for part in streams.split(n * max(1, _AT_ONCE // n))]
        layers = [each for part in logits for each in part.split(n)]
    rows = [_column(each, followers) for each in layers]
    arrays = {name: torch.stack([row[name] for row in rows]).numpy() for name in rows[0]}
    data: dict[str, Any] = {"start": start, "stop": positions.stop, "texts": _texts(subject, arrays["top_ids"])}
    if pin >= 0:
        data["pinned"] = label(subject.model.tokenizer, pin)
    return data, arrays


def attributed(subject: Subject, position: int, token: int) -> Answer:
    """What each part of the model adds to one token's logit. −1 is the token that follows, or the likeliest one."""
    if token < 0:
        follows = position + 1 < len(subject.ids)
        token = subject.ids[position + 1] if follows else int(subject.reading.logits([position]).argmax())
    # Of a long text only what the position sees, which is the same but for rounding.
    ids = subject.ids if len(subject.ids) <= WHOLE else subject.ids[: position + 1]
    found = attribution(subject.model.decoder, ids, position, token)
    return {"label": label(subject.model.tokenizer, token), **found.to_dict()}, {}


def _portions(n: int) -> list[slice]:
    return [slice(start, min(start + _AT_ONCE, n)) for start in range(0, n, _AT_ONCE)]


def _column(logits: Tensor, followers: Sequence[int]) -> dict[str, Tensor]:
    """Of logits [n, V]; there may be fewer followers than n, as nothing follows the last: NaN there, and rank −1."""
    n = len(followers)
    wanted = torch.tensor([*followers, *[0] * (len(logits) - n)], device=logits.device)
    seen = read(logits, wanted[:, None], _TOP)
    logprobs, ranks = seen.logprobs[:, 0].clone(), seen.ranks[:, 0].clone()
    logprobs[n:], ranks[n:] = torch.nan, -1
    return {
        "logprob": logprobs,
        "rank": ranks.int(),
        "entropy": seen.entropy,
        "top_ids": seen.top_ids.int(),
        "top_probs": seen.top_probs,
    }


def _texts(subject: Subject, ids: Any) -> dict[str, str]:
    return {str(i): label(subject.model.tokenizer, i) for i in sorted({int(i) for i in ids.flat})}
