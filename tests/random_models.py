"""Random Configs and Decoders for tests of invariants."""

from __future__ import annotations

import typing
from typing import Any

import torch
from hypothesis import strategies as st

from leftward import Config
from leftward.config import FeedForward, Norm, Positions
from leftward.model.decoder import Decoder


@st.composite
def configs(draw: st.DrawFn, **fixed: Any) -> Config:
    """Every combination of the architecture's choices, small."""
    n_heads = draw(st.sampled_from([1, 2, 4, 6]))
    values: dict[str, Any] = {
        "vocab_size": draw(st.integers(5, 60)),
        "max_seq_len": draw(st.integers(24, 40)),
        "n_layers": draw(st.integers(1, 3)),
        "d_model": n_heads * draw(st.sampled_from([4, 8])),
        "n_heads": n_heads,
        "n_kv_heads": draw(st.sampled_from([n for n in range(1, n_heads + 1) if n_heads % n == 0])),
        "head_dim": draw(st.sampled_from([None, 8, 12])),
        "d_ff": draw(st.sampled_from([None, 20])),
        "positions": draw(st.sampled_from(typing.get_args(Positions))),
        "rope_base": draw(st.sampled_from([100.0, 10_000.0])),
        "norm": draw(st.sampled_from(typing.get_args(Norm))),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "qk_norm": draw(st.booleans()),
        "feed_forward": draw(st.sampled_from(typing.get_args(FeedForward))),
        "qkv_bias": draw(st.booleans()),
        "attn_out_bias": draw(st.booleans()),
        "ff_bias": draw(st.booleans()),
        "tie_embeddings": draw(st.booleans()),
    }
    return Config(**(values | fixed))


def random_decoder(config: Config, seed: int = 0, std: float = 0.1) -> Decoder:
    """A Decoder in which every weight has a say: the fresh ones hold zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config).eval()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(1 + noise if "norm.weight" in name else noise)
    return decoder


def random_ids(config: Config, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
