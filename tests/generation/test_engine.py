"""The engine: whatever comes, goes and is put off beside a request, its text is the one that it has alone.

"Alone" is computed without engine and cache: the whole sequence through the Decoder, in the plain operations of
PyTorch. These round otherwise than a cache does, so that where a rounding error could decide between two tokens, either
is right; what the engine itself gives in two ways must be the same to the bit where the kernels are ours.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import leftward.generation.memory as memory_module
from leftward import Config
from leftward.errors import UserError
from leftward.formats.packing import with_packed_weights
from leftward.generation.engine import Engine
from leftward.generation.requests import Event, Request
from leftward.generation.rules import Row
from leftward.generation.sampling import choose
from leftward.generation.settings import Sampling
from leftward.generation.speculative import Speculator
from leftward.kernels import native
from leftward.model.cache import KVCache, Rows, row_bytes
from leftward.model.decoder import Decoder
from leftward.planner import count_kv_cache, plan
from leftward.text.tokenizer import Tokenizer
from random_models import configs, random_decoder, random_ids

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?äß"
TOKENIZER = Tokenizer.train([ALPHABET], kind="char")
SMALL = Config(vocab_size=60, max_seq_len=64, n_layers=2, d_model=32, n_heads=4, n_kv_heads=2)
NOISE = 1e-4  # what rounding may do to a logit, generously


def greedy(max_tokens: int, **more: Any) -> Sampling:
    return Sampling(temperature=0, max_tokens=max_tokens, **more)


def make(decoder: Decoder, **options: Any) -> Engine:
    return Engine(decoder, TOKENIZER, **options)


def finish(engine: Engine) -> dict[int, list[Event]]:
    events = defaultdict(list)
    for event in engine.run():
        events[event.row].append(event)
    return events


def ids_of(events: Sequence[Event]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def alone(decoder: Decoder, request: Request, **options: Any) -> list[Event]:
    engine = make(decoder, **options)
    return finish_one(engine, engine.submit(request))


def finish_one(engine: Engine, number: int) -> list[Event]:
    return finish(engine)[number]


def is_right(decoder: Decoder, request: Request, ids: Sequence[int], *, noise: float = NOISE) -> bool:
    """Whether each token is the one that the request's own settings and random numbers choose from the logits of the
    whole sequence before it, or would with logits that are off by a rounding error."""
    sampling = request.sampling
    numbers = random.Random(sampling.seed)
    sequence = list(request.ids)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        whole = decoder(torch.tensor([[*sequence, *ids]]))[0, len(sequence) - 1 :]
    for token_id, logits in zip(ids, whole, strict=False):
        row = Row(sampling=sampling, ids=sequence, n_prompt=len(request.ids), draw=numbers.random())
        (choice,) = choose(logits[None], [row])
        if choice.token_id != token_id:
            shaken = logits + noise * torch.randn(100, len(logits), generator=generator)
            if token_id not in [each.token_id for each in choose(shaken, [row] * 100)]:
                return False
        sequence.append(token_id)
    return True


@st.composite
def samplings(draw: st.DrawFn, most: int = 10) -> Sampling:
    return Sampling(
        max_tokens=draw(st.integers(1, most)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.8, 1.5])),
        top_k=draw(st.sampled_from([0, 7])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def request_lists(draw: st.DrawFn, config: Config, most: int = 6) -> list[Request]:
    """Prompts that begin alike, or don't."""
    longest = config.max_seq_len - 1
    trunks = [random_ids(config, longest, seed=seed).tolist() for seed in (1, 2)]
    found = []
    for number in range(draw(st.integers(1, most))):
        shared, own = draw(st.integers(0, longest - 8)), draw(st.integers(0, 7))
        ids = draw(st.sampled_from(trunks))[:shared] + random_ids(config, own, seed=10 + number).tolist()
        found.append(Request(ids=ids or [3], sampling=draw(samplings())))
    return found


def drive(engine: Engine, requests: Sequence[Request], seed: int) -> tuple[dict[int, list[Event]], set[int]]:
    """Submit at any step, cancel some: all events, and the numbers that were cancelled."""
    chance = random.Random(seed)
    events: dict[int, list[Event]] = defaultdict(list)
    cancelled: set[int] = set()
    waiting = list(requests)
    steps = 0
    while waiting or engine.n_requests:
        assert (steps := steps + 1) < 3000, "it never ends"
        for _ in range(chance.randint(0, len(waiting))):
            engine.submit(waiting.pop(0))
        if chance.random() < 0.08 and len(requests) > len(waiting):
            number = chance.randrange(len(requests) - len(waiting))
            before = engine.kv_bytes_used
            held = next((job.cache.nbytes for job in engine._running if job.number == number and job.cache), 0)
            if engine.cancel(number):
                cancelled.add(number)
            # Where memory is static the rows stay, for others.
            assert engine.kv_bytes_used == before - (held if isinstance(engine.memory, memory_module.Growing) else 0)
        for event in engine.step():
            assert event.row not in cancelled
            assert not events[event.row] or events[event.row][-1].finish_reason is None, "an event behind the end"
            events[event.row].append(event)
        assert engine.kv_bytes_used <= engine.kv_bytes
        assert engine.n_running <= engine.max_rows
    return events, cancelled


def check_texts(decoder: Decoder, requests: list[Request], events: dict[int, list[Event]], cancelled: set[int]) -> None:
    """Each is as of a sequence alone, and whole where nobody cancelled it."""
    for number, request in enumerate(requests):
        ids = ids_of(events[number])
        assert is_right(decoder, request, ids)
        if number not in cancelled:
            room = decoder.config.max_seq_len - len(request.ids)
            assert len(ids) == min(request.sampling.max_tokens, room)
            assert events[number][-1].finish_reason == ("length" if request.sampling.max_tokens <= room else "context")
            assert "".join(event.text for event in events[number]) == TOKENIZER.decode(ids)


# ---- the same text, whatever happens beside it


@given(configs(vocab_size=60), st.data())
@settings(max_examples=25)
def test_a_text_does_not_depend_on_what_happens_beside_it(config: Config, data: st.DataObject) -> None:
    """Requests come at any step, are cancelled, share beginnings, are read in chunks of any size, wait for memory and
    are put off; GQA, windows, ALiBi, experts, sinks, soft caps, every kind of block."""
    decoder = random_decoder(config, std=0.3)
    requests = data.draw(request_lists(config))
    places = max(min(len(r.ids) + r.sampling.max_tokens, config.max_seq_len) for r in requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_module, "_BLOCK", data.draw(st.sampled_from([1, 4, 64])))
        engine = make(
            decoder,
            max_rows=data.draw(st.integers(1, 4)),
            chunk=data.draw(st.integers(1, 9)),
            step_tokens=data.draw(st.integers(1, 30)),
            kv_bytes=int(row_bytes(config, places, torch.float32) * data.draw(st.sampled_from([1.0, 1.6, 2.5, 8.0]))),
            share_prefixes=data.draw(st.booleans()),
        )
        events, cancelled = drive(engine, requests, data.draw(st.integers(0, 10**6)))
    check_texts(decoder, requests, events, cancelled)


@pytest.mark.skipif(not native.available(), reason="PyTorch's products round otherwise for few tokens than for many")
@given(configs(vocab_size=60).filter(lambda config: not config.n_experts), st.data())
@settings(max_examples=25)
def test_and_to_the_bit_where_the_kernels_are_ours(config: Config, data: st.DataObject) -> None:
    """Log-probabilities too: not one addition depends on what is beside it, in whatever chunks a prompt is read."""
    decoder = random_decoder(config, std=0.3)
    requests = [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, logprobs=2))
        for request in data.draw(request_lists(config, most=4))
    ]
    engine = make(
        decoder,
        max_rows=data.draw(st.integers(1, 4)),
        chunk=data.draw(st.integers(1, 9)),
        kv_bytes=int(
            row_bytes(config, config.max_seq_len, torch.float32) * data.draw(st.sampled_from([1.0, 2.0, 8.0]))
        ),
    )
    events, cancelled = drive(engine, requests, data.draw(st.integers(0, 10**6)))
    for number, request in enumerate(requests):
        expected = alone(decoder, request, share_prefixes=False)
        told = [(event.token_id, event.text, event.logprobs) for event in events[number]]
        assert told == [(event.token_id, event.text, event.logprobs) for event in expected][: len(told)]
        assert number in cancelled or len(told) == len(expected)


def test_rows_of_their_own_caches_are_attended_to_by_themselves() -> None:
    """`Rows` through the Decoder itself: the logits of each row are those of the whole sequence."""
    config = dataclasses.replace(SMALL, window=6, attention_pattern="LG", attn_sinks=True)
    decoder = random_decoder(config, std=0.3)
    ids = [random_ids(config, n, seed=n).tolist() for n in (23, 4, 11)]
    caches = [KVCache(config, 1, 40, rewindable=2) for _ in ids]
    with torch.inference_mode():
        for cache, row in zip(caches, ids, strict=True):
            decoder.hidden(torch.tensor([row[:-3]]), cache)
        padded = torch.zeros(3, 3, dtype=torch.long)
        counts = [3, 1, 2]
        for i, (row, count) in enumerate(zip(ids, counts, strict=True)):
            padded[i, :count] = torch.tensor(row[len(row) - 3 :][:count])
        logits = decoder(padded, Rows(caches), counts)
        for i, (row, count) in enumerate(zip(ids, counts, strict=True)):
            whole = decoder(torch.tensor([row]))[0, len(row) - 3 :][:count]
            torch.testing.assert_close(logits[i, :count], whole, atol=1e-4, rtol=1e-4)
    assert Rows(caches).lengths == [23, 2, 10]
    with pytest.raises(ValueError, match="without documents and prefix_lengths"):
        decoder(padded, Rows(caches), counts, prefix_lengths=[1, 1, 1])


# ---- memory


def test_memory_is_what_the_planner_says_and_never_more_than_the_budget() -> None:
    config = Config(**(SMALL.to_dict() | {"n_layers": 3, "window": 8, "attention_pattern": "LLG", "max_seq_len": 256}))
    decoder = random_decoder(config)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("int8", torch.int8)):
        for capacity in (5, 100):
            cache = KVCache(config, batch=1, capacity=capacity, dtype=dtype, rewindable=0)
            assert cache.nbytes == row_bytes(config, capacity, dtype)
            assert cache.nbytes == count_kv_cache(config, capacity, dtype=name).bytes
        engine = make(decoder, kv_dtype=name, share_prefixes=False)
        engine.submit(Request(ids=random_ids(config, 100).tolist(), sampling=greedy(28)))
        engine.step()
        # The prompt, the first 27 new tokens; the last one is not read.
        assert engine.kv_bytes_used == count_kv_cache(config, 127, dtype=name).bytes
        finish(engine)
        assert engine.kv_bytes_used == 0


@pytest.mark.skipif(not native.available(), reason="no C++ compiler here")
def test_weights_in_8_bits_have_16_bits_for_keys_and_values_as_planned() -> None:
    engine = make(with_packed_weights(random_decoder(SMALL), "q8"), share_prefixes=False)
    engine.submit(Request(ids=random_ids(SMALL, 10).tolist(), sampling=greedy(6)))
    engine.step()
    # Two layers, keys and values, two heads of 8 numbers in two bytes.
    assert engine.kv_bytes_used == 15 * 2 * 2 * 2 * 8 * 2 == plan(SMALL, seq_len=15, dtype="q8_0").kv_cache.bytes


def test_int8_takes_a_byte_a_number_and_four_a_scale() -> None:
    # Two layers, keys and values, two heads of 8 numbers and a scale: 2 · 2 · 2 · (8 + 4) bytes a token.
    assert count_kv_cache(SMALL, 10, dtype="int8").bytes == 10 * 96
    assert row_bytes(SMALL, 10, torch.int8) == 10 * 96


def test_the_youngest_is_put_off_and_nobody_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_BLOCK", 1)
    decoder = random_decoder(SMALL, std=0.3)
    requests = [Request(ids=random_ids(SMALL, 10, seed=i).tolist(), sampling=greedy(20)) for i in range(4)]
    # Room for two and a half of the four at their full length.
    engine = make(decoder, kv_bytes=row_bytes(SMALL, 72, torch.float32), share_prefixes=False)
    for request in requests:
        engine.submit(request)
    ends: list[int] = []
    seen: set[int] = set()
    put_off: set[int] = set()
    ids: dict[int, list[int]] = defaultdict(list)
    while engine.n_requests:
        for event in engine.step():
            ids[event.row] += [event.token_id or 0]
            if event.finish_reason is not None:
                ends.append(event.row)
        now = {job.number for job in engine._running}
        assert now == set(range(min(now, default=0), max(now, default=-1) + 1))  # never past an older one
        put_off |= (seen - now) - set(ends)
        seen |= now
    assert ends == [0, 1, 2, 3]
    assert put_off and 0 not in put_off
    for number, request in enumerate(requests):
        assert is_right(decoder, request, ids[number])


def test_a_sequence_ends_where_the_memory_of_one_does() -> None:
    """With 20 places: 20 tokens are read and one more is said; a longer prompt is refused, the others go on."""
    decoder = random_decoder(SMALL, std=0.3)
    engine = make(decoder, kv_bytes=row_bytes(SMALL, 20, torch.float32))
    engine.submit(Request(ids=[5] * 8, sampling=greedy(40)))
    with pytest.raises(UserError, match=r"22 tokens, more than .*kv_bytes.* 21"):
        engine.submit(Request(ids=[5] * 22, sampling=greedy(1)))
    events = finish(engine)
    assert list(events) == [0]
    assert (len(ids_of(events[0])), events[0][-1].finish_reason) == (13, "context")
    with pytest.raises(UserError, match="kv_bytes is 100: one token of this model takes 256"):
        make(decoder, kv_bytes=100)


def test_cancelling_frees_at_once() -> None:
    engine = make(random_decoder(SMALL), share_prefixes=False, max_rows=1)
    first = engine.submit(Request(ids=[4] * 9, sampling=greedy(30)))
    second = engine.submit(Request(ids=[5] * 9, sampling=greedy(3)))
    third = engine.submit(Request(ids=[6] * 9, sampling=greedy(3)))
    engine.step()
    assert engine.kv_bytes_used > 0
    assert engine.cancel(first) and engine.cancel(third)
    assert engine.kv_bytes_used == 0
    assert not engine.cancel(first) and not engine.cancel(99)
    events = finish(engine)
    assert list(events) == [second] and events[second][-1].finish_reason == "length"


# ---- prompts


def passes_of(decoder: Decoder) -> list[tuple[int, ...]]:
    """Filled with the shape of the ids of each pass."""
    shapes: list[tuple[int, ...]] = []
    decoder.embed.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    return shapes


def test_a_long_prompt_is_read_in_chunks_while_others_write() -> None:
    decoder = random_decoder(SMALL, std=0.3)
    shapes = passes_of(decoder)
    engine = make(decoder, chunk=8, step_tokens=8)
    engine.submit(Request(ids=[7, 8], sampling=greedy(12)))
    engine.step()
    engine.submit(Request(ids=random_ids(SMALL, 30).tolist(), sampling=greedy(3)))
    told = [[event.row for event in engine.step()] for _ in range(5)]
    assert told == [[0], [0], [0], [0, 1], [0, 1]]
    assert shapes == [(1, 2), (1, 1), (1, 8), (1, 1), (1, 8), (1, 1), (1, 8), (1, 1), (1, 6), (2, 1)]


def test_short_prompts_are_read_together_within_the_steps_budget() -> None:
    decoder = random_decoder(SMALL, std=0.3)
    shapes = passes_of(decoder)
    engine = make(decoder, chunk=8, step_tokens=16)
    for number in range(5):
        engine.submit(Request(ids=random_ids(SMALL, 3 + number, seed=number).tolist(), sampling=greedy(1)))
    assert len(finish(engine)) == 5
    assert shapes == [(3, 5), (2, 7)]


def test_equal_beginnings_are_read_once() -> None:
    decoder = random_decoder(SMALL, std=0.3)
    shapes = passes_of(decoder)
    engine = make(decoder, chunk=8)
    trunk = random_ids(SMALL, 20).tolist()
    prompts = [[*trunk, 1, 2], [*trunk, 3], [*trunk, 1, 2], trunk[:16], trunk[:5]]
    told: dict[int, list[Event]] = {}
    for prompt in prompts:
        number = engine.submit(Request(ids=prompt, sampling=greedy(1)))
        told[number] = finish(engine)[number]
    # Two chunks are known to the second, everything to the third and fourth; one that ends earlier is another chunk.
    assert shapes == [(1, 8), (1, 8), (1, 6), (1, 5), (1, 5)]
    for number, prompt in enumerate(prompts):
        assert is_right(decoder, Request(ids=prompt, sampling=greedy(1)), ids_of(told[number]))


def test_what_is_stored_is_not_changed_by_those_who_use_it() -> None:
    config = dataclasses.replace(SMALL, window=5, attention_pattern="LG")
    decoder = random_decoder(config, std=0.3)
    engine = make(decoder, chunk=4)
    trunk = random_ids(config, 21).tolist()
    request = Request(ids=trunk, sampling=greedy(20))
    first = finish_one(engine, engine.submit(request))
    stored = [part.clone() for node in engine.memory.prefixes._by_age for parts in node.parts for part in parts]
    for tail in (1, 2):  # they write on behind what they took
        finish_one(engine, engine.submit(Request(ids=[*trunk[:18], tail], sampling=greedy(20))))
    again = finish_one(engine, engine.submit(request))
    kept = [part for node in engine.memory.prefixes._by_age for parts in node.parts for part in parts]
    assert ids_of(again) == ids_of(first)
    assert sum(any(torch.equal(old, new) for new in kept) for old in stored) == len(stored)


def test_stored_beginnings_make_room_before_anybody_is_put_off() -> None:
    decoder = random_decoder(SMALL, std=0.3)
    engine = make(decoder, chunk=4, kv_bytes=row_bytes(SMALL, 60, torch.float32))
    for seed in range(5):
        request = Request(ids=random_ids(SMALL, 40, seed=seed).tolist(), sampling=greedy(10))
        events = finish_one(engine, engine.submit(request))
        assert is_right(decoder, request, ids_of(events))
        assert 0 < engine.kv_bytes_used <= engine.kv_bytes


# ---- the end of the context


def test_a_text_rolls_on_far_beyond_the_context() -> None:
    """Each time that 64 tokens are full, the first 6 and the later half of the others go on: what follows is what the
    model says behind those alone."""
    decoder = random_decoder(SMALL, std=0.3)
    prompt = random_ids(SMALL, 50).tolist()
    request = Request(ids=prompt, sampling=greedy(500), at_context="roll", n_keep=6)
    shapes = passes_of(decoder)
    events = alone(decoder, request, chunk=16)
    assert shapes[4:20] == [*[(1, 1)] * 13, (1, 16), (1, 16), (1, 3)]  # 35 tokens are read anew, in chunks
    decoder.embed._forward_hooks.clear()
    ids = ids_of(events)
    assert (len(ids), events[-1].finish_reason) == (500, "length")
    assert "".join(event.text for event in events) == TOKENIZER.decode(ids)
    context, left = list(prompt), ids
    while left:
        n = 64 - len(context)
        now, left = left[:n], left[n:]
        assert is_right(decoder, Request(ids=context, sampling=greedy(n)), now)
        context = [*context, *now]
        context = context[:6] + context[-29:]


def test_rolling_does_not_depend_on_others_and_is_put_off_like_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_BLOCK", 4)
    decoder = random_decoder(SMALL, std=0.3)
    requests = [
        Request(
            ids=random_ids(SMALL, 40 + i, seed=i).tolist(),
            sampling=Sampling(max_tokens=120, seed=i, temperature=0.9),
            at_context="roll",
            n_keep=i,
        )
        for i in range(3)
    ]
    engine = make(decoder, kv_bytes=row_bytes(SMALL, 130, torch.float32), chunk=16)
    for request in requests:
        engine.submit(request)
    events = finish(engine)
    for number, request in enumerate(requests):
        expected = alone(decoder, request, chunk=16)
        assert len(ids_of(expected)) == 120
        if native.available():
            assert ids_of(events[number]) == ids_of(expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"at_context": "slide"}, "at_context is 'slide': it must be 'stop' or 'roll'"),
        (
            {"n_keep": 33, "at_context": "roll"},
            "n_keep is 33: it must be a whole number from 0 to half of the context, 32",
        ),
        ({"at_context": "roll", "prefix_lm": True}, "can't roll"),
        ({"ids": []}, "the prompt is empty"),
        ({"ids": [60]}, "token id 60 is not in the model's vocabulary of 60"),
        ({"ids": [1] * 65}, "65 tokens, more than the model's context of 64"),
    ],
)
def test_requests_that_cannot_be_served(wrong: dict[str, Any], message: str) -> None:
    engine = make(random_decoder(SMALL))
    with pytest.raises(UserError, match=message):
        engine.submit(Request(**{"ids": [3], **wrong}))
    assert engine.n_requests == 0


@pytest.mark.parametrize("wrong", [{"max_rows": 0}, {"chunk": 0}, {"step_tokens": -1}, {"kv_dtype": "int4"}])
def test_engines_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        make(random_decoder(SMALL), **wrong)


# ---- errors


def test_a_row_without_numbers_fails_alone() -> None:
    """Token 7 has a damaged embedding: whoever reads it gets an error, the others get their text."""
    decoder = random_decoder(dataclasses.replace(SMALL, tie_embeddings=False), std=0.3)
    with torch.no_grad():
        decoder.embed.weight[7] = torch.nan
    clean = Request(ids=[3, 4, 5], sampling=greedy(12))
    excluded = torch.zeros(60, dtype=torch.bool)
    excluded[7] = True
    expected = ids_of(alone(decoder, clean, excluded=excluded))
    engine = make(decoder, excluded=excluded)
    for request in (clean, Request(ids=[3, 7], sampling=greedy(12)), clean):
        engine.submit(request)
    events = finish(engine)
    assert ids_of(events[0]) == ids_of(events[2]) == expected
    (failed,) = events[1]
    assert (failed.token_id, failed.finish_reason) == (None, "error")
    assert failed.message is not None and "not finite" in failed.message


# ---- int8


@given(configs(vocab_size=60), st.data())
@settings(max_examples=25)
def test_int8_keys_and_values_are_off_by_half_a_step_and_by_nothing_else(config: Config, data: st.DataObject) -> None:
    """Read in any chunks, kept rolled, grown, cut and pasted: what comes back is the number rounded to 127 steps of the
    head's largest."""
    cache = KVCache(config, 1, 3, torch.int8, rewindable=0)
    capacity = config.max_seq_len
    cache.grow(capacity)
    n = data.draw(st.integers(1, capacity))
    shape = (config.n_layers, 2, 1, config.n_kv_heads, n, config.head_dim)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(n))
    step = numbers.abs().amax(dim=-1, keepdim=True) / 127
    other = KVCache(config, 1, capacity, torch.int8, rewindable=0)
    while (start := cache.lengths[0]) < n:
        stop = data.draw(st.integers(start + 1, n))
        cache.begin(stop - start, [stop - start])
        for layer in range(config.n_layers):
            seen = cache.append(layer, *numbers[layer, :, :, :, start:stop])
            places = cache.layout(config.is_local(layer)).keys[0]
            for got, real, half in zip(seen, numbers[layer], step[layer] * 0.501, strict=True):
                known = places >= 0
                expected, off = real[:, :, places[known]], half[:, :, places[known]]
                assert ((got[:, :, known] - expected).abs() <= off).all()
        cache.advance()
        other.paste(stop, cache.cut(start, stop))
        for mine, theirs in zip(cache.keys + cache.value_scales, other.keys + other.value_scales, strict=True):
            assert torch.equal(mine, theirs)


def test_the_engine_with_int8_says_nearly_the_same() -> None:
    config = dataclasses.replace(SMALL, max_seq_len=128, window=16, attention_pattern="LG")
    decoder = random_decoder(config, std=0.1)
    prompt = random_ids(config, 60).tolist()
    plain = alone(decoder, Request(ids=prompt, sampling=greedy(30, logprobs=0)))
    rounded = alone(decoder, Request(ids=prompt, sampling=greedy(30, logprobs=0)), kv_dtype="int8", chunk=16)
    pairs = [(a, b) for a, b in zip(plain, rounded, strict=True)]
    same = next((i for i, (a, b) in enumerate(pairs) if a.token_id != b.token_id), len(pairs))
    assert same >= 1
    for a, b in pairs[:same]:
        assert a.logprobs is not None and b.logprobs is not None
        assert abs(a.logprobs.logprob - b.logprobs.logprob) < 0.02
    assert [a.logprobs for a, _ in pairs] != [b.logprobs for _, b in pairs]


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("at", [3, 4, 9])
@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenError])
def test_a_step_that_is_broken_off_can_be_taken_again(at: int, error: type[BaseException]) -> None:
    """By Ctrl-C or a function of the user's: nobody's text misses a token, and nobody's random numbers are others."""
    decoder = random_decoder(SMALL, std=0.3)
    broken = []

    def sampler(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        if len(ids) == at and not broken:
            broken.append(at)
            raise error
        return logits

    common: dict[str, Any] = {"seed": 5, "max_tokens": 12}
    requests = [
        Request(ids=[1, 2], sampling=Sampling(**common)),
        Request(ids=[1, 2, 3], sampling=Sampling(sampler=sampler, **common), eos_ids=()),
        Request(ids=[7, 8] * 4, sampling=greedy(12), speculative="prompt_lookup"),
        Request(ids=[1, 2], sampling=greedy(0)),
    ]
    engine = make(decoder, speculator=Speculator(60))
    for request in requests:
        engine.submit(request)
    events: dict[int, list[Event]] = defaultdict(list)
    for _ in range(60):
        try:
            for event in engine.step():
                events[event.row].append(event)
        except error:
            assert engine.kv_bytes_used == engine.memory.prefixes.nbytes
    assert broken and not engine.n_requests
    for number, request in enumerate(requests):
        expected = alone(decoder, request, speculator=Speculator(60))
        assert [(event.token_id, event.text, event.finish_reason) for event in events[number]] == [
            (event.token_id, event.text, event.finish_reason) for event in expected
        ]


def test_what_was_not_told_of_a_cancelled_request_is_not_told() -> None:
    decoder = random_decoder(SMALL, std=0.3)

    def sampler(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        raise KeyboardInterrupt

    engine = make(decoder)
    empty = engine.submit(Request(ids=[1], sampling=greedy(0)))
    other = engine.submit(Request(ids=[1], sampling=greedy(3, sampler=sampler)))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.n_requests == 2
    assert engine.cancel(other) and engine.n_requests == 1
    assert engine.cancel(empty) and not engine.cancel(empty)
    assert engine.n_requests == 0 and not engine.step()


@pytest.mark.parametrize("static", [False, True])
def test_a_context_rolls_that_is_shorter_than_the_models(static: bool) -> None:
    """Because the memory holds no more of one sequence; the last place is never read, and needs no room."""
    decoder = random_decoder(SMALL, std=0.3)
    engine = make(decoder, kv_bytes=row_bytes(SMALL, 20, torch.float32), share_prefixes=False, static=static)
    number = engine.submit(Request(ids=[1, 2, 3], sampling=greedy(60), at_context="roll", eos_ids=()))
    events = [event for _ in range(70) for event in engine.step() if event.row == number]
    assert len(events) == 60 and events[-1].finish_reason == "length" and not engine.n_requests


def test_a_context_rolls_whose_step_was_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the token that fills it and the rolling."""
    decoder = random_decoder(SMALL, std=0.3)
    requests = [Request(ids=[n, 2, 3], sampling=greedy(70), at_context="roll", eos_ids=()) for n in (1, 5)]
    expected = [ids_of(alone(decoder, request)) for request in requests]
    engine = make(decoder)
    for request in requests:
        engine.submit(request)
    settle, broken = engine._settle, []

    def breaks(job: Any) -> None:
        if not broken and len(job.context) == 64:
            broken.append(job)
            raise BrokenError
        settle(job)

    monkeypatch.setattr(engine, "_settle", breaks)
    ids: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(100):
        try:
            for event in engine.step():
                ids[event.row] += ids_of([event])
        except BrokenError:
            continue
    assert broken and not engine.n_requests
    assert [ids[0], ids[1]] == expected
