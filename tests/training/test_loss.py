"""The loss against arithmetic by hand."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from leftward import Config, Decoder
from leftward.data.batches import IGNORED, Split
from leftward.training.loss import evaluate, loss_sum


def make_split(tokens, text_bytes):
    counts = {"documents": 1, "characters": text_bytes, "bytes": text_bytes}
    return Split("val", [np.asarray(tokens, dtype=np.uint8)], counts)


def test_one_target_by_hand():
    # −ln .135 = 2.0025 (seeds/001): logits whose softmax gives the target .135
    logits = torch.log(torch.tensor([[[0.135, 0.865]]]))
    assert loss_sum(logits, torch.tensor([[0]])).item() == pytest.approx(2.0025, abs=1e-4)
    assert math.exp(2.00) == pytest.approx(7.39, abs=1e-2)


def test_padding_is_excluded():
    logits = torch.randn(2, 3, 5)
    targets = torch.tensor([[1, 2, IGNORED], [3, IGNORED, IGNORED]])
    rows = [(0, 0, 1), (0, 1, 2), (1, 0, 3)]
    expected = sum(-logits[b, t].log_softmax(-1)[target] for b, t, target in rows)
    torch.testing.assert_close(loss_sum(logits, targets), expected)


def test_all_targets_masked_is_zero_not_nan():
    assert loss_sum(torch.randn(1, 2, 5), torch.full((1, 2), IGNORED)).item() == 0.0


class Successor(nn.Module):
    """Predicts token + 1 with all its weight: its loss is 0 only where targets are the next tokens."""

    config = Config(vocab_size=10)

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(10, 10, bias=False)
        self.head.weight.data = 100.0 * torch.eye(10)

    def hidden(self, ids, documents=None):
        return nn.functional.one_hot((ids + 1) % 10, 10).float()

    def logits(self, hidden):
        return self.head(hidden)


@pytest.mark.parametrize("seq_len", [1, 3, 4, 7, 50])
def test_targets_are_the_next_tokens_and_none_is_left_out(seq_len):
    split = make_split(np.arange(23) % 10, 23)
    evaluation = evaluate(Successor(), split, seq_len, torch.device("cpu"))
    assert evaluation.tokens == 22
    assert evaluation.nats == pytest.approx(0.0, abs=1e-6)


def test_a_fresh_model_knows_nothing():
    # loss at initialisation ≈ ln V; in bits a byte: ln V / ln 2 · tokens / bytes
    torch.manual_seed(0)
    decoder = Decoder(Config(vocab_size=50, n_layers=2, d_model=32, n_heads=2, max_seq_len=16))
    split = make_split(np.random.default_rng(0).integers(50, size=2001), 4000)
    evaluation = evaluate(decoder, split, 16, torch.device("cpu"))
    assert evaluation.loss == pytest.approx(math.log(50), rel=0.02)
    assert evaluation.bits_per_byte == pytest.approx(evaluation.loss / math.log(2) * 2000 / 4000)


def test_the_size_of_batches_does_not_matter(monkeypatch):
    torch.manual_seed(0)
    decoder = Decoder(Config(vocab_size=50, n_layers=1, d_model=32, n_heads=2, max_seq_len=16))
    split = make_split(np.random.default_rng(0).integers(50, size=333), 333)
    whole = evaluate(decoder, split, 16, torch.device("cpu"))
    monkeypatch.setattr("leftward.training.loss._EVALUATION_TOKENS", 16)
    single = evaluate(decoder, split, 16, torch.device("cpu"))
    assert single.tokens == whole.tokens == 332
    assert single.nats == pytest.approx(whole.nats, rel=1e-6)


def test_evaluation_leaves_the_mode_and_can_be_stopped():
    decoder = Decoder(Config(vocab_size=50, n_layers=1, d_model=32, n_heads=2, max_seq_len=16)).train()
    assert evaluate(decoder, make_split([1] * 40, 40), 16, torch.device("cpu"), stop=lambda: True) is None
    assert decoder.training
