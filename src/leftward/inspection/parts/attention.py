"""Who looks at whom: one head in all its stages, all heads as thumbnails, and what another mask would do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from leftward.inspection.heads import row_entropy
from leftward.inspection.interventions import remask
from leftward.inspection.parts.about import Answer, tolerance
from leftward.inspection.readable import label
from leftward.inspection.reading import Reading
from leftward.inspection.subject import Subject
from leftward.model.positions import head_slopes

WHOLE = 512
"""Tokens up to which a head's numbers are sent as they are; of longer texts a picture, and the rows asked for."""
_THUMBNAIL = 48
MASKS = ("causal", "window", "prefix", "none")


def of_head(subject: Subject, layer: int, head: int) -> Answer:
    reading, n = subject.reading, len(subject.ids)
    data = _description(subject, layer, head)
    stages = reading.stages(layer, head)
    arrays: dict[str, Any] = {
        "entropy": row_entropy(stages.weights),
        "maximum": stages.visible.sum(dim=-1).float().log2(),
    }
    if n <= WHOLE:
        arrays |= {"products": stages.products, "weights": stages.weights, "visible": stages.visible.byte()}
    else:
        arrays["map"] = _shades(_pooled(stages.weights, WHOLE, WHOLE))
    return data, _numpy(arrays)


def of_row(subject: Subject, layer: int, head: int, query: int) -> Answer:
    """The same of one query."""
    stages = subject.reading.stages(layer, head, [query])
    arrays = {"products": stages.products, "weights": stages.weights, "visible": stages.visible.byte()}
    return _description(subject, layer, head), _numpy({name: tensor[0] for name, tensor in arrays.items()})


def _description(subject: Subject, layer: int, head: int) -> dict[str, Any]:
    config, block = subject.model.config, subject.reading.blocks[layer]
    slopes = head_slopes(config) if config.knows_positions(layer) else None
    return {
        "scale": config.attn_scale,
        "head_dim": config.head_dim,
        "softcap": config.attn_softcap,
        "slope": None if slopes is None else float(slopes[head]),
        "sink": None if block.attn.sinks is None else block.attn.sinks[head].item(),
        "window": config.window if config.is_local(layer) else None,
        "kv_head": head * config.n_kv_heads // config.n_heads,
    }


def thumbnails(subject: Subject) -> Answer:
    """Every head's weights in at most 48 × 48 shades: some queries, the largest weight of a bin of keys. Beside them
    each head's entropy as a share of its maximum, and what it gives to the first token and to the previous one."""
    reading, config = subject.reading, subject.model.config
    n = min(len(subject.ids), _THUMBNAIL)
    queries = [(len(subject.ids) * (2 * i + 1)) // (2 * n) for i in range(n)]
    shape = (config.n_layers, config.n_heads)
    maps = torch.zeros(*shape, n, n, dtype=torch.uint8)
    entropies, first, previous = (torch.zeros(shape) for _ in range(3))
    places = torch.tensor(queries)
    for layer in range(config.n_layers):
        for head in range(config.n_heads):
            stages = reading.stages(layer, head, queries)
            weights = stages.weights.cpu()
            maps[layer, head] = _shades(_pooled(weights, n, n))
            most = stages.visible.cpu().sum(dim=-1).float().log2()
            entropies[layer, head] = (row_entropy(weights).sum() / most.sum().clamp(min=1e-9)).item()
            first[layer, head] = weights[:, 0].mean()
            previous[layer, head] = weights[torch.arange(n), (places - 1).clamp(min=0)][places > 0].mean()
    arrays = {"maps": maps, "entropy": entropies, "first": first, "previous": previous.nan_to_num()}
    return {"n": n, "queries": queries}, _numpy(arrays)


def experiment(subject: Subject, mask: str, size: int, layer: int, head: int) -> Answer:
    """The same text under another mask: this head's weights, how far each position's output moves, and the leak proof
    of proofs/sight.py on this text: one token is changed, and no output before it should move. It is the last token;
    of a prefix, the last one of that.

    Args:
        mask: causal (the model's own), window (the last `size` tokens), prefix (the first `size` see each other), none.
    """
    other = subject.reading if mask == "causal" else _masked(subject, mask, size, subject.ids)
    ids, place = list(subject.ids), (min(size, len(subject.ids)) if mask == "prefix" else len(subject.ids)) - 1
    changed = next(i for i in (ids[place] + 1, ids[place] - 1) if 0 <= i < subject.model.config.vocab_size)
    leak = _distance(other, _masked(subject, mask, size, [*ids[:place], changed, *ids[place + 1 :]]))
    moved = [i for i in range(place) if leak[i] > tolerance(other.decoder)]
    stages = other.stages(layer, head)
    arrays: dict[str, Any] = {"moved": _distance(other, subject.reading), "leak": leak}
    if len(ids) <= WHOLE:
        arrays |= {"weights": stages.weights, "visible": stages.visible.byte()}
    else:
        arrays["map"] = _shades(_pooled(stages.weights, WHOLE, WHOLE))
    arrays["entropy"], arrays["maximum"] = row_entropy(stages.weights), stages.visible.sum(dim=-1).float().log2()
    tokenizer = subject.model.tokenizer
    data = {
        "mask": mask,
        "size": size,
        "leaks": moved,
        "changed": place,
        "changed_to": label(tokenizer, changed),
        "most": max(leak[:place].tolist(), default=0.0),
        "loss": _loss(other) if len(ids) <= WHOLE else None,
        "loss_before": _loss(subject.reading) if len(ids) <= WHOLE else None,
    }
    return data, _numpy(arrays)


def _masked(subject: Subject, mask: str, size: int, ids: Any) -> Reading:
    decoder = subject.model.decoder
    changes: dict[str, dict[str, Any]] = {
        "causal": {},
        "window": {"window": size},
        "prefix": {"prefix": size},
        "none": {"causal": False, "window": "none"},
    }
    with remask(decoder, **changes[mask]) if changes[mask] else nullcontext():
        return Reading(decoder, ids, subject.cancelled)


def _distance(one: Reading, other: Reading) -> Tensor:
    """The largest difference of what the head reads, at each position: [T]."""
    return (one.hidden.float() - other.hidden.float()).abs().amax(dim=-1).cpu()


def _loss(reading: Reading) -> float | None:
    """Nats a token over the text."""
    if reading.length < 2:
        return None
    targets = torch.tensor(reading.ids[1:], device=reading.hidden.device)
    total = 0.0
    for start in range(0, reading.length - 1, 128):
        stop = min(start + 128, reading.length - 1)
        logprobs = reading.logits(slice(start, stop)).log_softmax(dim=-1)
        total -= float(logprobs.gather(1, targets[start:stop, None]).sum())
    return total / (reading.length - 1)


def _pooled(x: Tensor, rows: int, columns: int) -> Tensor:
    """The largest of each cell of a grid laid over [t, s], or x itself where it is no larger."""
    size = (min(rows, x.shape[0]), min(columns, x.shape[1]))
    return x if size == x.shape else F.adaptive_max_pool2d(x[None], size)[0]


def _shades(weights: Tensor) -> Tensor:
    """255 √weight: a share of a hundredth can still be seen."""
    return (weights.sqrt() * 255).round().clamp(0, 255).to(torch.uint8)


def _numpy(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.cpu().numpy() for name, tensor in arrays.items()}
