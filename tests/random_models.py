"""Random Configs and Decoders for tests of invariants."""

from __future__ import annotations

import typing
from typing import Any

import torch
from hypothesis import strategies as st

from leftward import Config
from leftward.config import Block, FeedForward, Norm, NormWeight, Positions, QKNorm, RopePairing, RopeScalingKind
from leftward.model.decoder import Decoder


@st.composite
def configs(draw: st.DrawFn, **fixed: Any) -> Config:
    """Every combination of the architecture's choices, small. `fixed` fields are not drawn."""
    n_heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    values: dict[str, Any] = {
        "vocab_size": draw(st.integers(5, 60)),
        "vocab_multiple": draw(st.sampled_from([1, 1, 16])),
        "max_seq_len": draw(st.integers(24, 40)),
        "n_layers": draw(st.integers(1, 3)),
        "d_model": n_heads * draw(st.sampled_from([4, 8])),
        "n_heads": n_heads,
        "n_kv_heads": draw(st.sampled_from([n for n in range(1, n_heads + 1) if n_heads % n == 0])),
        "head_dim": draw(st.sampled_from([None, 8, 16])),
        "attn_scale": draw(st.sampled_from([None, 0.3])),
        "attn_softcap": draw(st.sampled_from([None, None, 2.0])),
        "attn_sinks": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "attn_out_bias": draw(st.booleans()),
        "rope_base": draw(st.sampled_from([100.0, 10_000.0])),
        "rope_local_base": draw(st.sampled_from([None, 50.0])),
        "rope_fraction": draw(st.sampled_from([1.0, 0.5])),
        "embed_norm": draw(st.booleans()),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "d_ff": draw(st.sampled_from([None, 20])),
        "ff_bias": draw(st.booleans()),
        "tie_embeddings": draw(st.booleans()),
        "head_bias": draw(st.booleans()),
        "residual_scale": draw(st.sampled_from([1.0, 0.5])),
        "embed_scale": draw(st.sampled_from([1.0, 3.0])),
        "logit_scale": draw(st.sampled_from([1.0, 0.5])),
        "logit_softcap": draw(st.sampled_from([None, 5.0])),
    }
    choices = {
        "positions": Positions,
        "rope_pairing": RopePairing,
        "block": Block,
        "norm": Norm,
        "norm_weight": NormWeight,
        "qk_norm": QKNorm,
        "feed_forward": FeedForward,
    }
    for name, literal in choices.items():
        values[name] = draw(st.sampled_from(typing.get_args(literal)))
    if values["norm"] == "layernorm" and values["norm_weight"] != "none":
        values["norm_bias"] = draw(st.booleans())
    if draw(st.booleans()):
        values["window"] = draw(st.integers(1, 12))
        values["attention_pattern"] = draw(st.sampled_from(["L", "LG", "GL", "LLG"]))
    if values["positions"] == "learned":
        values["position_offset"] = draw(st.sampled_from([0, 2]))
    if values["positions"] in ("alibi", "alibi_mpt"):
        values["alibi_scale"] = draw(st.sampled_from([1.0, 0.35]))
    if values["positions"] in ("rotary", "alibi", "alibi_mpt"):
        values["position_pattern"] = draw(st.sampled_from(["P", "PN", "NP"]))
    if values["positions"] == "rotary":
        pairs = round((values["head_dim"] or values["d_model"] // n_heads) * values["rope_fraction"]) // 2
        values["rope_scaling"] = draw(st.none() | rope_scalings(pairs))
    if draw(st.booleans()):
        values["n_experts"] = draw(st.integers(2, 5))
        values["n_experts_per_token"] = draw(st.integers(1, values["n_experts"]))
        values["d_shared"] = draw(st.sampled_from([0, 12]))
        values["router_normalised"] = values["n_experts_per_token"] > 1 and draw(st.booleans())
    return Config(**(values | fixed))


@st.composite
def rope_scalings(draw: st.DrawFn, pairs: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(typing.get_args(RopeScalingKind)))
    values: dict[str, Any] = {
        "kind": kind,
        "factor": draw(st.sampled_from([1.0, 4.0])),
        "original_max_seq_len": draw(st.sampled_from([8, 16, 64])),
    }
    if kind == "longrope":
        values["short_factors"] = [1.0 + 0.1 * i for i in range(pairs)]
        values["long_factors"] = [1.0 + 0.7 * i for i in range(pairs)]
    return values


def random_decoder(config: Config, seed: int = 0, std: float = 0.1) -> Decoder:
    """A Decoder in which every weight has a say: the fresh ones hold zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config).eval()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            around_one = "norm.weight" in name and config.norm_weight == "plain"
            parameter.copy_(1 + noise if around_one else 5 * noise if name.endswith(".sinks") else noise)
    return decoder


def random_ids(config: Config, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
