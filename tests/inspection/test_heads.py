"""Numbers about heads and the stream, on values that are known beforehand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from leftward import Config
from leftward.errors import UserError
from leftward.inspection.heads import entropies, head_scores, most_bits, row_entropy, stream_statistics
from leftward.language_model import LanguageModel
from leftward.text.tokenizer import Tokenizer
from random_models import configs, random_decoder, random_ids

TEXT = "The quick brown fox jumps over the lazy dog.\n"
TOKENIZER = Tokenizer.train([TEXT * 3], kind="bpe", vocab_size=270)


def make_model(**values: Any) -> LanguageModel:
    config = Config(**{"vocab_size": 270, "max_seq_len": 64, "n_layers": 3, "d_model": 32, "n_heads": 4} | values)
    return LanguageModel(random_decoder(config, std=0.3), TOKENIZER)


def test_row_entropy() -> None:
    rows = torch.tensor([[0.22, 0.26, 0.37, 0.15], [0.52, 0.48, 0.0, 0.0], [0.25] * 4, [0.0, 1.0, 0.0, 0.0]])
    torch.testing.assert_close(row_entropy(rows), torch.tensor([1.9271, 0.9988, 2.0, 0.0]), atol=1e-4, rtol=0)
    torch.testing.assert_close(row_entropy(rows * 0.3), row_entropy(rows))  # a sink took the rest
    assert row_entropy(torch.zeros(1, 4)).item() == 0  # or all


def test_a_row_has_its_own_maximum() -> None:
    """log2(i + 1), in layers with a window log2 min(i + 1, window)."""
    config = Config(vocab_size=9, d_model=8, n_heads=2, window=4, attention_pattern="LG")
    assert most_bits(config, 0, 6).tolist() == pytest.approx([0, 1, math.log2(3), 2, 2, 2])
    assert most_bits(config, 1, 6).tolist() == pytest.approx([0, 1, math.log2(3), 2, math.log2(5), math.log2(6)])


@given(configs())
@settings(max_examples=30)
def test_heads_that_look_everywhere_alike_are_at_the_maximum(config: Config) -> None:
    """Without queries all scores are 0. (ALiBi's are not.)"""
    decoder = random_decoder(config)
    with torch.no_grad():
        for block in decoder.blocks:
            attn = block.attn
            attn.qkv.weight[: config.n_heads * config.head_dim] = 0  # type: ignore[union-attr, index]
            if attn.qkv.bias is not None:  # type: ignore[union-attr]
                attn.qkv.bias[: config.n_heads * config.head_dim] = 0  # type: ignore[union-attr, index]
    found = entropies(LanguageModel(decoder, TOKENIZER), random_ids(config, 20).tolist())
    most = found.maximum[:, None].expand_as(found.bits)
    if config.positions not in ("alibi", "alibi_mpt"):
        torch.testing.assert_close(found.bits, most, atol=1e-4, rtol=0)
    assert bool((found.bits <= most + 1e-4).all())


def test_without_a_mask_everything_is_seen() -> None:
    config = Config(vocab_size=9, d_model=8, n_heads=2, causal=False, window=3, attention_pattern="LG", n_layers=2)
    model = LanguageModel(random_decoder(config, std=0.0), TOKENIZER)
    found = entropies(model, [1, 2, 3, 4, 5, 6])
    torch.testing.assert_close(found.bits, found.maximum[:, None].expand_as(found.bits), atol=1e-5, rtol=0)
    assert found.maximum[1].tolist() == pytest.approx([math.log2(6)] * 6)
    assert found.maximum[0].tolist() == pytest.approx([math.log2(n) for n in (3, 4, 5, 5, 4, 3)])


def made_to_look(model: LanguageModel, offset: int | None) -> Any:
    """A context in which head 2 of layer 1 looks `offset` tokens back, or at the first token."""

    def change(weights: torch.Tensor) -> torch.Tensor:
        weights = weights.clone()
        weights[:, 2] = 0
        for query in range(weights.shape[2]):
            weights[:, 2, query, 0 if offset is None else max(0, query - offset)] = 1
        return weights

    return model.patch({"layers.1.attn.weights": change})


@pytest.mark.parametrize(("which", "offset"), [("previous", 1), ("sink", None), ("induction", 19)])
def test_heads_are_found(which: str, offset: int | None) -> None:
    """A head that is made to do it has a score of 1, and no other one. Twenty tokens that are read twice: what came
    behind a token's first occurrence is nineteen places back."""
    model = make_model()
    with made_to_look(model, offset):
        found = head_scores(model, length=20, seed=3)
    scores = getattr(found, which)
    assert scores.shape == (3, 4)
    assert scores[1, 2] == pytest.approx(1.0)
    scores[1, 2] = 0
    assert float(scores.max()) < 0.9
    again = head_scores(model, length=20, seed=3)
    assert torch.equal(again.induction, head_scores(model, length=20, seed=3).induction)
    assert not torch.equal(again.induction, head_scores(model, length=20, seed=4).induction)


def test_scores_of_a_text() -> None:
    model = make_model()
    with made_to_look(model, 1):
        assert head_scores(model, TEXT, length=5).previous[1, 2] == pytest.approx(1.0)
    with pytest.raises(UserError, match="length is 33: .* twice that fit the context"):
        head_scores(model, length=33)
    with pytest.raises(UserError, match="the text has 1 token"):
        head_scores(model, [5], length=5)


def test_statistics_of_the_stream() -> None:
    """x = [4, −6, 1.5, 10.5, −2.5, 8, −4.5, 2]: mean 1.625, population deviation 5.4529, root mean square 5.6899."""
    model = make_model(d_model=8, n_heads=2)
    x = torch.tensor([4, -6, 1.5, 10.5, -2.5, 8, -4.5, 2])
    with model.patch({"layers.0.resid.pre": x, "layers.2.resid.post": 2 * x}):
        found = stream_statistics(model, [1, 2, 3])
    assert found.mean.shape == (4, 3)
    for row, scale in ((0, 1), (3, 2)):
        for values, expected in zip(found, (1.625, 5.4529, 5.6899), strict=True):
            assert values[row].tolist() == pytest.approx([scale * expected] * 3, abs=2e-4)
