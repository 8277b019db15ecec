"""Positions: rotary and its scalings against transformers, ALiBi's slopes, sinusoids; and the values of the papers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gradients import gradients
from leftward import Config
from leftward.errors import UserError
from leftward.model import positions
from leftward.model.positions import alibi_slopes, frequencies, rotary_angles, rotate, sinusoids
from random_models import random_decoder, random_ids

# ---- rotation


@pytest.mark.parametrize("head_dim", [2, 8])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
def test_rotation_and_its_gradient(head_dim: int, fraction: float, pairing: str) -> None:
    """Against complex numbers: pair i of position p turns by p · base^(−2i / rope_dim)."""
    torch.manual_seed(0)
    head_dim = int(head_dim / fraction)
    config = Config(
        vocab_size=3, d_model=2 * head_dim, n_heads=2, rope_base=100.0, rope_fraction=fraction, rope_pairing=pairing
    )
    x = torch.randn(2, 7, 2, head_dim, requires_grad=True)
    turned_part, rest = x[..., : config.rope_dim], x[..., config.rope_dim :]
    half = config.rope_dim // 2
    if pairing == "halves":
        first, second = turned_part[..., :half], turned_part[..., half:]
    else:
        first, second = turned_part[..., 0::2], turned_part[..., 1::2]
    turns = torch.arange(7)[:, None] * 100.0 ** (-2 * torch.arange(half) / config.rope_dim)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(turns), turns)[:, None]
    if pairing == "halves":
        plain = torch.cat((turned.real, turned.imag, rest), dim=-1)
    else:
        plain = torch.cat((torch.view_as_real(turned).flatten(-2), rest), dim=-1)
    ours = rotate(x, rotary_angles(config, torch.arange(7)[None], torch.float32))
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(gradients(ours, [x])[0], gradients(plain, [x])[0])


def test_adjacent_pairs_are_gptjs() -> None:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb, create_sinusoidal_positions

    torch.manual_seed(0)
    config = Config(vocab_size=3, d_model=16, n_heads=1, rope_pairing="adjacent")
    x = torch.randn(1, 9, 1, 16)
    sin, cos = create_sinusoidal_positions(9, 16)[None].split(8, dim=-1)
    ours = rotate(x, rotary_angles(config, torch.arange(9)[None], torch.float32))
    torch.testing.assert_close(ours, apply_rotary_pos_emb(x, sin, cos))


def test_rotary_scores_depend_on_distance_only() -> None:
    torch.manual_seed(0)
    config = Config(vocab_size=3, max_seq_len=200_000, d_model=32, n_heads=1)
    q, k = torch.randn(2, 1, 1, 1, 32).unbind()

    def score(position: int, distance: int) -> float:
        angles = [rotary_angles(config, torch.tensor([[p]]), torch.float32) for p in (position, position - distance)]
        return float((rotate(q, angles[0]) * rotate(k, angles[1])).sum())

    assert score(10, 3) == pytest.approx(score(1_000, 3), abs=1e-3)
    assert score(10, 3) == pytest.approx(score(100_000, 3), abs=0.05)
    assert score(10, 3) != pytest.approx(score(10, 4), abs=0.1)


def test_llama3_scaling_has_the_published_values() -> None:
    values = {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 8192}
    common: dict[str, Any] = {"vocab_size": 3, "d_model": 128, "n_heads": 1, "rope_base": 500_000.0}
    plain, _ = frequencies(Config(**common))
    scaled, factor = frequencies(Config(**common, rope_scaling=values, max_seq_len=131_072))
    ratios = [s / p for s, p in zip(scaled, plain, strict=True)]
    assert factor == 1.0
    assert ratios[:29] == [1.0] * 29
    assert ratios[29:35] == pytest.approx([0.8282, 0.6437, 0.4935, 0.3711, 0.2714, 0.1902], abs=5e-5)
    assert ratios[35:] == pytest.approx([0.125] * 29)
    assert scaled[-1] == pytest.approx(3.068925988914511e-07, rel=1e-6)


def test_yarns_attention_factor() -> None:
    scaling = {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 64}
    assert frequencies(Config(vocab_size=3, rope_scaling=scaling))[1] == pytest.approx(1.13863, abs=1e-5)


LONGROPE = {
    "short_factors": [1.0 + 0.05 * i for i in range(16)],
    "long_factors": [1.0 + 0.9 * i for i in range(16)],
}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"kind": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"kind": "dynamic", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0}),
        (
            {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 6.0},
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.5,
                "high_freq_factor": 6.0,
                "original_max_position_embeddings": 256,
            },
        ),
        (
            {"kind": "yarn", "factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        ),
        (  # gpt-oss
            {"kind": "yarn", "factor": 32.0, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
            {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "original_max_position_embeddings": 256,
            },
        ),
        (
            {"kind": "longrope", **LONGROPE},
            {
                "rope_type": "longrope",
                "short_factor": LONGROPE["short_factors"],
                "long_factor": LONGROPE["long_factors"],
                "original_max_position_embeddings": 256,
            },
        ),
    ],
    ids=lambda case: case.get("kind"),
)
@pytest.mark.parametrize("length", [128, 1024])
def test_scalings_are_those_of_transformers(ours: dict[str, Any], theirs: dict[str, Any], length: int) -> None:
    """At a text as long as max_seq_len, which is what settles the rules that look at a length."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Config(
        vocab_size=3,
        d_model=64,
        n_heads=2,
        max_seq_len=length,
        rope_scaling={**ours, "original_max_seq_len": 256},
    )
    # transformers takes "dynamic"'s original length from max_position_embeddings, longrope's factor too
    longest = 256 if ours["kind"] == "dynamic" else length
    reference = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=longest,
        rope_parameters={"rope_theta": 10_000.0, **theirs},
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](reference, torch.device("cpu"), length)
    values, factor = frequencies(config)
    torch.testing.assert_close(torch.tensor(values), inv_freq, rtol=1e-5, atol=0)
    assert factor == pytest.approx(attention_factor, rel=1e-6)


def test_local_layers_with_a_base_of_their_own_are_not_scaled() -> None:
    # Gemma 3: linear scaling by 8 and base 10⁶ in global layers, base 10⁴ in local ones
    config = Config(
        vocab_size=3,
        d_model=64,
        n_heads=2,
        window=4,
        attention_pattern="LG",
        rope_base=1e6,
        rope_local_base=1e4,
        rope_scaling={"kind": "linear", "factor": 8.0},
    )
    assert frequencies(config, local=True)[0] == pytest.approx([1e4 ** (-2 * i / 32) for i in range(16)])
    assert frequencies(config, local=False)[0] == pytest.approx([1e6 ** (-2 * i / 32) / 8 for i in range(16)])


# ---- ALiBi


def test_alibi_slopes_of_the_paper() -> None:
    assert alibi_slopes(8) == [2.0**-k for k in range(1, 9)]
    assert alibi_slopes(12)[:8] == alibi_slopes(8)
    assert alibi_slopes(12)[8:] == pytest.approx([0.70711, 0.35355, 0.17678, 0.08839], abs=1e-5)


@pytest.mark.parametrize("n_heads", [1, 2, 3, 6, 8, 12, 16, 25])
def test_alibi_slopes_are_blooms_and_mpts(n_heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    bloom = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)[:, 0, 1]
    mpt = -build_mpt_alibi_tensor(n_heads, 2)[:, 0, 0]
    torch.testing.assert_close(torch.tensor(alibi_slopes(n_heads)), bloom)
    torch.testing.assert_close(torch.tensor(alibi_slopes(n_heads, mpt_order=True)), mpt)


def test_alibi_scale_multiplies_the_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(vocab_size=11, n_layers=2, d_model=32, n_heads=4, max_seq_len=16, positions="alibi")
    gentle, plain = random_decoder(replace(config, alibi_scale=0.35)), random_decoder(config)
    ids = random_ids(config, 2, 9)
    with torch.inference_mode():
        scaled = gentle(ids)
        assert not torch.allclose(scaled, plain(ids), atol=1e-3)
        slopes = [0.35 * slope for slope in alibi_slopes(4)]
        monkeypatch.setattr(positions, "alibi_slopes", lambda n_heads, mpt_order: slopes)
        torch.testing.assert_close(plain(ids), scaled)
    with pytest.raises(UserError, match="alibi_scale 0.35 is for alibi, and positions are rotary"):
        Config(vocab_size=3, alibi_scale=0.35)
    with pytest.raises(UserError, match="alibi_scale is 0.0: it must be above 0"):
        Config(vocab_size=3, positions="alibi", alibi_scale=0.0)


# ---- sinusoids


def test_sinusoids_are_those_of_the_lesson() -> None:
    # seeds/003's positional_encoding: sines in even places, cosines in odd ones, rate 1 / 10000^(2 ⌊i/2⌋ / D)
    position, index = torch.arange(7)[:, None].double(), torch.arange(6).double()
    angles = position / 10_000 ** (2 * (index // 2) / 6)
    expected = torch.where(index % 2 == 0, angles.sin(), angles.cos())
    torch.testing.assert_close(sinusoids(torch.arange(7)[None], 6)[0].double(), expected, atol=1e-6, rtol=0)
    assert sinusoids(torch.arange(7)[None], 5).shape == (1, 7, 5)
