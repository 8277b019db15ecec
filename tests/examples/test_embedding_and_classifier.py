"""What one token's hidden state can tell: bounded by what was read, reached by training."""

from __future__ import annotations

import embedding_and_classifier as example
import pytest
from caption_language import CONFIG, train

from leftward import Decoder


@pytest.fixture(scope="module")
def language_model() -> Decoder:
    return train(CONFIG, steps=300)[0].decoder


def test_the_bound_counts_beginnings() -> None:
    # By hand: <bos> a | photo or a size | a shape, in the second style | … | a size | a shape, in the first.
    assert [8 * example.best_possible(n) for n in example.TOKENS] == [1, 1, 3, 5, 5, 6, 8]


@pytest.mark.parametrize("n_read", [2, 5, 7])
def test_a_trained_classifier_reaches_it(language_model: Decoder, n_read: int) -> None:
    assert example.accuracy(language_model, n_read, whole=True, steps=120) == example.best_possible(n_read)


def test_an_embedding_need_not(language_model: Decoder) -> None:
    before = {name: tensor.clone() for name, tensor in language_model.state_dict().items()}
    assert example.accuracy(language_model, 7, whole=False) < example.best_possible(7)
    assert all(tensor.equal(before[name]) for name, tensor in language_model.state_dict().items())
    apart = example.distances(language_model)
    assert apart["in the same style"] < apart["in two styles"] / 3
