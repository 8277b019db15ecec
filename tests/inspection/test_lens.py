"""The logit lens: behind the last layer it is the model, whatever the architecture."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from leftward import Config
from leftward.errors import UserError
from leftward.inspection import lens
from leftward.inspection.lens import logit_lens, read, through
from leftward.inspection.record import record
from leftward.language_model import LanguageModel
from leftward.text.tokenizer import Tokenizer
from random_models import configs, random_decoder, random_ids

TEXT = "The quick brown fox jumps over the lazy dog.\n"
TOKENIZER = Tokenizer.train([TEXT * 3], kind="bpe", vocab_size=270)


def make_model(**values: Any) -> LanguageModel:
    config = Config(**{"vocab_size": 270, "max_seq_len": 64, "n_layers": 3, "d_model": 32, "n_heads": 4} | values)
    return LanguageModel(random_decoder(config, std=0.3), TOKENIZER)


@given(configs())
@settings(max_examples=60)
def test_the_last_layer_says_what_the_model_says(config: Config) -> None:
    """Bit for bit: the final norm is not forgotten, nor the cap, nor what logits are multiplied by."""
    decoder, ids = random_decoder(config), random_ids(config, 2, 13)
    with torch.inference_mode():
        with record(decoder, "resid.post") as rec:
            logits = decoder(ids)
        assert torch.equal(through(decoder, rec.stack("resid.post")[-1]), logits)


def test_bf16_too() -> None:
    decoder = random_decoder(Config(vocab_size=40, d_model=32, n_heads=2, n_layers=2)).bfloat16()
    with torch.inference_mode():
        with record(decoder, "resid.post") as rec:
            logits = decoder(random_ids(decoder.config, 1, 9))
        assert torch.equal(through(decoder, rec.stack("resid.post")[-1]), logits)


def test_what_it_says_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    found = logit_lens(model, TEXT, top_k=4, pinned=[65, "The"])
    n = len(found.ids)
    assert len(found.tokens) == n and found.tokens[:3] == ("<|endoftext|>", "The", "␣")
    assert found.read.top_ids.shape == (4, n, 4) and found.read.entropy.shape == (4, n)
    with torch.inference_mode():
        logits = model.decoder(torch.tensor([found.ids]))[0].double()
    logprobs = logits.log_softmax(dim=-1)
    following = torch.tensor(found.ids[1:])
    own = logprobs[:-1].gather(1, following[:, None])
    torch.testing.assert_close(found.next_logprobs[-1].double(), own[:, 0], atol=1e-5, rtol=1e-5)
    assert torch.equal(found.next_ranks[-1], (logprobs[:-1] > own).sum(dim=-1))
    assert found.next_logprobs[-1].tolist() == pytest.approx(model.score(TEXT).logprobs, abs=1e-5)
    torch.testing.assert_close(found.pinned_logprobs[-1, :, 0].double(), logprobs[:, 65], atol=1e-5, rtol=1e-5)
    assert found.pinned_logprobs.shape == found.pinned_ranks.shape == (4, n, 2)
    assert torch.equal(found.read.top_ids[-1, :, 0], logits.argmax(dim=-1))
    monkeypatch.setattr(lens, "_AT_ONCE", 270 * 5)  # five positions at a time
    for whole, part in zip(found.read, logit_lens(model, TEXT, top_k=4, pinned=[65, "The"]).read, strict=True):
        torch.testing.assert_close(part, whole)


def test_before_the_first_layer_it_is_the_embedding() -> None:
    """With a tied head and no positions in the stream: the token's own product with the table."""
    model = make_model(positions="rotary")
    found = logit_lens(model, TEXT)
    table = model.decoder.embed.weight.detach()
    norm = model.decoder.norm
    assert norm is not None
    with torch.no_grad():
        logits = norm(table[list(found.ids)]) @ table.T
    assert torch.equal(found.read.top_ids[0, :, 0], logits.argmax(dim=-1))


def test_numbers_of_a_distribution() -> None:
    """H([.22, .26, .37, .15]) = 1.9271 bits, of at most log2 4; −ln .15 = 1.8971; three are likelier than that."""
    probabilities = torch.tensor([[0.22, 0.26, 0.37, 0.15]])
    found = read(probabilities.log() + 3, torch.tensor([[3, 2]]), top_k=9)
    assert found.entropy.item() == pytest.approx(1.9271, abs=1e-4)
    assert found.logprobs[0].tolist() == pytest.approx([math.log(0.15), math.log(0.37)], abs=1e-6)
    assert found.ranks.tolist() == [[3, 0]]
    assert found.top_ids.tolist() == [[2, 1, 0, 3]]
    assert found.top_probs[0].tolist() == pytest.approx([0.37, 0.26, 0.22, 0.15], abs=1e-6)


def test_what_can_go_wrong() -> None:
    model = make_model()
    with pytest.raises(UserError, match="the text has 0 tokens"):
        logit_lens(model, [])
    with pytest.raises(UserError, match="the text has 65 tokens: .* context is 64"):
        logit_lens(model, [1] * 65)
    with pytest.raises(UserError, match="token id 270 is not in the vocabulary of 270"):
        logit_lens(model, [1, 270])
    with pytest.raises(UserError, match=r"'The quick' is \d tokens, and not one: The"):
        logit_lens(model, TEXT, pinned=["The quick"])
