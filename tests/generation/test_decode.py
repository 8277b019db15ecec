"""The decoding loop: what comes out, when it stops, and that neighbours and the cache change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leftward import Config
from leftward.errors import UserError
from leftward.generation.decode import decode
from leftward.generation.requests import Event, StopScanner
from leftward.generation.settings import Sampling
from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder
from leftward.text.tokenizer import Tokenizer
from random_models import configs, random_decoder, random_ids

# Five special tokens and the characters of a small alphabet: 60 ids at least, as many as the random Configs have.
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?äß"
TOKENIZER = Tokenizer.train([ALPHABET], kind="char")
BPE = Tokenizer.train(["a small text 𝄞 é " * 3], kind="bpe", vocab_size=257)  # all bytes


def run(
    decoder: Decoder, prompts: Sequence[Sequence[int]], *samplings: Sampling, **options: Any
) -> tuple[list[list[int]], list[str], list[str | None]]:
    """Ids, text and finish reason of each row, with the promises that hold for every run."""
    tokenizer = options.pop("tokenizer", TOKENIZER)
    every = list(samplings) if len(samplings) == len(prompts) else list(samplings) * len(prompts)
    ids: list[list[int]] = [[] for _ in prompts]
    texts = [""] * len(prompts)
    reasons: list[str | None] = [None] * len(prompts)
    for event in decode(decoder, tokenizer, prompts, every, **options):
        assert reasons[event.row] is None, "an event behind the end"
        if event.token_id is not None:
            ids[event.row].append(event.token_id)
        texts[event.row] += event.text
        reasons[event.row] = event.finish_reason
    assert None not in reasons
    return ids, texts, reasons


def greedy(max_tokens: int, **settings: Any) -> Sampling:
    return Sampling(temperature=0, max_tokens=max_tokens, **settings)


def small_decoder(**values: Any) -> Decoder:
    return random_decoder(
        Config(**{"vocab_size": 60, "max_seq_len": 48, "n_layers": 2, "d_model": 32, "n_heads": 4, **values}), std=0.3
    )


DECODER = small_decoder()
PROMPT = random_ids(DECODER.config, 10).tolist()


class Scripted(Decoder):
    """Says the given ids one after another, whatever it reads; row i says script i."""

    def __init__(self, *scripts: Sequence[int], vocab_size: int = 300, max_seq_len: int = 64) -> None:
        super().__init__(Config(vocab_size=vocab_size, max_seq_len=max_seq_len, n_layers=1, d_model=8, n_heads=1))
        self.scripts = scripts
        self.calls = 0
        self.eval()

    def hidden(  # type: ignore[override]
        self, ids: torch.Tensor, cache: KVCache | None = None, lengths: Any = None, **asked: Any
    ) -> torch.Tensor:
        hidden = torch.zeros(*ids.shape, self.config.vocab_size)
        for row in range(ids.shape[0]):
            hidden[row, :, self.scripts[row][self.calls]] = 1.0
        self.calls += 1
        self.head = torch.nn.Identity()  # type: ignore[assignment]
        if cache is not None:
            cache.begin(ids.shape[1], lengths or [ids.shape[1]] * ids.shape[0])
            cache.advance()
        return hidden


def said(text: str, tokenizer: Tokenizer = BPE) -> list[int]:
    return tokenizer.encode(text)


def scripted(text: str, **sampling: Any) -> tuple[str, str | None]:
    """What is shown of a model that says `text` byte by byte."""
    ids = [BPE.encode(character)[-1] if character.isascii() else None for character in text]
    assert None not in ids
    decoder = Scripted([i for i in ids if i is not None] + [0])
    events = list(decode(decoder, BPE, [[5]], [greedy(len(ids), **sampling)]))
    return "".join(event.text for event in events), events[-1].finish_reason


# ---- the same as without cache and without neighbours


@given(configs(vocab_size=60), st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=40)
def test_greedy_is_the_argmax_of_the_full_forward(config: Config, n_prompt: int, n_new: int) -> None:
    decoder = random_decoder(config, std=0.3)
    prompt = random_ids(config, n_prompt).tolist()
    ids, _, _ = run(decoder, [prompt], greedy(n_new))
    sequence = list(prompt)
    with torch.inference_mode():
        for _ in range(n_new):
            sequence.append(int(decoder(torch.tensor([sequence]))[0, -1].argmax()))
    assert ids == [sequence[n_prompt:]]


@given(configs(vocab_size=60), st.lists(st.integers(1, 10), min_size=2, max_size=5), st.data())
@settings(max_examples=40)
def test_alone_is_the_same_as_in_a_batch(config: Config, lengths: list[int], data: st.DataObject) -> None:
    """Rows with prompts, settings, seeds, lengths and ends of their own."""
    decoder = random_decoder(config, std=0.3)
    prompts = [random_ids(config, length, seed=i).tolist() for i, length in enumerate(lengths)]
    samplings = [
        data.draw(
            st.builds(
                Sampling,
                max_tokens=st.integers(0, 12),
                temperature=st.sampled_from([0.0, 0.7, 1.5]),
                top_k=st.sampled_from([0, 5]),
                top_p=st.sampled_from([0.8, 1.0]),
                repetition_penalty=st.sampled_from([1.0, 1.3]),
                seed=st.integers(0, 100),
            )
        )
        for _ in prompts
    ]
    together = run(decoder, prompts, *samplings, eos_ids=[7, 8, 9])
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        alone = run(decoder, [prompt], sampling, eos_ids=[7, 8, 9])
        assert [part[0] for part in alone] == [part[i] for part in together]


def test_samples_of_one_prompt_share_its_prefill() -> None:
    passes: list[tuple[int, ...]] = []
    decoder = small_decoder()
    decoder.embed.register_forward_hook(lambda module, inputs, output: passes.append(tuple(inputs[0].shape)))
    samplings = [Sampling(seed=seed, max_tokens=3) for seed in range(4)]
    together = run(decoder, [PROMPT] * 4, *samplings)
    assert passes == [(1, 10), (4, 1), (4, 1)]
    assert [run(decoder, [PROMPT], sampling)[0][0] for sampling in samplings] == together[0]
    assert len({tuple(ids) for ids in together[0]}) > 1


def test_a_seed_reproduces_and_another_differs() -> None:
    texts = [run(DECODER, [PROMPT], Sampling(seed=seed, max_tokens=20))[1][0] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_positions_processed_are_29_and_not_390() -> None:
    """A 10-token prompt and 20 new tokens: 10 + 19 positions; without a cache it would be 10 + 11 + … + 29 = 390."""
    processed: list[int] = []
    decoder = small_decoder()
    decoder.embed.register_forward_hook(lambda module, inputs, output: processed.append(inputs[0].numel()))
    run(decoder, [PROMPT], greedy(20))
    assert sum(processed) == 29
    processed.clear()
    with torch.inference_mode():
        for length in range(10, 30):
            decoder(torch.zeros(1, length, dtype=torch.long))
    assert sum(processed) == 390


def test_the_cache_has_room_for_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[KVCache] = []

    class Watched(KVCache):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr("leftward.generation.memory.KVCache", Watched)
    run(DECODER, [PROMPT, PROMPT[:4]], greedy(6))
    assert [cache.capacity for cache in made] == [15, 9]  # the last token is not read
    run(DECODER, [PROMPT], greedy(10_000))
    assert made[-1].capacity == DECODER.config.max_seq_len - 1


def test_repetition_penalty_counts_prompt_and_output() -> None:
    decoder = small_decoder(tie_embeddings=False)
    with torch.no_grad():
        decoder.head.weight.abs_()  # all logits have the sign of the summed stream
    ids, _, _ = run(decoder, [PROMPT], greedy(30, repetition_penalty=1e6))
    used = [*PROMPT, *ids[0]]
    fresh = ids[0][: 60 - len(set(PROMPT))]
    assert len(set(ids[0])) > len(set(run(decoder, [PROMPT], greedy(30))[0][0]))
    with torch.inference_mode():
        for i, token_id in enumerate(fresh):
            before = used[: len(PROMPT) + i]
            logits = decoder(torch.tensor([before]))[0, -1]
            logits[before] = torch.where(logits[before] < 0, logits[before] * 1e6, logits[before] / 1e6)
            assert token_id == int(logits.argmax())


# ---- when it stops


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 20])
def test_max_tokens(max_tokens: int) -> None:
    ids, texts, reasons = run(DECODER, [PROMPT], greedy(max_tokens))
    assert (len(ids[0]), reasons) == (max_tokens, ["length"])
    assert texts[0] == TOKENIZER.decode(ids[0])


def test_a_full_context_ends_with_its_own_reason() -> None:
    ids, _, reasons = run(DECODER, [PROMPT, PROMPT[:5]], greedy(41))
    assert [len(row) for row in ids] == [38, 41]
    assert reasons == ["context", "length"]
    exact = random_ids(DECODER.config, 48).tolist()
    ids, texts, reasons = run(DECODER, [exact], greedy(5))
    assert (ids, texts, reasons) == ([[]], [""], ["context"])


def test_every_eos_of_a_list_ends_and_none_is_shown() -> None:
    for eos in (7, 9):
        decoder = Scripted([20, 21, eos, 22], vocab_size=60)
        ids, texts, reasons = run(decoder, [[5]], greedy(4), eos_ids=[7, 9])
        assert ids == [[20, 21, eos]]
        assert texts == [TOKENIZER.decode([20, 21])]
        assert reasons == ["stop"]


def test_ends_that_the_vocabulary_lacks_never_come_and_harm_nobody() -> None:
    """Files of models name ids beyond their vocabulary, and −1 for none."""
    plain, _, _ = run(DECODER, [PROMPT], greedy(8))
    for min_tokens in (0, 4):
        assert run(DECODER, [PROMPT], greedy(8, min_tokens=min_tokens), eos_ids={-1, 60, 10**9})[0] == plain


def test_stop_ids_end_like_the_end_of_a_text_and_not_before_min_tokens() -> None:
    decoder = small_decoder()
    (ids,), (text,), _ = run(decoder, [[1, 2, 3]], greedy(8))
    fourth = ids[3]
    assert ids.index(fourth) == 3  # or the model is no use for this test
    (stopped,), (shown,), (reason,) = run(decoder, [[1, 2, 3]], greedy(8, stop_ids=(fourth,)))
    assert (stopped, reason) == (ids[:4], "stop")
    assert text.startswith(shown) and shown != text
    (later,), _, _ = run(decoder, [[1, 2, 3]], greedy(8, stop_ids=(fourth,), min_tokens=6))
    assert later[:3] == ids[:3] and fourth not in later[:6] and len(later) >= 7


@pytest.mark.parametrize(
    ("text", "stop", "min_tokens", "shown"),
    [
        ("abcabcabc", ["bc"], 0, "a"),
        ("abcabcabc", ["bc"], 2, "a"),  # complete with the third token
        ("abcabcabc", ["bc"], 3, "abca"),
        ("abcabcabc", ["bc"], 8, "abcabca"),
        ("abcabcabc", ["bc"], 9, "abcabcabc"),
        ("aabbaabb", ["aa", "aab"], 2, ""),  # the longer one begins before and is complete in time
        ("aabbaabb", ["aa"], 2, "aabb"),
    ],
)
def test_stop_texts_that_are_complete_too_early_are_text(
    text: str, stop: list[str], min_tokens: int, shown: str
) -> None:
    scanner, out = StopScanner(stop), ""
    for i, character in enumerate(text):
        piece, stopped = scanner.feed(character, may_end=i + 1 > min_tokens)
        out += piece
        if stopped:
            break
    else:
        out += scanner.flush()
    assert out == shown


def test_excluded_ids_are_never_chosen() -> None:
    excluded = torch.ones(60, dtype=torch.bool)
    excluded[[3, 11]] = False
    ids, _, _ = run(DECODER, [PROMPT], Sampling(temperature=5, top_p=1, seed=0, max_tokens=30), excluded=excluded)
    assert set(ids[0]) == {3, 11}


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("hello world", ["wor"], "hello "),
        ("hello world", ["o w"], "hell"),
        ("hello world", ["world", "lo"], "hel"),  # the earliest in the text, not in the list
        ("hello world", ["x", "h"], ""),
        ("hello world", ["zzz"], "hello world"),
        ("hello wor", ["world"], "hello wor"),  # a held beginning comes out at the end
        ("aaab", ["aab"], "a"),
        ("abcabd", ["abd"], "abc"),
        ("abcd", ["bcd", "bc"], "a"),
        ("xabc", ["abc", "b"], "xa"),  # complete first
        ("xabc", ["c", "abc"], "x"),  # complete together: the longer one
    ],
)
def test_stop_texts_across_token_borders(text: str, stop: list[str], shown: str) -> None:
    result, reason = scripted(text, stop=tuple(stop))
    assert result == shown
    assert reason == ("length" if shown == text else "stop")


@given(
    st.text("abc", max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 12), max_size=6),
)
@settings(max_examples=300)
def test_where_the_pieces_end_makes_no_difference(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    scanner = StopScanner(stops)
    shown, stopped = "", False
    for start, end in itertools.pairwise(edges):
        piece, stopped = scanner.feed(text[start:end])
        shown += piece
        # Nothing is shown that a stop text could still take back: every stop that ends later begins later.
        longest = max((n for s in stops for n in range(1, len(s)) if text[:end].endswith(s[:n])), default=0)
        if stopped:
            break
        assert len(shown) == end - longest
    if not stopped:
        shown += scanner.flush()
    matches = [(i + len(s), i) for s in stops for i in range(len(text)) if text.startswith(s, i)]
    assert shown == (text[: min(matches)[1]] if matches else text)
    assert stopped == bool(matches)


def test_no_half_character_is_shown() -> None:
    clef = BPE.encode("𝄞")  # four bytes, four tokens
    assert len(clef) == 4
    script = [*BPE.encode("a"), *clef, *BPE.encode("é"), clef[0]]
    events = list(decode(Scripted([*script, 0]), BPE, [[5]], [greedy(len(script))]))
    assert [event.text for event in events] == ["a", "", "", "", "𝄞", "", "é", "\ufffd"]
    assert "".join(event.text for event in events) == BPE.decode(script)


def test_a_word_tokenizers_space_continues_the_prompt() -> None:
    words = Tokenizer.train(["the cat sat on the mat"], kind="word", byte_fallback=False)
    cat, sat = words.encode("the cat sat")[1:]
    event = next(decode(Scripted([cat, sat], vocab_size=30), words, [words.encode("the")], [greedy(1)]))
    assert event == Event(0, cat, " cat", "length")
    assert words.bos_id is not None
    event = next(decode(Scripted([cat, sat], vocab_size=30), words, [[words.bos_id]], [greedy(1)]))
    assert event.text == "cat"


# ---- bad input


def test_a_prompt_that_is_too_long_names_both_lengths() -> None:
    prompt = random_ids(DECODER.config, 100).tolist()
    with pytest.raises(UserError, match=r"100 tokens, more than the model's context of 48.*truncate left"):
        decode(DECODER, TOKENIZER, [prompt], [greedy(3)])  # before the first event is asked for


@pytest.mark.parametrize(("max_tokens", "kept"), [(0, 48), (3, 45), (24, 24), (1000, 24)])
def test_truncate_keeps_the_right_end(max_tokens: int, kept: int) -> None:
    prompt = random_ids(DECODER.config, 100).tolist()
    truncated = run(DECODER, [prompt], greedy(max_tokens), truncate="left")
    assert truncated == run(DECODER, [prompt[-kept:]], greedy(max_tokens))
    assert len(truncated[0][0]) == min(max_tokens, 48 - kept)


@pytest.mark.parametrize("wrong", [60, -1, 10**6])
def test_ids_beyond_the_vocabulary_are_refused(wrong: int) -> None:
    with pytest.raises(UserError, match=f"token id {wrong} is not in the model's vocabulary of 60"):
        decode(DECODER, TOKENIZER, [PROMPT, [3, wrong]], [greedy(1)] * 2)


def test_ids_may_be_of_any_library_but_whole_numbers() -> None:
    expected = run(DECODER, [PROMPT], greedy(5))
    ids = torch.tensor(PROMPT)
    for prompt in (ids, ids.numpy(), tuple(PROMPT)):
        assert run(DECODER, [prompt], greedy(5)) == expected  # type: ignore[list-item]
    for wrong in (1.5, "a", None):
        with pytest.raises(UserError, match="must be token ids, which are whole numbers"):
            decode(DECODER, TOKENIZER, [[1, wrong]], [greedy(1)])  # type: ignore[list-item]


def test_an_empty_prompt_without_a_beginning_is_refused() -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        decode(DECODER, TOKENIZER, [[]], [greedy(1)])


def test_a_broken_model_is_an_error_and_not_noise() -> None:
    decoder = small_decoder()
    with torch.no_grad():
        decoder.norm.weight[0] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        run(decoder, [PROMPT], Sampling(seed=0))


def damaged() -> Decoder:
    """Nobody that reads token 7 gets numbers."""
    decoder = small_decoder(tie_embeddings=False)
    with torch.no_grad():
        decoder.embed.weight[7] = torch.nan
    return decoder


def test_an_error_of_one_row_is_raised_when_the_others_have_ended() -> None:
    decoder, clean = damaged(), [3, 4, 5]
    excluded = torch.arange(60) == 7
    (expected,), _, _ = run(decoder, [clean], greedy(12), excluded=excluded)
    events, prompts = [], [clean, [3, 7], clean, [7]]
    with pytest.raises(UserError, match="^output 2 of 4: the model's logits are not finite"):
        for event in decode(decoder, TOKENIZER, prompts, [greedy(12)] * 4, excluded=excluded):
            events.append(event)  # and the error behind them
    for row in (0, 2):
        assert [event.token_id for event in events if event.row == row] == expected
    for row in (1, 3):
        (failed,) = [event for event in events if event.row == row]
        assert (failed.token_id, failed.finish_reason) == (None, "error")
    ids, _, reasons = run(decoder, prompts, greedy(12), excluded=excluded, raises=False)
    assert ids == [expected, [], expected, []]
    assert reasons == ["length", "error", "length", "error"]


def test_a_decoder_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eval\(\)"):
        decode(small_decoder().train(), TOKENIZER, [PROMPT], [greedy(1)])


def test_no_prompts_give_no_events() -> None:
    assert list(decode(DECODER, TOKENIZER, [], [])) == []


def test_inference_mode_does_not_leak_out_of_the_loop() -> None:
    events = decode(DECODER, TOKENIZER, [PROMPT], [greedy(4)])
    next(events)
    assert not torch.is_inference_mode_enabled()
    assert DECODER.embed.weight.requires_grad
