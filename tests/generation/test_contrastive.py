"""Contrastive decoding is the paper's formula, with the amateur's cache as without, and in a batch as alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import leftward as lw
from leftward import Config
from leftward.errors import UserError
from leftward.generation.contrastive import Contrastive
from leftward.language_model import LanguageModel
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder

BPE = Tokenizer.train(["the quick brown fox jumps over the lazy dog " * 20], vocab_size=280)
EXPERT = LanguageModel(
    random_decoder(Config(vocab_size=280, max_seq_len=64, n_layers=3, d_model=32, n_heads=4), std=0.3), BPE
)
AMATEUR = random_decoder(
    Config(vocab_size=280, max_seq_len=40, n_layers=1, d_model=16, n_heads=2, positions="learned"), std=0.3
).eval()


def scores(ids: list[int], alpha: float, temperature: float) -> np.ndarray:
    """Equations 2 to 4 of the paper, from whole forward passes."""
    with torch.inference_mode():
        expert = EXPERT.decoder(torch.tensor([ids]))[0, -1].double().softmax(-1).numpy()
        amateur = (AMATEUR(torch.tensor([ids]))[0, -1].double() / temperature).softmax(-1).numpy()
    return np.where(expert >= alpha * expert.max(), np.log(expert) - np.log(amateur), -math.inf)


@pytest.mark.parametrize(("alpha", "temperature"), [(0.1, 1.0), (0.5, 0.5), (0.001, 2.0)])
def test_greedy_text_is_that_of_the_formula(alpha: float, temperature: float) -> None:
    sampler = Contrastive(AMATEUR, alpha=alpha, amateur_temperature=temperature)
    prompts = ["the fox", "lazy", "the fox"]
    settings = {"temperature": 0.0, "max_tokens": 12}
    for found in EXPERT.complete(prompts, sampler=sampler, **settings):
        ids = list(found.prompt_ids)
        for token_id in found.ids:
            expected = scores(ids, alpha, temperature)
            assert expected[token_id] > expected.max() - 1e-4
            ids.append(token_id)
    assert EXPERT.generate(prompts, sampler=sampler, **settings) != EXPERT.generate(prompts, **settings)


def test_draws_are_among_the_plausible() -> None:
    sampler = Contrastive(AMATEUR, alpha=0.3)
    for found in EXPERT.complete(["the fox"] * 8, sampler=sampler, temperature=1.0, top_p=1.0, max_tokens=8, seed=1):
        ids = list(found.prompt_ids)
        for token_id in found.ids:
            assert scores(ids, 0.3 - 1e-6, 1.0)[token_id] > -math.inf
            ids.append(token_id)


def test_nothing_but_the_likeliest_is_plausible_at_1() -> None:
    greedy = EXPERT.generate("the fox", temperature=0.0, max_tokens=10)
    assert EXPERT.generate("the fox", sampler=lw.Contrastive(AMATEUR, alpha=1.0), max_tokens=10) == greedy


def test_mistakes() -> None:
    with pytest.raises(UserError, match="alpha is 0"):
        Contrastive(AMATEUR, alpha=0)
    with pytest.raises(UserError, match="amateur_temperature is 0"):
        Contrastive(AMATEUR, amateur_temperature=0)
    other = random_decoder(Config(vocab_size=99, max_seq_len=40, n_layers=1, d_model=16, n_heads=2)).eval()
    with pytest.raises(UserError, match="the amateur has a vocabulary of 99, the model one of 280"):
        EXPERT.generate("the fox", sampler=Contrastive(other))
    with pytest.raises(UserError, match="more than the amateur's context of 40"):
        EXPERT.generate("the fox", sampler=Contrastive(AMATEUR), max_tokens=60, logit_bias={BPE.eos_id: -math.inf})


def test_each_text_is_told_by_the_amateur_as_it_then_is() -> None:
    settings = {"temperature": 0.0, "max_tokens": 8}
    sampler = Contrastive(AMATEUR, alpha=0.001)
    before = EXPERT.generate("the fox", sampler=sampler, **settings)
    hook = AMATEUR.blocks[0].register_forward_hook(lambda _module, _inputs, output: -3 * output)
    try:
        after = EXPERT.generate("the fox", sampler=sampler, **settings)
        assert after == EXPERT.generate("the fox", sampler=Contrastive(AMATEUR, alpha=0.001), **settings) != before
    finally:
        hook.remove()
    assert EXPERT.generate("the fox", sampler=sampler, **settings) == before
