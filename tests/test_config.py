"""Config: what is derived, what is refused, and that all is said at once."""

import dataclasses
import json

import pytest

from leftward import Config
from leftward.config import ConfigError, field_meanings


def test_derived_fields_are_numbers():
    config = Config(vocab_size=10, d_model=96, n_heads=6)
    assert (config.n_kv_heads, config.head_dim) == (6, 16)
    # 2/3 · 4 · 96 = 256 for a gated feed-forward, 4 · 96 = 384 for a plain one
    assert config.d_ff == 256
    assert Config(vocab_size=10, d_model=96, n_heads=6, feed_forward="gelu").d_ff == 384


def test_swiglu_keeps_the_parameter_count_of_a_plain_feed_forward():
    # 3 matrices of 2/3 · 4d against 2 of 4d (seeds/001); exact where 8d/3 is a multiple of 32
    gated, plain = Config(vocab_size=1, d_model=768), Config(vocab_size=1, d_model=768, feed_forward="gelu")
    assert 3 * gated.d_ff * 768 == 2 * plain.d_ff * 768


def test_every_problem_is_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        Config(
            vocab_size=0,
            d_model=100,
            n_heads=6,
            n_kv_heads=4,
            positions="rotery",
            norm=3,
            dropout=1.5,
            n_layers=2.0,
            tie_embeddings="yes",
        )
    message = str(caught.value)
    for expected in (
        "vocab_size is 0",
        "d_model 100 is not divisible by n_heads 6",
        "n_heads 6 is not divisible by n_kv_heads 4",
        "positions is 'rotery': did you mean rotary?",
        "norm is 3",
        "dropout is 1.5",
        "n_layers is 2.0: it must be int",
        "tie_embeddings is 'yes': it must be bool",
    ):
        assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_heads": 0},
        {"n_kv_heads": 0},
        {"head_dim": 7},
        {"d_ff": -1},
        {"rope_base": 0.0},
        {"norm_eps": 0.0},
        {"dropout": -0.1},
        {"n_layers": True},
        {"d_model": None},
        {"rope_base": float("nan")},
        {"vocab_size": "65"},
        {"vocab_multiple": 0},
        {"window": 0},
        {"window": 4, "attention_pattern": "G"},
        {"attention_pattern": "L"},
        {"attention_pattern": "LXG", "window": 4},
        {"position_pattern": ""},
        {"position_pattern": "PN", "positions": "learned"},
        {"position_offset": 2},
        {"rope_fraction": 1.5},
        {"rope_base": 1.0},
        {"rope_scaling": 3},
        {"rope_scaling": {"kind": "llama4"}},
        {"rope_scaling": {"factor": 2.0}},
        {"rope_scaling": {"kind": "linear", "factr": 2.0}},
        {"rope_scaling": {"kind": "linear", "factor": 0.5}},
        {"rope_scaling": {"kind": "linear", "original_max_seq_len": -1}},
        {"rope_scaling": {"kind": "longrope", "short_factors": [1.0], "long_factors": [1.0]}},
        {"rope_scaling": {"kind": "linear", "factor": 2.0}, "positions": "learned"},
        {"rope_fraction": float("nan")},
        {"rope_fraction": float("inf"), "positions": "none"},
        {"d_model": 10**400},
        {"head_dim": 10**400},
        {"rope_scaling": {"kind": "yarn", "beta_fast": 1e308, "beta_slow": 5e-324}},
        {"rope_scaling": {"kind": "dynamic", "factor": 1e200, "original_max_seq_len": 2}},
        {"norm_bias": True},
        {"n_experts": 1},
        {"n_experts_per_token": 3, "n_experts": 2},
        {"router_normalised": True, "n_experts": 2, "n_experts_per_token": 1},
        {"d_shared": 8},
        {"attn_softcap": 0.0},
        {"logit_scale": float("inf")},
    ],
)
def test_each_wrong_value_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Config(**{"vocab_size": 8, **wrong})


@pytest.mark.parametrize("values", [None, [], 3, {1: 2}])
def test_what_is_no_mapping_of_fields_is_a_config_error(values):
    with pytest.raises(ConfigError):
        Config.from_dict(values)


def test_problems_of_every_place_are_said_together():
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(
            {
                "n_layer": 2,
                "d_model": -1,
                "vocab_size": "x",
                "rope_scaling": {"kind": "yarn", "factor": 0.5, "beta_fast": "a"},
            }
        )
    for expected in ("n_layer", "d_model is -1", "vocab_size is 'x'", "factor is 0.5", "beta_fast is 'a'"):
        assert expected in str(caught.value)


def test_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown key n_head: did you mean n_heads"):
        Config.from_dict({"vocab_size": 8, "n_head": 4})


def test_round_trip_through_plain_data():
    config = Config(vocab_size=8, n_heads=4, n_kv_heads=2, rope_base=500_000)
    assert Config.from_dict(config.to_dict()) == config
    assert isinstance(config.rope_base, float)


def test_every_field_of_note_has_its_meaning():
    meanings = field_meanings()
    assert "arXiv 2104.09864" in meanings["positions"] and "None: 4 d_model" in meanings["d_ff"]


def test_a_patterns_letters_are_repeated_over_the_layers():
    config = Config(vocab_size=8, n_layers=8, window=4, attention_pattern="LLG", position_pattern="PPPN")
    assert [config.is_local(layer) for layer in range(8)] == [True, True, False] * 2 + [True, True]
    assert [config.knows_positions(layer) for layer in range(8)] == [True, True, True, False] * 2


def test_rope_scaling_from_plain_data_and_back():
    scaling = {"kind": "longrope", "short_factors": [1] * 4, "long_factors": [1.5] * 4, "original_max_seq_len": 64}
    config = Config(vocab_size=8, head_dim=8, rope_scaling=scaling)
    assert config.rope_scaling.short_factors == (1.0,) * 4
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(Config.from_dict(config.to_dict()))
    # the original context is this one, unless another is given
    assert Config(vocab_size=8, rope_scaling={"kind": "yarn"}, max_seq_len=77).rope_scaling.original_max_seq_len == 77


def test_a_config_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config(vocab_size=8).n_layers = 3  # type: ignore[misc]
