"""A classification head on the last token."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from leftward import Config
from leftward.model.classifier import Classifier, last_hidden
from leftward.model.decoder import Decoder
from random_models import random_decoder, random_ids

CONFIG = Config(vocab_size=12, n_layers=2, d_model=16, n_heads=2)


def test_padding_and_neighbours_change_nothing() -> None:
    decoder = random_decoder(CONFIG)
    ids = random_ids(CONFIG, 3, 9)
    together = last_hidden(decoder, ids, [9, 4, 1])
    for row, length in enumerate((9, 4, 1)):
        alone = decoder.hidden(ids[row : row + 1, :length])[0, -1]
        torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=1e-5)


def test_a_fresh_head_finds_every_class_equally_likely_and_learns() -> None:
    torch.manual_seed(0)
    model = Classifier(Decoder(CONFIG), n_classes=2)
    ids = random_ids(CONFIG, 64, 6)
    label = (ids[:, 0] < 6).long()  # said by the first token, read at the last
    assert torch.equal(model(ids), torch.zeros(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        loss = F.cross_entropy(model(ids), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model(ids).argmax(dim=-1) == label).float().mean() == 1.0
