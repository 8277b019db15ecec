"""Guesses: what is proposed, that a text is as likely as without them, and that fewer passes write it."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from leftward import Config, LanguageModel
from leftward.errors import UserError
from leftward.formats.packing import with_packed_weights
from leftward.generation.engine import Engine
from leftward.generation.requests import Event, Request
from leftward.generation.rules import Guess, Row
from leftward.generation.sampling import choose, distribution, draw_from
from leftward.generation.settings import Sampling
from leftward.generation.speculative import Lookup, Speculator
from leftward.kernels import native
from leftward.model.decoder import Decoder
from leftward.text.tokenizer import Tokenizer
from random_models import configs, random_decoder

TOKENIZER = Tokenizer.train(["abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?äß"], kind="char")


def run(
    decoder: Decoder, requests: Sequence[Request], draft: Decoder | None = None, **options: Any
) -> tuple[list[list[int]], list[Event], int]:
    """Ids of each request, its last event, and the passes of the model behind the prompts."""
    speculator = Speculator(decoder.config.vocab_size, draft)
    engine = Engine(decoder, TOKENIZER, speculator=speculator, **options)
    for request in requests:
        engine.submit(request)
    ids: list[list[int]] = [[] for _ in requests]
    last: dict[int, Event] = {}
    steps = 0
    while engine.n_requests:
        steps += 1
        for event in engine.step():
            assert event.message is None, event.message
            ids[event.row] += [] if event.token_id is None else [event.token_id]
            last[event.row] = event
    assert not speculator._states  # nothing is left of requests that have ended
    return ids, [last[row] for row in range(len(requests))], steps


def nearby(decoder: Decoder, std: float) -> Decoder:
    """A draft that often agrees."""
    draft = Decoder(decoder.config).eval()
    draft.load_state_dict(decoder.state_dict())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return draft


# ---- what is proposed


def test_lookup_by_hand() -> None:
    lookup = Lookup()
    assert lookup.guess([1, 2, 3, 4, 5, 1, 2], 3) == [3, 4, 5]
    assert lookup.guess([1, 2, 3, 4, 5, 1, 2, 3, 9], 3) == []  # 3 9 stood nowhere
    assert lookup.guess([1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]  # the later one of 1 2 3
    assert Lookup().guess([7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]  # what reaches the end repeats itself
    assert Lookup().guess([7, 7, 7], 4) == [7, 7, 7, 7]
    assert Lookup().guess([1, 2, 5, 9, 3, 1, 2, 6, 3, 1, 2], 1) == [6]  # 3 1 2 rather than 1 2
    assert Lookup().guess([1, 1], 3) == [] == Lookup().guess([4], 3) == Lookup().guess([], 3)


@given(ids=st.lists(st.integers(0, 3), min_size=2, max_size=40), n=st.integers(1, 9), cuts=st.sets(st.integers(0, 40)))
def test_lookup_finds_the_last_place_of_the_longest_run(ids: list[int], n: int, cuts: set[int]) -> None:
    lookup = Lookup()
    for cut in sorted(cuts):
        lookup.guess(ids[:cut], 1)  # what it knew before makes no difference
    expected: list[int] = []
    for size in (4, 3, 2):
        starts = [i for i in range(len(ids) - size) if ids[i : i + size] == ids[-size:]]
        if starts:
            long = list(ids)
            while len(long) < starts[-1] + size + n:
                long.append(long[len(long) - (len(ids) - starts[-1] - size)])
            expected = long[starts[-1] + size :][:n]
            break
    assert lookup.guess(ids, n) == expected


# ---- that a guess changes no probability


def chi_square(counts: Counter[Any], expected: dict[Any, float]) -> float:
    """The p-value of counts; what is rarer than 5 in all is counted together."""
    n = counts.total()
    assert set(counts) <= {key for key, p in expected.items() if p > 0}
    common = [key for key, p in expected.items() if p * n >= 5]
    observed = [counts[key] for key in common]
    wanted = [expected[key] * n for key in common]
    if (rest := n - sum(wanted)) > 1e-6 * n:
        observed.append(n - sum(observed))
        wanted.append(rest)
    return float(stats.chisquare(observed, [w * n / sum(wanted) for w in wanted]).pvalue)


RULES: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 4, "top_p": 1.0, "repetition_penalty": 1.4},
    {"temperature": 0.9, "top_p": 0.9, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 1.0, "typical_p": 0.7, "logit_bias": {2: 1.5, 3: -1.0}},
]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("similar", [True, False])
def test_a_guess_that_was_drawn_leaves_the_distribution_as_it_is(rules: dict[str, Any], similar: bool) -> None:
    generator = torch.Generator().manual_seed(len(str(rules)))
    own, noise = torch.randn(2, 8, generator=generator)
    other = own + noise / 3 if similar else 2 * noise
    sampling = Sampling.of(rules)
    allowed = torch.tensor([True] * 7 + [False])
    row = Row(sampling=sampling, ids=[1, 4, 4, 6], n_prompt=1)
    p = distribution(own, row, allowed=allowed)
    q = distribution(other, row)  # a draft that doesn't know what is allowed
    numbers, n = random.Random(1), 1500
    guesses = [Guess(draw_from(q, numbers.random()), q, numbers.random()) for _ in range(n)]
    rows = [
        Row(sampling=sampling, ids=[1, 4, 4, 6], n_prompt=1, draw=numbers.random(), guess=guess) for guess in guesses
    ]
    chosen = [choice.token_id for choice in choose(own.expand(n, -1), rows, allowed=allowed.expand(n, -1))]
    kept = sum(token_id == guess.token_id for token_id, guess in zip(chosen, guesses, strict=True))
    assert chi_square(Counter(chosen), dict(enumerate(p.tolist()))) > 1e-4
    # As many are kept as can be: what the two distributions have in common, and what by chance is drawn again (nothing:
    # where a guess is refused, its token has no more of p than of q).
    common = float(torch.minimum(p, q).sum())
    assert abs(kept / n - common) < 4 * (0.25 / n) ** 0.5


def by_hand(
    decoder: Decoder, prompt: list[int], n: int, temperature: float, penalty: float, top_p: float
) -> dict[Any, float]:
    """The probability of every output of n tokens, from logits of whole sequences."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n):
        longer: dict[tuple[int, ...], float] = {}
        for output, probability in found.items():
            ids = prompt + list(output)
            with torch.no_grad():
                logits = decoder(torch.tensor([ids]))[0, -1].double()
            for token_id in set(ids):
                logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
            p = (logits / temperature).softmax(0)
            order = p.argsort(descending=True).tolist()
            kept, mass = [], 0.0
            for token_id in order:
                if mass >= top_p:
                    break
                kept.append(token_id)
                mass += float(p[token_id])
            for token_id in kept:
                longer[(*output, token_id)] = probability * float(p[token_id]) / mass
        found = longer
    return found


@pytest.mark.parametrize("way", ["draft", "prompt_lookup"])
@pytest.mark.parametrize(
    ("temperature", "penalty", "top_p"), [(1.0, 1.0, 1.0), (1.2, 1.3, 0.9)], ids=["plain", "penalty and top_p"]
)
def test_outputs_are_as_likely_as_without_guesses(way: Any, temperature: float, penalty: float, top_p: float) -> None:
    """Over many seeds, every output of a tiny model comes as often as its probability says."""
    config = Config(vocab_size=3, max_seq_len=32, n_layers=1, d_model=16, n_heads=2)
    decoder = random_decoder(config, seed=5, std=0.2)
    draft = nearby(decoder, 0.1)
    prompt, n = [0, 0, 1, 0, 2, 1, 1, 2, 2, 0], 4  # every pair stands in it
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty, top_p=top_p, max_tokens=n)
    seeds = range(1, 601)
    requests = [
        Request(ids=prompt, sampling=dataclasses.replace(sampling, seed=seed), speculative=way) for seed in seeds
    ]
    outputs, last, _ = run(decoder, requests, draft, max_rows=600)
    assert 0.1 < sum(e.n_accepted for e in last) / sum(e.n_guessed for e in last) < 0.95
    expected = by_hand(decoder, prompt, n, temperature, penalty, top_p)
    assert abs(sum(expected.values()) - 1) < 1e-9
    assert chi_square(Counter(map(tuple, outputs)), expected) > 1e-4
    # The first tokens alone, which shows more of a small fault in what follows them.
    for place in range(n):
        marginal: Counter[int] = Counter()
        for output, probability in expected.items():
            marginal[output[place]] += probability  # type: ignore[assignment]
        assert chi_square(Counter(output[place] for output in outputs), dict(marginal)) > 1e-4


# ---- that greedy text, and that of a seed, is the same


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_greedy_text_is_the_same_for_every_architecture(data: st.DataObject) -> None:
    config = data.draw(configs(vocab_size=7, max_seq_len=40, vocab_multiple=1))
    decoder = random_decoder(config, seed=data.draw(st.integers(0, 9)), std=0.3)
    of_draft = data.draw(st.sampled_from([config, None])) or data.draw(configs(vocab_size=9, max_seq_len=24))
    draft = nearby(decoder, 0.02) if of_draft is config else random_decoder(of_draft, std=0.3)
    prompts = [[1, 2, 1, 2, 3, 1], [4], [5, 6] * 9]
    wanted = Sampling(temperature=0, max_tokens=data.draw(st.integers(1, 30)), repetition_penalty=1.1)
    policy: dict[str, Any] = data.draw(st.sampled_from([{}, {"at_context": "roll", "n_keep": 2}]))
    plain = [Request(ids=ids, sampling=wanted, **policy) for ids in prompts]
    expected, ends, _ = run(decoder, plain)
    ways = itertools.product(prompts, ("prompt_lookup", "draft", None))
    mixed = [Request(ids=ids, sampling=wanted, speculative=way, **policy) for ids, way in ways]  # type: ignore[arg-type]
    found, found_ends, _ = run(decoder, mixed, draft, chunk=data.draw(st.sampled_from([3, 128])))
    for i, ids in enumerate(found):
        assert ids == expected[i // 3]
        assert found_ends[i].finish_reason == ends[i // 3].finish_reason
        assert 0 <= found_ends[i].n_accepted <= found_ends[i].n_guessed
        assert i % 3 < 2 or found_ends[i].n_guessed == 0


def test_the_text_of_a_seed_is_the_same_with_prompt_lookup() -> None:
    config = Config(vocab_size=TOKENIZER.vocab_size, max_seq_len=128, n_layers=2, d_model=32, n_heads=4)
    decoder = random_decoder(config, std=0.3)
    prompt = TOKENIZER.encode("ab cd ab cd ab")
    requests = {
        way: [
            Request(
                ids=prompt,
                sampling=Sampling(seed=seed, temperature=0.3, frequency_penalty=0.2, max_tokens=50, logprobs=2),
                speculative=way,
            )
            for seed in range(8)
        ]
        for way in ("prompt_lookup", None)
    }
    guessed, ends, _ = run(decoder, requests["prompt_lookup"])
    assert guessed == run(decoder, requests[None])[0]
    assert sum(end.n_accepted for end in ends) > 3
    assert guessed == [run(decoder, [request])[0][0] for request in requests["prompt_lookup"]]  # alone


def test_with_a_draft_a_seed_gives_one_text_whatever_is_beside_it() -> None:
    config = Config(vocab_size=TOKENIZER.vocab_size, max_seq_len=128, n_layers=2, d_model=32, n_heads=4)
    decoder = random_decoder(config, std=0.3)
    draft = nearby(decoder, 0.02)
    requests = [
        Request(ids=TOKENIZER.encode("ab cd"[:i]), sampling=Sampling(seed=7, max_tokens=30), speculative="draft")
        for i in range(1, 6)
    ]
    together, _, _ = run(decoder, requests, draft)
    assert together == [run(decoder, [request], draft)[0][0] for request in requests]
    assert together == run(decoder, requests, draft, max_rows=2)[0]


def test_memory_that_is_short_changes_no_greedy_text() -> None:
    config = Config(vocab_size=TOKENIZER.vocab_size, max_seq_len=256, n_layers=1, d_model=16, n_heads=2)
    decoder = random_decoder(config, std=0.3)
    sampling = Sampling(temperature=0, max_tokens=150)
    prompts = [TOKENIZER.encode("ab cd "[:i]) for i in range(1, 6)]
    requests = [Request(ids=ids, sampling=sampling, speculative="draft") for ids in prompts]
    expected, _, _ = run(decoder, [Request(ids=ids, sampling=sampling) for ids in prompts])
    # As much again for what the draft holds, which is a model of the same size.
    assert run(decoder, requests, nearby(decoder, 0.01), kv_bytes=2 * (2 * 16 * 4 * 300))[0] == expected


def test_what_a_draft_holds_is_part_of_the_budget() -> None:
    config = Config(vocab_size=TOKENIZER.vocab_size, max_seq_len=200, n_layers=2, d_model=32, n_heads=2)
    of_draft = Config(vocab_size=TOKENIZER.vocab_size, max_seq_len=100, n_layers=1, d_model=16, n_heads=1)
    decoder, draft = random_decoder(config, std=0.3), random_decoder(of_draft, std=0.3)
    a_place, of_a_draft = 2 * 2 * 32 * 4, 2 * 1 * 16 * 4  # keys and values, layers, width, bytes a number
    kv_bytes = 150 * (a_place + of_a_draft)
    speculator = Speculator(config.vocab_size, draft)
    engine = Engine(decoder, TOKENIZER, speculator=speculator, kv_bytes=kv_bytes, share_prefixes=False)

    def request(way: Any, max_tokens: int = 300) -> Request:
        return Request(ids=[5, 6, 7], sampling=Sampling(temperature=0, max_tokens=max_tokens), speculative=way)

    for way in ("draft", "draft", None, "prompt_lookup"):
        engine.submit(request(way, 60))
    while engine.n_requests:
        engine.step()
        held = [state.cache.nbytes for state in speculator._states.values() if state.cache is not None]
        rows = [job.cache.nbytes for job in engine._running if job.cache is not None]
        assert sum(rows) + sum(held) <= engine.kv_bytes_used <= kv_bytes
    assert engine.kv_bytes_used == 0
    # One that fills the budget alone: the draft's own context is what its part ends at.
    for way, places in (("draft", (kv_bytes - 100 * of_a_draft) // a_place), (None, kv_bytes // a_place)):
        engine.submit(request(way))
        tokens = [event for event in engine.run() if event.token_id is not None]
        assert (len(tokens), tokens[-1].finish_reason) == (places + 1 - 3, "context")


@pytest.mark.skipif(not native.available(), reason="no C++ compiler here")
def test_what_a_draft_in_8_bits_holds_is_what_the_budget_counts() -> None:
    config = Config(vocab_size=TOKENIZER.vocab_size, max_seq_len=100, n_layers=1, d_model=32, n_heads=2)
    speculator = Speculator(config.vocab_size, with_packed_weights(random_decoder(config), "q8"))
    engine = Engine(random_decoder(config), TOKENIZER, speculator=speculator, share_prefixes=False)
    engine.submit(Request(ids=[5, 6, 7], sampling=Sampling(temperature=0, max_tokens=40), speculative="draft"))
    while engine.n_requests:
        engine.step()
        for job, state in speculator._states.items():
            if state.cache is not None and job.cache is not None:
                assert state.cache.nbytes == speculator.row_bytes(job.cache.capacity)
                assert engine.kv_bytes_used == job.cache.nbytes + state.cache.nbytes


def test_what_an_engine_can_not_guess_with_is_refused() -> None:
    config = Config(vocab_size=TOKENIZER.vocab_size, max_seq_len=32, n_layers=1, d_model=16, n_heads=2)
    decoder = random_decoder(config)
    for speculator, way, message in (
        (None, "prompt_lookup", "speculative is 'prompt_lookup': this engine has no speculator"),
        (Speculator(config.vocab_size), "draft", "speculative is 'draft': this engine can have prompt_lookup"),
        (Speculator(config.vocab_size, decoder), "prompt-lookup", "can have prompt_lookup or draft"),
    ):
        engine = Engine(decoder, TOKENIZER, speculator=speculator)
        with pytest.raises(UserError, match=message):
            engine.submit(Request(ids=[5], speculative=way))  # type: ignore[arg-type]


# ---- that fewer passes are needed


def test_a_perfect_draft_is_always_right_and_saves_passes() -> None:
    config = Config(vocab_size=TOKENIZER.vocab_size, max_seq_len=256, n_layers=2, d_model=32, n_heads=4)
    decoder = random_decoder(config, std=0.3)
    sampling = Sampling(temperature=0, max_tokens=100)
    prompt = TOKENIZER.encode("abc")
    plain, _, n_plain = run(decoder, [Request(ids=prompt, sampling=sampling)])
    guessed, (end,), n_guessed = run(decoder, [Request(ids=prompt, sampling=sampling, speculative="draft")], decoder)
    assert guessed == plain
    assert end.n_accepted == end.n_guessed > 90
    assert n_plain == 100
    # The prompt; 4 + 1; 8 + 1; then at least five times, for 85 tokens, 16 + 1, or less where a block of memory ends.
    assert 8 <= n_guessed <= 10


def test_lengths_grow_with_what_is_right_and_shrink_with_what_is_not() -> None:
    speculator = Speculator(9, most=16)

    class Job:
        sampling = Sampling()

    job: Any = Job()
    lengths = []
    for n_accepted in (4, 8, 16, 16, 3, 0, 1, 2, 4):
        n = speculator._state(job).length
        lengths.append(n)
        speculator.settle(job, n, min(n, n_accepted))
    assert lengths == [4, 8, 16, 16, 16, 4, 1, 2, 4]


def test_a_draft_under_a_constraint_guesses_what_is_allowed() -> None:
    pytest.importorskip("llguidance", reason="llguidance (leftward's extra `constrained`) is not installed")
    config = Config(vocab_size=TOKENIZER.vocab_size, max_seq_len=256, n_layers=2, d_model=32, n_heads=4)
    decoder = random_decoder(config, std=0.3)
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, max_tokens=60, seed=1, regex="((ab|cd|e[fg]) ){40}!")
        prompt = TOKENIZER.encode("ab ")
        _, (end,), _ = run(decoder, [Request(ids=prompt, sampling=sampling, speculative="draft")], decoder)
        assert end.n_accepted == end.n_guessed > 10  # its own draft: whatever is guessed is right


# ---- the public door


def test_generate_with_guesses_and_what_can_not_be() -> None:
    config = Config(vocab_size=TOKENIZER.vocab_size, max_seq_len=64, n_layers=1, d_model=16, n_heads=2)
    model = LanguageModel(random_decoder(config, std=0.3), TOKENIZER)
    draft = LanguageModel(random_decoder(config, seed=1, std=0.3), TOKENIZER)
    other = LanguageModel(random_decoder(config), Tokenizer.train(["other"], kind="char"))
    expected = model.generate("ab ab ab", temperature=0, max_tokens=20)
    assert model.generate("ab ab ab", temperature=0, max_tokens=20, speculative="prompt_lookup") == expected
    assert model.generate("ab ab ab", temperature=0, max_tokens=20, draft=draft) == expected
    assert "".join(model.stream("ab ab ab", temperature=0, max_tokens=20, draft=draft)) == expected
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"speculative": "yes"}, "speculative is 'yes': only 'prompt_lookup' is possible"),
        ({"speculative": "prompt_lookup", "draft": draft}, "speculative and draft are both given"),
        ({"draft": other}, r"the draft has another tokenizer \(char, \d+ tokens\) than the model \(char, \d+\)"),
    ]
    for given_, message in wrong:
        with pytest.raises(UserError, match=message):
            model.generate("a", **given_)


@pytest.mark.parametrize("native", [True, False])
def test_a_draft_does_not_guess_behind_what_it_has_not(native: bool) -> None:
    """Ids beyond the draft's vocabulary stand in prompts, and come into texts; kernels would read behind its table."""
    config = Config(vocab_size=60, max_seq_len=64, n_layers=2, d_model=32, n_heads=4)
    decoder = random_decoder(config, std=0.3)
    draft = random_decoder(dataclasses.replace(config, vocab_size=50), std=0.3)
    if not native:  # as with a hook
        draft.blocks[0].register_forward_hook(lambda module, inputs, output: None)
    prompts = [[1, 59, 2], [50], *([i, 2, 3] for i in range(8))]
    plain = [Request(ids=ids, sampling=Sampling(temperature=0, max_tokens=30), eos_ids=()) for ids in prompts]
    expected, _, _ = run(decoder, plain)
    found, last, _ = run(decoder, [dataclasses.replace(each, speculative="draft") for each in plain], draft)
    assert found == expected
    assert not last[0].n_guessed and not last[1].n_guessed and any(event.n_guessed for event in last)
    assert any(max(ids) >= 50 for ids in found[2:])


def test_a_text_that_a_draft_helped_is_the_same_where_it_was_put_off() -> None:
    """At any length: the guesses that there is room for, which decide what its random numbers are for, are the same."""
    config = Config(vocab_size=60, max_seq_len=200, n_layers=1, d_model=32, n_heads=4)
    decoder = random_decoder(config, std=0.2)
    draft = nearby(decoder, 0.03)
    for seed in range(12):
        sampling = Sampling(temperature=1, top_p=1, seed=seed, max_tokens=16)
        request = Request(ids=[3] * 55, sampling=sampling, speculative="draft")
        texts = []
        for at in (None, 60, 63, 64, 65):
            engine = Engine(decoder, TOKENIZER, speculator=Speculator(60, draft), share_prefixes=False)
            engine.submit(request)
            ids: list[int | None] = []
            while engine.n_requests:
                if at is not None and engine._running and len(engine._running[0].context) >= at:
                    at = None
                    engine._put_all_off()
                events = engine.step()
                ids += [event.token_id for event in events]
            assert at is None and events[-1].n_guessed
            texts.append(ids)
        assert all(text == texts[0] for text in texts)


def test_a_draft_that_is_broken_off_leaves_its_constraint_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(vocab_size=TOKENIZER.vocab_size, max_seq_len=64, n_layers=1, d_model=32, n_heads=4)
    decoder = random_decoder(config, std=0.3)
    sampling = Sampling(temperature=0, max_tokens=40, regex="(ab|cd){6}e")
    request = Request(ids=[1, 2], sampling=sampling, speculative="draft")
    ((expected,), _, _) = run(decoder, [request], decoder)
    speculator = Speculator(config.vocab_size, decoder)
    read, calls = speculator._read, itertools.count()

    def breaks(*arguments: Any) -> torch.Tensor:
        if next(calls) == 2:  # behind two guesses that the constraint was told of
            raise KeyboardInterrupt
        return read(*arguments)

    monkeypatch.setattr(speculator, "_read", breaks)
    engine = Engine(decoder, TOKENIZER, speculator=speculator)
    engine.submit(request)
    ids: list[int] = []
    broken = 0
    for _ in range(100):
        try:
            ids += [event.token_id for event in engine.step() if event.token_id is not None]
        except KeyboardInterrupt:
            broken += 1
    assert broken == 1 and not engine.n_requests
    assert ids == expected
