"""Config: what is derived, what is refused, and that all is said at once."""

import dataclasses

import pytest
import torch
from hypothesis import given

from leftward import Config, Decoder
from leftward.config import ConfigError, field_meanings
from random_models import configs


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
    ],
)
def test_each_wrong_value_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Config(**{"vocab_size": 8, **wrong})


def test_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown key n_head: did you mean n_heads"):
        Config.from_dict({"vocab_size": 8, "n_head": 4})


def test_round_trip_through_plain_data():
    config = Config(vocab_size=8, n_heads=4, n_kv_heads=2, rope_base=500_000)
    assert Config.from_dict(config.to_dict()) == config
    assert isinstance(config.rope_base, float)


@given(configs())
def test_parameters_by_arithmetic_are_those_of_the_decoder(config):
    with torch.device("meta"):
        assert config.n_parameters == Decoder(config).n_parameters


def test_every_field_of_note_has_its_meaning():
    meanings = field_meanings()
    assert "arXiv 2104.09864" in meanings["positions"] and "None: 4 d_model" in meanings["d_ff"]


def test_a_config_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config(vocab_size=8).n_layers = 3  # type: ignore[misc]
