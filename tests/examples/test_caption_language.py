"""The language of eight sentences: the lesson's numbers, and what bounds them."""

from __future__ import annotations

import math

import caption_language as example
import pytest

from leftward import LanguageModel


@pytest.fixture(scope="module")
def trained() -> tuple[LanguageModel, list[float]]:
    return example.train()


@pytest.fixture(scope="module")
def blind() -> tuple[LanguageModel, list[float]]:
    return example.train(example.WITHOUT_MASK, steps=300)


def test_the_data_are_the_lessons() -> None:
    assert example.TOKENIZER.vocab_size == 12
    assert len(example.TRAIN) == 680
    assert len(example.TEST) == 120
    assert example.TRAIN[:4] == [  # as the lesson prints them
        "a small circle in the photo",
        "a photo of a large plus",
        "a photo of a large plus",
        "a small circle in the photo",
    ]
    assert set(example.CAPTIONS) == set(example.SENTENCES)
    assert len(example.SENTENCES) == 8


def test_the_block_is_the_lessons(trained: tuple[LanguageModel, list[float]]) -> None:
    d, vocabulary, places = 32, 12, 9
    attention, feed_forward, norms = 4 * (d * d + d), (d * 4 * d + 4 * d) + (4 * d * d + d), 4 * d
    head = d * vocabulary + vocabulary
    by_hand = vocabulary * d + places * d + attention + feed_forward + norms + head
    assert trained[0].decoder.n_parameters == by_hand == 13_772


def test_the_loss_ends_at_the_entropy(trained: tuple[LanguageModel, list[float]]) -> None:
    model, losses = trained
    assert math.isclose(example.GRAMMAR, 0.29706, abs_tol=1e-5)
    assert example.entropy(example.SENTENCES) == pytest.approx(example.GRAMMAR)  # eight sentences, equally likely
    assert losses[-1] == pytest.approx(0.2976, abs=0.003)  # the lesson's own final loss
    on_all = example.loss_in_use(model, example.TRAIN)
    assert example.entropy(example.TRAIN) < on_all < example.entropy(example.TRAIN) + 0.005
    tokens = example.as_tokens(example.TEST)
    assert example.loss_of(model.decoder, tokens).item() == pytest.approx(example.loss_in_use(model, example.TEST))


def test_padding_does_not_count(trained: tuple[LanguageModel, list[float]]) -> None:
    decoder, tokens = trained[0].decoder, example.as_tokens(example.TEST)
    assert (tokens[:, -1] == example.PAD).all()
    whole, cut = example.loss_of(decoder, tokens), example.loss_of(decoder, tokens[:, :-1])
    assert whole.item() == pytest.approx(cut.item(), abs=1e-6)


def test_the_cache_changes_nothing(trained: tuple[LanguageModel, list[float]]) -> None:
    assert example.agreement(trained[0]) == 1.0


def test_greedy_and_prompts(trained: tuple[LanguageModel, list[float]]) -> None:
    model = trained[0]
    first, second = example.SENTENCES[:4], example.SENTENCES[4:]
    assert example.greedy(model) in example.SENTENCES
    assert len(set(model.generate("", n=20, temperature=0))) == 1
    assert example.greedy(model, "a photo") in first
    for size in example.SIZES:
        assert example.greedy(model, f"a {size}") in [s for s in second if f"a {size}" in s]


def test_sampling_and_temperature(trained: tuple[LanguageModel, list[float]]) -> None:
    model = trained[0]
    samples = example.sample(model, 0.8)
    assert samples.valid == 1.0
    assert samples.seen >= 7
    hot, cold, frozen = (example.sample(model, temperature, 200) for temperature in (2.0, 0.3, 0.03))
    assert hot.valid < 0.9 < cold.valid == frozen.valid == 1.0
    assert hot.most_frequent < cold.most_frequent < frozen.most_frequent


def test_without_the_mask_the_loss_lies(blind: tuple[LanguageModel, list[float]]) -> None:
    model, losses = blind
    assert losses[-1] < example.GRAMMAR / 2  # below what any model can reach that doesn't see the next token
    assert example.loss_in_use(model, example.TEST) > 2 * example.GRAMMAR
    assert example.sample(model, 0.8, 200).seen <= 4
