"""Several outputs at once, of which one can't go on: the others are whole, and the error is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from leftward import Config, LanguageModel
from leftward.errors import UserError
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder

TOKENIZER = Tokenizer.train(["abcdefghijklmnopqrstuvwxyz #"], kind="char")
CONFIG = Config(vocab_size=TOKENIZER.vocab_size, max_seq_len=64, n_layers=1, d_model=32, tie_embeddings=False)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


def damaged(*texts: str) -> LanguageModel:
    """Nobody that reads one of these characters gets numbers; nobody says one of them."""
    decoder = random_decoder(CONFIG, std=0.3)
    model = LanguageModel(decoder, TOKENIZER, sampling={"bad_words": texts})
    with torch.no_grad():
        for text in texts:
            decoder.embed.weight[TOKENIZER.encode(text)] = torch.nan
    return model


MODEL = damaged("#")


def test_the_others_are_whole() -> None:
    alone = [MODEL.complete(prompt, **GREEDY) for prompt in ("ab", "cd")]
    first, failed, last = MODEL.complete(["ab", "a#", "cd"], **GREEDY)
    assert [first.text, last.text] == [each.text for each in alone]
    assert (first.error, last.error, first.finish_reason) == (None, None, "length")
    assert (failed.text, failed.ids, failed.finish_reason) == ("", (), "error")
    assert failed.error is not None and "not finite" in failed.error


def test_texts_alone_can_not_say_what_failed() -> None:
    with pytest.raises(UserError, match=r"output 2 of 3: the model's logits .* \(`complete` gives the others\)"):
        MODEL.generate(["ab", "a#", "cd"], **GREEDY)


@pytest.mark.parametrize("prompt", ["a#", ["a#"], ["a#", "#"]])
def test_where_nothing_comes_out_it_is_an_error(prompt: str | list[str]) -> None:
    for method in (MODEL.complete, MODEL.generate):
        with pytest.raises(UserError, match="^the model's logits are not finite"):
            method(prompt, **GREEDY)
    with pytest.raises(UserError, match="not finite"):
        list(MODEL.stream("a#", **GREEDY))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("é", "the tokenizer"),
        ("a" * 100, "the prompt has 100 tokens, more than the model's context of 64"),
        ("", "the prompt is empty"),
        (7, "a text must be a string"),
    ],
)
def test_of_several_prompts_the_wrong_one_is_named(wrong: Any, said: str) -> None:
    """Before anything is computed; whatever the number of samples, and only where there are several prompts."""
    unmarked = Tokenizer.train(["abcdefghijklmnopqrstuvwxyz #"], kind="char", special_tokens=[])  # no BOS
    model = LanguageModel(random_decoder(dataclasses.replace(CONFIG, vocab_size=unmarked.vocab_size)), unmarked)
    for method in (model.complete, model.generate):
        for n in (1, 3):
            for place in range(3):
                prompts = ["ab", "cd"]
                prompts.insert(place, wrong)
                with pytest.raises(UserError, match=f"^prompt {place + 1} of 3: .*{said}"):
                    method(prompts, n=n, **GREEDY)
            with pytest.raises(UserError) as alone:
                method([wrong], n=n, **GREEDY)
            assert "prompt 1" not in str(alone.value)
    if isinstance(wrong, str):
        with pytest.raises(UserError) as streamed:
            model.stream(wrong, **GREEDY)
        assert str(streamed.value) == str(alone.value)


def test_a_setting_that_is_wrong_is_no_prompts_fault() -> None:
    for settings in ({"at_context": "jump"}, {"n_keep": 99}, {"logit_bias": {999: 1.0}}, {"regex": "("}):
        with pytest.raises(UserError) as error:
            MODEL.complete(["ab", "cd"], **settings)
        assert not str(error.value).startswith("prompt")


def test_no_prompts_are_no_outputs() -> None:
    assert MODEL.complete([]) == []
    assert MODEL.generate([]) == []


def test_the_best_are_those_that_ended_well() -> None:
    """A third of the samples meets a sampler that refuses to answer."""
    n_prompt = len(TOKENIZER.encode("ab", add_bos=True))

    def moody(logits: torch.Tensor, ids: Sequence[int]) -> Any:
        return "no" if len(ids) > n_prompt and ids[-1] % 3 == 1 else logits

    settings: dict[str, Any] = {"seed": 1, "max_tokens": 2, "temperature": 1.0, "sampler": moody}
    everyone = MODEL.complete("ab", n=12, **settings)
    well = [each.text for each in everyone if each.error is None]
    assert 0 < len(well) < 12
    best = MODEL.complete("ab", n=12, best_of=12, prompt_logprobs=0, **settings)
    assert {each.text for each in best[: len(well)]} == set(well)
    assert all(each.error is not None for each in best[len(well) :])
    assert len({each.prompt_logprobs for each in best}) == 1  # whose prompt is a good one


def test_a_prompt_without_numbers_has_no_log_probabilities() -> None:
    good, bad = MODEL.complete(["ab", "a#"], prompt_logprobs=0, **GREEDY)
    assert good.prompt_logprobs is not None and bad.prompt_logprobs is None
