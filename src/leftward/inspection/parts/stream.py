"""The residual stream: how it grows over depth, and what a norm makes of one token's numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from leftward.inspection.heads import statistics_of
from leftward.inspection.parts.about import Answer
from leftward.inspection.subject import Subject
from leftward.model.norms import LayerNorm, RMSNorm

SITES = ("attn_norm", "attn_out_norm", "ff_norm", "ff_out_norm", "norm")


def growth(subject: Subject) -> Answer:
    """Mean, standard deviation and root mean square of the stream before each layer and behind the last: [L + 1, T]."""
    reading = subject.reading
    found = statistics_of([reading.stream(layer).float() for layer in range(subject.model.config.n_layers + 1)])
    return {}, {name: tensor.cpu().numpy() for name, tensor in found._asdict().items()}


def activations(subject: Subject, layer: int, site: str, position: int) -> Answer:
    """One token's numbers before and behind a norm, and what the norm is."""
    reading, decoder = subject.reading, subject.model.decoder
    found: dict[str, tuple[nn.Module, Tensor, Tensor]] = dict(reading.norms(layer))
    if decoder.norm is not None:
        found["norm"] = decoder.norm, reading.stream(subject.model.config.n_layers).float(), reading.hidden.float()
    chosen = site if site in found else next(iter(found))
    module, before, behind = found[chosen]
    before, behind = before[position], behind[position]
    assert isinstance(module, LayerNorm | RMSNorm)
    factor, bias = module.factor, getattr(module, "bias", None)
    data: dict[str, Any] = {
        "site": chosen,
        "sites": list(found),
        "kind": "layernorm" if isinstance(module, LayerNorm) else "rmsnorm",
        "eps": module.eps,
        "block": subject.model.config.block,
    }
    arrays = {"before": before, "behind": behind}
    if factor is not None:
        arrays["factor"] = factor.float()
    if bias is not None:
        arrays["bias"] = bias.float()
    return data, {name: tensor.detach().cpu().numpy() for name, tensor in arrays.items()}
