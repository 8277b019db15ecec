"""How a model's authors want it to write: as transformers' own GenerationConfig understands the file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from leftward.errors import UserError
from leftward.formats.generation_config import sampling_defaults
from leftward.generation.rules import Bans, Row, apply_rules
from leftward.generation.settings import Sampling

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B-Instruct": {
        "bos_token_id": 128000,
        "do_sample": True,
        "eos_token_id": [128001, 128008, 128009],
        "temperature": 0.6,
        "top_p": 0.9,
        "transformers_version": "4.45.0.dev0",
    },
    "Qwen2.5-0.5B-Instruct": {
        "bos_token_id": 151643,
        "pad_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "repetition_penalty": 1.1,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
    },
    "all that we have": {"do_sample": True, "min_p": 0.1, "top_k": 0, "max_new_tokens": 77, "stop_strings": ["\n\n"]},
    "more that we have": {
        "do_sample": True,
        "typical_p": 0.7,
        "min_new_tokens": 5,
        "eos_token_id": [2, 3],
        "bad_words_ids": [[7], [8, 9], [3]],
        "sequence_bias": [[[4], -1.5], [[5], 2.0]],
    },
    "nulls": {"do_sample": True, "temperature": None, "top_k": None, "top_p": None, "min_p": None},
    "greedy": {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_settings_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GenerationConfig(**PUBLISHED[name])
    theirs.update(**theirs._get_default_generation_params(), defaults_only=True)  # as its generate does
    ours = Sampling.of(sampling_defaults(PUBLISHED[name]))
    assert ours.repetition_penalty == theirs.repetition_penalty
    if not theirs.do_sample:
        assert ours.temperature == 0
        return
    assert (ours.temperature, ours.top_k, ours.top_p) == (theirs.temperature, theirs.top_k, theirs.top_p)
    assert ours.min_p == (theirs.min_p or 0.0)
    assert ours.typical_p == (theirs.typical_p or 1.0)
    assert ours.min_tokens == (theirs.min_new_tokens or 0)
    if theirs.max_new_tokens is not None:
        assert ours.max_tokens == theirs.max_new_tokens
    assert list(ours.stop) == (theirs.stop_strings or [])


def test_bad_words_and_biases_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    said = PUBLISHED["more that we have"]
    ours = Sampling.of(sampling_defaults(said))
    logits = torch.zeros(2, 20)
    ids = torch.tensor([[1, 8], [8, 1]])
    expected = transformers.SequenceBiasLogitsProcessor(said["sequence_bias"])(ids, logits)
    expected = transformers.NoBadWordsLogitsProcessor(said["bad_words_ids"], said["eos_token_id"])(ids, expected)
    words = tuple(word for word in ours.bad_words if isinstance(word, tuple))
    for of_row, each in zip(logits, ids.tolist(), strict=True):
        apply_rules(of_row, Row(sampling=ours, ids=each, n_prompt=2, bans=Bans(words)))
    assert torch.equal(logits, expected) and expected.isneginf().sum(-1).tolist() == [2, 1]


@pytest.mark.parametrize("other", [[[[4, 5], -1.5], [[5], 2.0]], [], 3, [[4, -1.5]], "abc"])
def test_a_bias_of_several_tokens_is_ignored(other: object) -> None:
    assert not Sampling.of(sampling_defaults({"sequence_bias": other})).logit_bias


def test_a_file_that_says_nothing_leaves_our_own_defaults() -> None:
    # SmolLM2-135M's, and what a run directory of ours has
    for silent in ({}, {"bos_token_id": 0, "eos_token_id": 0, "transformers_version": "4.40.1"}, {"do_sample": None}):
        assert sampling_defaults(silent) == {}
    assert sampling_defaults({"temperature": 0.5}) == {"temperature": 0.5}


@pytest.mark.parametrize(
    "wrong",
    [
        {"do_sample": "yes"},
        {"do_sample": 1},
        {"temperature": "hot"},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": True},
        {"temperature": 2**70},
        {"temperature": [0.5]},
        {"top_k": 2.5},
        {"top_k": -1},
        {"top_p": 1.5},
        {"top_p": {}},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"max_new_tokens": "many"},
        {"max_new_tokens": -5},
        {"stop_strings": 3},
        {"stop_strings": [""]},
        {"stop_strings": [["a"]]},
    ],
    ids=str,
)
def test_a_wrong_value_is_one_line_that_names_it(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        Sampling.of(sampling_defaults(wrong))
    (key,) = wrong
    assert {"max_new_tokens": "max_tokens", "stop_strings": "stop"}.get(key, key) in str(caught.value)
    assert "\n" not in str(caught.value)
