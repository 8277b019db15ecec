"""Beam search finds what transformers' generate finds with num_beams: the same texts, in the same order, with the same
scores, for prompts of different lengths at once."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any, Literal

import pytest
import torch

from leftward import Config
from leftward.errors import UserError
from leftward.formats.hf import from_hf
from leftward.formats.model_directory import build_decoder
from leftward.generation.beam import BeamSearch, beam_search
from leftward.generation.rules import Bans
from leftward.generation.settings import Sampling
from leftward.language_model import LanguageModel
from leftward.model.decoder import Decoder
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder

PROMPTS = [[5, 9, 3, 1], [7], [11, 2, 40, 40, 8, 9, 30], [1, 2]]


@functools.cache
def both(seed: int, window: int | None = None) -> tuple[Any, Decoder]:
    """A random model in transformers, which is neither sure nor quite undecided, and in ours."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.MistralConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=56,
        max_position_embeddings=96,
        sliding_window=window,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.4,
    )
    theirs = transformers.MistralForCausalLM(config).eval()
    theirs.generation_config.pad_token_id = 60
    ours, state = from_hf(config.to_dict() | {"architectures": ["MistralForCausalLM"]}, theirs.state_dict())
    return theirs, build_decoder(ours, state).eval()


def search(decoder: Decoder, end_ids: list[int], how: BeamSearch, **sampling: Any) -> list[list[tuple[Any, float]]]:
    found = beam_search(decoder, PROMPTS, Sampling.of(sampling), how, Bans(end_ids=tuple(end_ids)))
    return [[(list(beam.ids), beam.score) for beam in beams] for beams in found]


def their_search(theirs: Any, end_ids: list[int], n: int, **settings: Any) -> list[list[tuple[list[int], float]]]:
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[60] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    found = theirs.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        num_return_sequences=n,
        eos_token_id=end_ids or None,
        output_scores=True,
        return_dict_in_generate=True,
        **settings,
    )
    texts = [sequence[longest:].tolist() for sequence in found.sequences]
    pairs = list(zip(texts, found.sequences_scores.tolist(), strict=True))
    return [pairs[i : i + n] for i in range(0, len(pairs), n)]


def assert_same(ours: list[list[tuple[list[int], float]]], theirs: list[list[tuple[list[int], float]]]) -> None:
    for our_beams, their_beams in zip(ours, theirs, strict=True):
        assert len(our_beams) == len(their_beams)
        for (ids, score), (padded, their_score) in zip(our_beams, their_beams, strict=True):
            assert padded[: len(ids)] == ids and len(set(padded[len(ids) :])) <= 1
            assert score == pytest.approx(their_score, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("end_ids", [[], [3], [3, 7, 12, 20, 33]])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.7, 2.5])
def test_beams_are_transformers(
    seed: int, end_ids: list[int], early_stopping: bool | Literal["never"], length_penalty: float
) -> None:
    theirs, ours = both(seed)
    num_beams = 2 + seed
    how = BeamSearch(num_beams=num_beams, length_penalty=length_penalty, early_stopping=early_stopping)
    assert_same(
        search(ours, end_ids, how, max_tokens=12, n=num_beams),
        their_search(
            theirs,
            end_ids,
            num_beams,
            num_beams=num_beams,
            max_new_tokens=12,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        ),
    )


def test_ends_come_at_different_lengths() -> None:
    """Otherwise the comparison above would be of one case."""
    found = search(both(2)[1], [3, 7, 12, 20, 33], BeamSearch(num_beams=4), max_tokens=12, n=4)
    lengths = {len(ids) for beams in found for ids, _ in beams}
    assert len(lengths) > 2 and min(lengths) < 12


def test_beams_behind_a_window_that_rolls() -> None:
    theirs, ours = both(1, window=5)
    how = BeamSearch(num_beams=3)
    assert_same(
        search(ours, [3], how, max_tokens=20, n=2), their_search(theirs, [3], 2, num_beams=3, max_new_tokens=20)
    )


def test_rules_are_transformers() -> None:
    theirs, ours = both(0)
    words = [[4], [9, 3], [40, 41]]
    found = beam_search(
        ours,
        PROMPTS,
        Sampling.of({"max_tokens": 10, "repetition_penalty": 1.4, "min_tokens": 5, "logit_bias": {8: 2.0}, "n": 3}),
        BeamSearch(num_beams=3),
        Bans(bad_words=tuple(map(tuple, words)), end_ids=(3, 7)),
    )
    expected = their_search(
        theirs,
        [3, 7],
        3,
        num_beams=3,
        max_new_tokens=10,
        repetition_penalty=1.4,
        min_new_tokens=5,
        bad_words_ids=words,
        sequence_bias={(8,): 2.0},
        prefix_allowed_tokens_fn=None,
    )
    assert_same([[(list(beam.ids), beam.score) for beam in beams] for beams in found], expected)


def test_as_many_beams_as_there_are_texts_find_the_likeliest() -> None:
    """Brute force: all texts of three tokens out of five."""
    config = Config(vocab_size=5, max_seq_len=16, n_layers=1, d_model=16, n_heads=2)
    decoder = random_decoder(config, std=0.5)
    texts = torch.cartesian_prod(*[torch.arange(5)] * 3)
    with torch.inference_mode():
        logprobs = decoder(torch.cat((torch.full((125, 1), 2), texts), dim=1)).log_softmax(-1)
    sums = logprobs[:, :3].gather(2, texts[:, :, None]).sum((1, 2))
    ((*beams,),) = beam_search(
        decoder, [[2]], Sampling(max_tokens=3, n=5), BeamSearch(num_beams=125, length_penalty=0.0), Bans()
    )
    assert [list(beam.ids) for beam in beams] == texts[sums.argsort(descending=True)[:5]].tolist()
    assert [beam.score for beam in beams] == pytest.approx(sums.sort(descending=True).values[:5].tolist(), abs=1e-4)


def test_one_prompt_is_the_same_beside_others() -> None:
    _, ours = both(1)
    how, sampling, bans = BeamSearch(num_beams=3), Sampling(max_tokens=15, n=3), Bans(end_ids=(3, 9))
    together = beam_search(ours, PROMPTS, sampling, how, bans)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        (alone,) = beam_search(ours, [prompt], sampling, how, bans)
        assert [beam.ids for beam in alone] == [beam.ids for beam in expected]
        assert [beam.score for beam in alone] == pytest.approx([beam.score for beam in expected], abs=1e-4)


def test_excluded_ids_are_in_no_beam() -> None:
    _, ours = both(0)
    excluded = torch.zeros(61, dtype=torch.bool)
    excluded[::2] = True
    found = beam_search(ours, PROMPTS, Sampling(max_tokens=8, n=3), BeamSearch(num_beams=3), Bans(), excluded=excluded)
    assert all(token_id % 2 for beams in found for beam in beams for token_id in beam.ids)


def test_what_can_not_be_searched() -> None:
    _, ours = both(0)
    with pytest.raises(UserError, match=r"n is 5: of 4 beams \(num_beams\) there can't be more"):
        beam_search(ours, PROMPTS, Sampling(n=5), BeamSearch(), Bans())
    with pytest.raises(UserError, match="num_beams is 0.*length_penalty is nan.*early_stopping is 'no'"):
        BeamSearch(num_beams=0, length_penalty=math.nan, early_stopping="no")  # type: ignore[arg-type]


def unfit(decoder: Decoder) -> Decoder:
    """Nobody that reads token 13 gets numbers, and nobody writes it."""
    broken = copy.deepcopy(decoder)
    with torch.no_grad():
        broken.embed.weight[13] = math.nan
    return broken


def refusing(wrong: int) -> Any:
    """A sampler that leaves nothing to whoever has that token in front of its text."""
    return lambda logits, ids: torch.full_like(logits, -math.inf) if ids[0] == wrong else logits


def moody(wrong: int) -> Any:
    return lambda logits, ids: "no" if ids[0] == wrong else logits


def lost(wrong: int) -> Any:
    return lambda logits, ids: torch.full_like(logits, math.nan) if ids[0] == wrong else logits


def late(wrong: int) -> Any:
    """That fails in the third step, behind two tokens that were found."""
    return lambda logits, ids: "no" if ids[0] == wrong and len(ids) == 3 else logits


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (None, "not finite numbers"),
        (refusing(13), "the rules leave no token"),
        (lost(13), "the rules leave no token"),
        (moody(13), "the sampler returned 'no'"),
        (late(13), "the sampler returned 'no'"),
    ],
)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_the_others_are_searched_to_their_end(sampler: Any, said: str, place: int) -> None:
    _, ours = both(0)
    decoder = unfit(ours) if sampler is None else ours
    how, bans = BeamSearch(num_beams=3), Bans(end_ids=(3, 9), bad_words=((13,),))
    sampling = Sampling(max_tokens=8, n=2, sampler=sampler)
    expected = beam_search(ours, PROMPTS, Sampling(max_tokens=8, n=2), how, bans)
    found = beam_search(decoder, [*PROMPTS[:place], [13], *PROMPTS[place:]], sampling, how, bans)
    failed = found.pop(place)
    assert [beam.ids for beam in failed] == [(), ()] and all(said in str(beam.error) for beam in failed)
    for of_prompt, wanted in zip(found, expected, strict=True):
        assert [beam.ids for beam in of_prompt] == [beam.ids for beam in wanted]
        assert [beam.score for beam in of_prompt] == pytest.approx([beam.score for beam in wanted], abs=1e-4)
        assert all(beam.error is None for beam in of_prompt)


# ---- from text to text

BPE = Tokenizer.train(["the quick brown fox jumps over the lazy dog " * 20], vocab_size=280)
MODEL = LanguageModel(
    random_decoder(Config(vocab_size=280, max_seq_len=24, n_layers=2, d_model=32, n_heads=4), std=0.3), BPE
)


def test_a_beam_search_of_texts() -> None:
    first, second = MODEL.beam_search("the fox", num_beams=4, max_tokens=6, n=2)
    ids = BPE.encode("the fox", add_bos=True)
    expected = beam_search(
        MODEL.decoder, [ids], Sampling(max_tokens=6, n=2), BeamSearch(), Bans(end_ids=tuple(sorted(MODEL.eos_ids)))
    )[0]
    assert [each.ids for each in (first, second)] == [beam.ids for beam in expected]
    assert first.score is not None and second.score is not None and first.score >= second.score
    kept = [token_id for token_id in first.ids if token_id not in MODEL.eos_ids]
    assert first.text == BPE.decode([*ids, *kept])[len(BPE.decode(ids)) :]
    assert MODEL.beam_search(["the fox", "lazy"], max_tokens=6)[0] == first


def test_a_beam_that_fills_the_context_says_so() -> None:
    (found,) = MODEL.beam_search("the fox", max_tokens=200, stop_ids=[], num_beams=1)
    assert found.finish_reason in ("context", "stop")
    assert len(found.prompt_ids) + len(found.ids) <= 24
    with pytest.raises(UserError, match="more than the model's context of 24"):
        MODEL.beam_search("x" * 100)


@pytest.mark.parametrize("setting", ["temperature", "top_k", "stop", "seed", "logprobs", "best_of", "regex"])
def test_settings_that_a_beam_search_has_no_use_for(setting: str) -> None:
    value: Any = {"stop": ["x"], "regex": "x", "temperature": 0.5}.get(setting, 1)
    with pytest.raises(UserError, match=f"a beam search has no use for {setting}"):
        MODEL.beam_search("the fox", **{setting: value})


def test_one_of_several_texts_fails_as_elsewhere() -> None:
    """`complete` and `beam_search` say the same of a text that can't be continued, and the others are whole."""
    ids = BPE.encode("lazy", add_bos=True)

    def moody(logits: torch.Tensor, seen: Any) -> Any:
        return "no" if list(seen[: len(ids)]) == ids else logits

    settings: dict[str, Any] = {"max_tokens": 5, "sampler": moody, "n": 2}
    prompts = ["the fox", "lazy", "dog"]
    found = MODEL.beam_search(prompts, num_beams=3, **settings)
    assert [len(each.prompt_ids) for each in found] == [len(BPE.encode(p, add_bos=True)) for p in prompts for _ in "ab"]
    assert [each.text for each in found[:2]] == [
        each.text for each in MODEL.beam_search("the fox", num_beams=3, max_tokens=5, n=2)
    ]
    completed = MODEL.complete(prompts, **settings)
    for ours, theirs in zip(found[2:4], completed[2:4], strict=True):
        assert (ours.text, ours.ids, ours.finish_reason, ours.score) == ("", (), "error", None)
        assert ours.error == theirs.error and ours.prompt_ids == theirs.prompt_ids
    assert all(each.error is None for each in (*found[:2], *found[4:]))
    for only in ("lazy", ["lazy", "lazy"]):
        with pytest.raises(UserError, match="^the sampler returned 'no'"):
            MODEL.beam_search(only, **settings)


def test_a_prompt_that_can_not_be_searched_is_named() -> None:
    with pytest.raises(UserError, match=r"^prompt 2 of 3: the prompt has \d+ tokens, none or more"):
        MODEL.beam_search(["the fox", "x" * 100, "dog"])
    with pytest.raises(UserError, match="^the prompt has"):
        MODEL.beam_search(["x" * 100])
