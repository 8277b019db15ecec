"""Each setting does what transformers' processor of that name does; draws have the distribution that is said; a row's
result is its own; bad values are refused all at once."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leftward.errors import UserError
from leftward.generation.rules import Bans, Row, apply_rules
from leftward.generation.sampling import choose, distribution, draw_from, token_logprobs
from leftward.generation.settings import Sampling
from leftward.text.tokenizer import Tokenizer


def random_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


LOGITS = random_logits(4, 997)  # blocks of 64, and a rest
IDS = torch.randint(997, (4, 30), generator=torch.Generator().manual_seed(0)) % 499  # some more than once
NO_IDS = torch.zeros(4, 0, dtype=torch.long)


def plain(**settings: Any) -> Sampling:
    """The model's own distribution but for what is said."""
    return Sampling.of({"temperature": 1.0, "top_p": 1.0, **settings})


def row(sampling: Sampling, ids: Sequence[int] = (), n_prompt: int | None = None, **rest: Any) -> Row:
    return Row(sampling=sampling, ids=list(ids), n_prompt=len(ids) if n_prompt is None else n_prompt, **rest)


def chosen(logits: torch.Tensor, sampling: Sampling, draws: list[float]) -> list[int | None]:
    return [choice.token_id for choice in choose(logits, [row(sampling, draw=draw) for draw in draws])]


def same_distribution(settings: dict[str, Any], expected: torch.Tensor, logits: torch.Tensor = LOGITS) -> None:
    """The same tokens are left as in transformers' logits, as likely as those say."""
    ours = torch.stack([distribution(of_row, row(plain(**settings))) for of_row in logits])
    assert torch.equal(ours > 0, expected.isfinite())
    torch.testing.assert_close(ours, expected.double().softmax(-1), atol=1e-7, rtol=1e-5)


# ---- beside transformers


@pytest.mark.parametrize("temperature", [0.1, 0.8, 1.0, 2.5])
def test_temperature_is_transformers(temperature: float) -> None:
    process = pytest.importorskip("transformers").TemperatureLogitsWarper(temperature)
    ours = torch.stack([distribution(of_row, row(plain(temperature=temperature))) for of_row in LOGITS])
    torch.testing.assert_close(ours, process(NO_IDS, LOGITS).double().softmax(-1), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 40, 997, 10_000])
def test_top_k_is_transformers(top_k: int) -> None:
    process = pytest.importorskip("transformers").TopKLogitsWarper(top_k)
    same_distribution({"top_k": top_k}, process(NO_IDS, LOGITS))


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])  # 0.1: nearly all tokens are needed
def test_top_p_is_transformers(top_p: float, scale: float) -> None:
    process = pytest.importorskip("transformers").TopPLogitsWarper(top_p)
    same_distribution({"top_p": top_p}, process(NO_IDS, LOGITS * scale), LOGITS * scale)


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.5, 1.0])
def test_min_p_is_transformers(min_p: float) -> None:
    process = pytest.importorskip("transformers").MinPLogitsWarper(min_p)
    same_distribution({"min_p": min_p}, process(NO_IDS, LOGITS))


@pytest.mark.parametrize("typical_p", [0.01, 0.2, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_typical_p_is_transformers(typical_p: float, scale: float) -> None:
    process = pytest.importorskip("transformers").TypicalLogitsWarper(typical_p)
    same_distribution({"typical_p": typical_p}, process(NO_IDS, LOGITS * scale), LOGITS * scale)


@pytest.mark.parametrize(("vocab_size", "scale"), [(1, 1.0), (63, 1.0), (64, 1.0), (50_000, 1.0), (50_000, 3.0)])
@pytest.mark.parametrize("settings", [{"top_k": 50}, {"top_p": 0.9}, {"typical_p": 0.9}, {"top_k": 100, "top_p": 0.5}])
def test_vocabularies_of_any_size(vocab_size: int, scale: float, settings: dict[str, float]) -> None:
    transformers = pytest.importorskip("transformers")
    warpers = {"top_k": "TopK", "top_p": "TopP", "typical_p": "Typical"}
    logits = random_logits(2, vocab_size, scale=scale)
    expected = logits
    for name, value in settings.items():
        expected = getattr(transformers, f"{warpers[name]}LogitsWarper")(value)(NO_IDS[:2], expected)
    same_distribution(settings, expected, logits)


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0]).repeat(100)  # more than a block of each
    for settings in ({"top_k": 1}, {"top_k": 200}, {"top_p": 0.001}, {"top_p": 0.5}):
        assert (distribution(logits, row(plain(**settings))) > 0).tolist() == (logits == 3).tolist()
    assert (distribution(logits, row(plain(top_k=201))) > 0).tolist() == (logits >= 2).tolist()


Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def processed(sampling: Sampling, n_prompt: int = 10, bans: Bans | None = None) -> torch.Tensor:
    """LOGITS after the rules, behind IDS of which the first `n_prompt` are the prompt."""
    ruled = LOGITS.clone()
    for i, ids in enumerate(IDS.tolist()):
        apply_rules(ruled[i], row(sampling, ids, n_prompt, bans=bans or Bans()))
    return ruled


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    process = pytest.importorskip("transformers").RepetitionPenaltyLogitsProcessor(penalty)
    assert torch.equal(processed(plain(repetition_penalty=penalty)), process(IDS, LOGITS))


@pytest.mark.parametrize("as_text", [False, True])  # JSON's keys are texts
def test_logit_bias_is_transformers(as_text: bool) -> None:
    bias = {5: -2.5, 3: 4.0, 996: -math.inf}
    process = pytest.importorskip("transformers").SequenceBiasLogitsProcessor({(k,): v for k, v in bias.items()})
    sampling = plain(logit_bias={str(k) if as_text else k: v for k, v in bias.items()})
    assert sampling.logit_bias == ((3, 4.0), (5, -2.5), (996, -math.inf))
    assert torch.equal(processed(sampling), process(IDS, LOGITS))


def test_bad_words_are_transformers() -> None:
    last = IDS[:, -3:].tolist()
    words = [(7,), (*last[0], 8), (*last[1][1:], 9), (last[2][-1], last[2][-1]), (*last[3][:2], 10), (996,) * 40]
    process = pytest.importorskip("transformers").NoBadWordsLogitsProcessor([list(word) for word in words])
    expected = process(IDS, LOGITS)
    assert expected.isneginf().sum(-1).tolist() == [2, 2, 2, 1]  # the words above say so
    assert torch.equal(processed(plain(bad_words=words), bans=Bans(bad_words=tuple(words))), expected)


@pytest.mark.parametrize("min_tokens", [0, 19, 20, 21, 100])
def test_min_tokens_is_transformers(min_tokens: int) -> None:
    process = pytest.importorskip("transformers").MinNewTokensLengthLogitsProcessor(10, min_tokens, [3, 5])
    assert torch.equal(processed(plain(min_tokens=min_tokens), bans=Bans(end_ids=(3, 5))), process(IDS, LOGITS))


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    """OpenAI's formula, which vLLM has too: logit − count · frequency − (count > 0) · presence."""
    ruled = processed(plain(frequency_penalty=0.7, presence_penalty=-0.4), n_prompt=10)
    expected = LOGITS.clone()
    for i, ids in enumerate(IDS.tolist()):
        for token_id in set(ids[10:]):
            expected[i, token_id] -= 0.7 * ids[10:].count(token_id) - 0.4
    torch.testing.assert_close(ruled, expected)
    assert not torch.equal(expected, LOGITS)


def test_the_whole_chain_has_transformers_order() -> None:
    transformers = pytest.importorskip("transformers")
    bias = {3: 2.0, int(IDS[0, 0]): -1.0}
    expected = LOGITS
    for process in (
        transformers.SequenceBiasLogitsProcessor({(k,): v for k, v in bias.items()}),
        transformers.RepetitionPenaltyLogitsProcessor(1.3),
        transformers.NoBadWordsLogitsProcessor([[3], [7]]),
        transformers.MinNewTokensLengthLogitsProcessor(10, 25, [5]),
        transformers.TemperatureLogitsWarper(0.7),
        transformers.TopKLogitsWarper(100),
        transformers.TopPLogitsWarper(0.9),
        transformers.MinPLogitsWarper(0.02),
        transformers.TypicalLogitsWarper(0.8),
    ):
        expected = process(IDS, expected)
    sampling = Sampling.of(
        {"logit_bias": bias, "repetition_penalty": 1.3, "bad_words": [[3], [7]], "min_tokens": 25, "temperature": 0.7}
        | {"top_k": 100, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.8}
    )
    rows = [row(sampling, ids, 10, bans=Bans(((3,), (7,)), (5,))) for ids in IDS.tolist()]
    ours = torch.stack([distribution(of_row, each) for of_row, each in zip(LOGITS, rows, strict=True)])
    assert torch.equal(ours > 0, expected.isfinite())
    torch.testing.assert_close(ours, expected.double().softmax(-1), atol=1e-7, rtol=1e-5)


# ---- draws


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 20))
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(draw: float, seed: int) -> None:
    logits = random_logits(1, 13, seed=seed)
    cumulative = logits.double().softmax(-1).cumsum(-1)[0].tolist()
    (token,) = chosen(logits, plain(), [draw])
    assert token is not None
    assert draw <= cumulative[token] + 1e-6 and (token == 0 or draw >= cumulative[token - 1] - 1e-6)


def test_a_draw_next_to_one_or_zero_takes_a_token_that_is_possible() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    assert chosen(logits, plain(), [math.nextafter(1.0, 0.0)]) == [2]
    assert chosen(logits, plain(), [0.0]) == [1]
    assert draw_from(torch.tensor([0.0, 3.0, 0.0]), math.nextafter(1.0, 0.0)) == 1  # weights need not sum to 1


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.7},
        {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
    ],
)
def test_draws_have_transformers_distribution(settings: dict[str, float]) -> None:
    """Chi-square of 4,000 draws with a fixed seed: a p-value below 0.001 would come once in a thousand seeds."""
    transformers = pytest.importorskip("transformers")
    stats = pytest.importorskip("scipy.stats")
    warpers = {"temperature": "Temperature", "top_k": "TopK", "top_p": "TopP", "min_p": "MinP", "typical_p": "Typical"}
    logits = random_logits(1, 100, scale=1.5)
    expected = logits
    for name, value in settings.items():
        expected = getattr(transformers, f"{warpers[name]}LogitsWarper")(value)(NO_IDS[:1], expected)
    probabilities = expected[0].double().softmax(-1)
    numbers = random.Random(0)
    draws = [numbers.random() for _ in range(4000)]
    counts = torch.bincount(torch.tensor(chosen(logits.expand(4000, -1), plain(**settings), draws)), minlength=100)
    assert not counts[probabilities == 0].any()
    likely = probabilities * 4000 >= 5  # the rest in one class, as the test demands
    observed = [*counts[likely].tolist(), counts[~likely].sum().item()]
    predicted = [*(probabilities[likely] * 4000).tolist(), probabilities[~likely].sum().item() * 4000]
    if not predicted[-1]:
        observed, predicted = observed[:-1], predicted[:-1]
    assert stats.chisquare(observed, predicted, sum_check=False).pvalue > 0.001


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy_and_never_nan(temperature: float) -> None:
    logits = random_logits(3, 50, scale=100)
    assert chosen(logits, Sampling(temperature=temperature), [0.1, 0.5, 0.9]) == logits.argmax(-1).tolist()


def test_a_huge_temperature_is_uniform() -> None:
    assert chosen(torch.tensor([[50.0, 0.0]]), plain(temperature=1e30), [0.75]) == [1]


def test_bf16_logits_are_sampled_in_fp32() -> None:
    logits = random_logits(1, 50).bfloat16()
    for draw in (0.01, 0.3, 0.99):
        assert chosen(logits, Sampling(temperature=0.7), [draw]) == chosen(
            logits.float(), Sampling(temperature=0.7), [draw]
        )


# ---- rows beside each other

MIX = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.02, "typical_p": 0.9},
    {"repetition_penalty": 1.2, "logit_bias": {1: 3.0}},
    {"frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 0.0, "presence_penalty": 0.3, "logprobs": 0},
]


@given(st.lists(st.sampled_from(range(len(MIX))), min_size=1, max_size=9), st.integers(0, 2**32))
def test_a_row_is_the_same_alone_bit_for_bit(kinds: list[int], seed: int) -> None:
    numbers = random.Random(seed)
    logits = random_logits(len(kinds), 5000, seed=seed)
    rows = [
        row(plain(**MIX[kind]), [numbers.randrange(5000) for _ in range(20)], 8, draw=numbers.random())
        for kind in kinds
    ]
    together = choose(logits, rows)
    assert together == [choose(logits[i : i + 1], [each])[0] for i, each in enumerate(rows)]


BAD = [[math.nan, 1.0, 2.0], [-math.inf] * 3, [math.inf, 0.0, 1.0]]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 2}, {"logit_bias": {0: 1.0}}])
@pytest.mark.parametrize("bad", BAD)
def test_logits_that_are_no_numbers_are_an_error_of_their_row(bad: list[float], settings: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0], bad, [9.0, 0.0, 1.0]])
    choices = choose(logits, [row(plain(**settings), [0], draw=0.5) for _ in logits])
    assert [choice.token_id for choice in choices] == [1, None, 0]
    assert choices[1].error is not None and "not finite numbers" in choices[1].error
    assert choices[0].error is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_leave_nothing_are_an_error_of_their_row(temperature: float) -> None:
    logits = random_logits(3, 4)
    allowed = torch.tensor([[True] * 4, [False] * 4, [True] * 4])
    strict = plain(temperature=temperature, logit_bias=dict.fromkeys(range(4), -math.inf))
    rows = [row(plain(temperature=temperature)), row(plain(temperature=temperature)), row(strict)]
    first, second, third = choose(logits, rows, allowed=allowed)
    assert first.error is None
    assert second.token_id is None and "the rules leave no token" in str(second.error)
    assert third.token_id is None and "the rules leave no token" in str(third.error)
    with pytest.raises(UserError, match="the rules leave no token"):
        distribution(logits[2], rows[2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_come_before_everything(temperature: float) -> None:
    logits = random_logits(4, 997)
    excluded = torch.zeros(997, dtype=torch.bool)
    excluded[::2] = True
    allowed = torch.zeros(4, 997, dtype=torch.bool)
    allowed[:, 30:60] = True
    sampling = plain(temperature=temperature, top_k=5, logit_bias={30: 1000.0, 100: 1000.0})
    expected = logits[:, 31:60:2].topk(5, dim=-1).indices * 2 + 31
    for i, of_row in enumerate(logits):
        left = distribution(of_row, row(sampling), excluded=excluded, allowed=allowed[i]).nonzero()[:, 0]
        n = 5 if temperature else 1
        assert sorted(left.tolist()) == sorted(expected[i, :n].tolist())
    choices = choose(logits, [row(sampling, draw=0.3)] * 4, excluded=excluded, allowed=allowed)
    assert all(choice.token_id in of_row for choice, of_row in zip(choices, expected.tolist(), strict=True))


# ---- a sampler of one's own


def test_a_sampler_gives_new_logits_or_a_token() -> None:
    asked: list[tuple[int, ...]] = []

    def only_two(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        asked.append(tuple(ids))
        return torch.full_like(logits, -math.inf).index_fill_(0, torch.tensor([2, 4]), 0.0)

    logits = random_logits(2, 6)
    probabilities = distribution(logits[0], row(plain(sampler=only_two), [1, 2, 3]))
    assert probabilities.tolist() == [0, 0, 0.5, 0, 0.5, 0] and asked == [(1, 2, 3)]
    # What is out stays out: the sampler's logits go through the rules that follow.
    assert distribution(logits[0], row(plain(sampler=only_two, logit_bias={2: -math.inf}))).tolist() == [0] * 4 + [1, 0]
    rows = [row(plain(sampler=lambda logits, ids: 5), draw=0.5), row(plain(temperature=0.0))]
    assert [choice.token_id for choice in choose(logits, rows)] == [5, logits[1].argmax().item()]


@pytest.mark.parametrize("answer", [torch.zeros(5), torch.zeros(6, dtype=torch.long), 6, -1, 2, 1.0, None])
def test_a_sampler_that_answers_wrongly_is_an_error_of_its_row(answer: object) -> None:
    sampling = plain(sampler=lambda logits, ids: answer, logit_bias={2: -math.inf})
    wrong, right = choose(random_logits(2, 6), [row(sampling), row(plain())])
    assert wrong.token_id is None and "the sampler returned" in str(wrong.error)
    assert right.token_id is not None


# ---- log-probabilities


def test_logprobs_are_the_models_own_and_those_of_the_draw() -> None:
    logits = random_logits(2, 997)
    sampling = plain(temperature=0.5, top_k=3, repetition_penalty=2.0, logprobs=5)
    ids = logits.argmax(-1).tolist()
    for of_row, choice in zip(logits, choose(logits, [row(sampling, ids, draw=0.5)] * 2), strict=True):
        own = of_row.log_softmax(-1)
        found = choice.logprobs
        assert found is not None and choice.token_id is not None
        assert found.logprob == own[choice.token_id].item()
        assert [token for token, _ in found.top] == own.argsort(descending=True)[:5].tolist()
        assert [value for _, value in found.top] == own.sort(descending=True).values[:5].tolist()
        ruled = distribution(of_row, row(sampling, ids)).log()
        assert found.ruled_logprob == pytest.approx(ruled[choice.token_id].item())
        assert [token for token, _ in found.ruled_top] == ruled.argsort(descending=True)[:3].tolist()
        assert [value for _, value in found.ruled_top] == pytest.approx(ruled.sort(descending=True).values[:3].tolist())


def test_a_greedy_choice_is_certain_after_the_rules() -> None:
    (choice,) = choose(LOGITS[:1], [row(Sampling(temperature=0.0, logprobs=2))])
    assert choice.logprobs is not None
    assert choice.logprobs.ruled_logprob == 0.0 and choice.logprobs.ruled_top == ((choice.token_id, 0.0),)
    assert choice.logprobs.top[0] == (choice.token_id, choice.logprobs.logprob)


def test_logprobs_of_given_tokens() -> None:
    own = LOGITS.double().log_softmax(-1)
    found = token_logprobs(LOGITS, [3, 0, 996, 5], 2)
    assert [each.logprob for each in found] == pytest.approx([own[i, t].item() for i, t in enumerate((3, 0, 996, 5))])
    assert [each.top[1][0] for each in found] == own.argsort(descending=True)[:, 1].tolist()
    assert all(each.ruled_logprob is None and each.ruled_top == () for each in found)
    assert token_logprobs(LOGITS, [3, 0, 996, 5], 0)[0].top == ()


# ---- bad words and ids, as the tokenizer has them

BPE = Tokenizer.train(["the quick brown fox jumps over the lazy dog " * 20], vocab_size=280)


def test_a_bad_word_is_banned_with_and_without_a_space_before_it() -> None:
    bans = Bans.of(plain(bad_words=["fox", [5, 6]]), BPE, 280)
    spelled = {tuple(BPE.encode("fox")), tuple(BPE.encode(" fox")), (5, 6)}
    assert set(bans.bad_words) == spelled and len(spelled) == 3


def test_a_bad_word_of_a_vocabulary_without_spaces() -> None:
    letters = Tokenizer.train(["abc"], kind="char")
    assert Bans.of(plain(bad_words="ab"), letters, letters.vocab_size).bad_words == (tuple(letters.encode("ab")),)
    with pytest.raises(UserError, match="é"):
        Bans.of(plain(bad_words=["é"]), letters, letters.vocab_size)


def test_what_ends_a_sequence() -> None:
    assert Bans.of(plain(stop_ids=[9, 3]), BPE, 280, {5, 3}).end_ids == (3, 5, 9)


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", {280: 1.0}), ("stop_ids", [280]), ("bad_words", [[1, 280]])]
)
def test_an_id_beyond_the_vocabulary_is_refused(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{name} has the id 280: the model's vocabulary has 280"):
        Bans.of(plain(**{name: value}), BPE, 280)


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
        ("typical_p", 0.0),
        ("typical_p", 1.5),
        ("presence_penalty", math.nan),
        ("frequency_penalty", "much"),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {"one": 1.0}),
        ("logit_bias", [3]),
        ("bad_words", [""]),
        ("bad_words", [[]]),
        ("bad_words", [[-1]]),
        ("min_tokens", -1),
        ("stop_ids", [-1]),
        ("stop_ids", ["a"]),
        ("stop_ids", 3),
        ("n", 0),
        ("best_of", 0),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", 1.5),
        ("sampler", 3),
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


@pytest.mark.parametrize("bias", [{"a": 1.0, 5: 2.0}, {5: 1.0, None: 2.0}, {5: 10**400}, {5: "much", "5": None}])
def test_a_bias_that_is_none_is_one_line(bias: Any) -> None:
    with pytest.raises(UserError, match="logit_bias is .* it must be a mapping of token ids to numbers"):
        Sampling.of({"logit_bias": bias})


def test_settings_are_a_key_whatever_they_were_made_from() -> None:
    one = Sampling.of({"logit_bias": {2: 1, 1: -1.5}, "bad_words": ["a", [1, 2]], "stop_ids": [7], "logprobs": 2})
    two = Sampling(logit_bias=((1, -1.5), (2, 1.0)), bad_words=("a", (1, 2)), stop_ids=(7,), logprobs=2)
    assert one == two and len({one, two}) == 1


def test_the_best_of_fewer_than_n_is_refused() -> None:
    with pytest.raises(UserError, match="best_of is 2: it must be at least n, which is 3"):
        Sampling(n=3, best_of=2)


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
