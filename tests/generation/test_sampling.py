"""Each setting does what transformers' processor of that name does; bad values are refused all at once."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leftward.errors import UserError
from leftward.generation.sampling import (
    apply_temperature,
    choose,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repetition,
)
from leftward.generation.settings import Sampling


def random_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


LOGITS = random_logits(4, 97)
NO_IDS = torch.zeros(4, 0, dtype=torch.long)


@pytest.mark.parametrize("temperature", [0.1, 0.8, 1.0, 2.5])
def test_temperature_is_transformers(temperature: float) -> None:
    process = pytest.importorskip("transformers").TemperatureLogitsWarper(temperature)
    ours = apply_temperature(LOGITS, temperature)
    # Moved by a constant, which no probability notices.
    torch.testing.assert_close(ours.softmax(-1), process(NO_IDS, LOGITS).softmax(-1))


@pytest.mark.parametrize("top_k", [1, 2, 40, 97, 1000])
def test_top_k_is_transformers(top_k: int) -> None:
    process = pytest.importorskip("transformers").TopKLogitsWarper(top_k)
    assert torch.equal(keep_top_k(LOGITS, top_k), process(NO_IDS, LOGITS))
    assert keep_top_k(LOGITS, top_k).isfinite().sum(-1).tolist() == [min(top_k, 97)] * 4


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.95, 0.999])
def test_top_p_is_transformers(top_p: float) -> None:
    process = pytest.importorskip("transformers").TopPLogitsWarper(top_p)
    assert torch.equal(keep_top_p(LOGITS, top_p), process(NO_IDS, LOGITS))
    assert keep_top_p(LOGITS, top_p).isfinite().any(-1).all()


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.5, 1.0])
def test_min_p_is_transformers(min_p: float) -> None:
    process = pytest.importorskip("transformers").MinPLogitsWarper(min_p)
    assert torch.equal(keep_min_p(LOGITS, min_p), process(NO_IDS, LOGITS))


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    process = pytest.importorskip("transformers").RepetitionPenaltyLogitsProcessor(penalty)
    ids = torch.randint(97, (4, 30), generator=torch.Generator().manual_seed(0))  # some more than once
    seen = torch.zeros(4, 97, dtype=torch.bool).scatter(1, ids, True)
    assert torch.equal(penalise_repetition(LOGITS, seen, penalty), process(ids, LOGITS))


def test_the_whole_chain_has_transformers_order() -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(97, (4, 30), generator=torch.Generator().manual_seed(0))
    expected = LOGITS
    for process in (
        transformers.RepetitionPenaltyLogitsProcessor(1.3),
        transformers.TemperatureLogitsWarper(0.7),
        transformers.TopKLogitsWarper(30),
        transformers.TopPLogitsWarper(0.9),
        transformers.MinPLogitsWarper(0.05),
    ):
        expected = process(ids, expected)
    sampling = Sampling(repetition_penalty=1.3, temperature=0.7, top_k=30, top_p=0.9, min_p=0.05)
    seen = torch.zeros(4, 97, dtype=torch.bool).scatter(1, ids, True)
    # A fine grid of draws finds exactly the tokens that are left, each as often as its probability says.
    grid = 4000
    counts = torch.zeros(4, 97)
    for step in range(grid):
        for row, token in enumerate(choose(LOGITS, sampling, [(step + 0.5) / grid] * 4, seen)):
            counts[row, token] += 1
    torch.testing.assert_close(counts / grid, expected.softmax(-1), atol=2 / grid, rtol=0)


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 20))
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(draw: float, seed: int) -> None:
    logits = random_logits(1, 13, seed=seed)
    cumulative = logits.double().softmax(-1).cumsum(-1)[0]
    expected = next((i for i, edge in enumerate(cumulative.tolist()) if edge > draw), 12)
    assert choose(logits, Sampling(temperature=1.0, top_p=1.0), [draw]) == [expected]


def test_a_draw_next_to_one_or_zero_takes_a_token_that_is_possible() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    sampling = Sampling(temperature=1.0, top_p=1.0)
    assert choose(logits, sampling, [math.nextafter(1.0, 0.0)]) == [2]
    assert choose(logits, sampling, [0.0]) == [1]


def test_sampled_frequencies_are_the_models_probabilities() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    numbers = random.Random(0)
    sampling = Sampling(temperature=1.0, top_p=1.0)
    counts = Counter(choose(logits, sampling, [numbers.random()])[0] for _ in range(5000))
    for token, probability in enumerate(logits.softmax(-1)[0].tolist()):
        assert counts[token] / 5000 == pytest.approx(probability, abs=0.03)


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy_and_never_nan(temperature: float) -> None:
    logits = random_logits(3, 50, scale=100)
    assert choose(logits, Sampling(temperature=temperature), [0.1, 0.5, 0.9]) == logits.argmax(-1).tolist()


def test_a_huge_temperature_is_uniform() -> None:
    assert choose(torch.tensor([[50.0, 0.0]]), Sampling(temperature=1e30, top_p=1.0), [0.75]) == [1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [[math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 0.0]])
def test_logits_that_are_no_numbers_are_an_error(bad: list[float], temperature: float) -> None:
    with pytest.raises(UserError, match="not finite numbers"):
        choose(torch.tensor([[0.0, 1.0], bad]), Sampling(temperature=temperature), [0.5, 0.5])


def test_bf16_logits_are_sampled_in_fp32() -> None:
    logits = random_logits(1, 50).bfloat16()
    sampling = Sampling(temperature=0.7)
    for draw in (0.01, 0.3, 0.99):
        assert choose(logits, sampling, [draw]) == choose(logits.float(), sampling, [draw])


# ---- settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", "1"),
        ("stop", ("",)),
        ("stop", (1,)),
        ("stop", 3),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{name} is"):
        Sampling.of({name: value})


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(UserError) as caught:
        Sampling(top_p=2.0, temperature=-1, top_k=-3)
    assert all(name in str(caught.value) for name in ("top_p", "temperature", "top_k"))


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown setting temprature: did you mean temperature\?"):
        Sampling.of({"temprature": 1.0})


def test_stop_may_be_one_text_or_a_list() -> None:
    assert Sampling.of({"stop": "x"}).stop == ("x",)
    assert Sampling.of({"stop": ["x", "y"]}).stop == ("x", "y")
    assert Sampling.of({"temperature": 1}).temperature == 1.0


def test_seeds_of_samples() -> None:
    sampling = Sampling(seed=7)
    seeds = [sampling.seeded(i).seed for i in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds == [sampling.seeded(i).seed for i in range(100)]
    assert seeds[1] != Sampling(seed=8).seeded(1).seed
    drawn = Sampling().seeded()
    assert drawn.seed is not None and drawn.seed != Sampling().seeded().seed
    assert dataclasses.replace(drawn, seed=None) == Sampling()
