"""GPT-2 from PyTorch's layers and from ours: numbers of the GPT-2 paper's model, and one function."""

from __future__ import annotations

import gpt2_from_pytorch as example
import pytest
import torch

from leftward import Decoder


@pytest.mark.parametrize("seed", range(3))
def test_the_two_are_the_same_function(seed: int) -> None:
    assert 0 < example.largest_difference(seed) < 1e-5


def test_parameters_of_gpt2_small() -> None:
    counts = example.parameters()
    assert counts["tied"] == counts["pytorch"] == 124_439_808
    head = counts["untied"] - counts["tied"]
    assert head == 50_257 * 768 == 38_597_376
    assert round(head / counts["untied"], 3) == 0.237


def test_embeddings_start_with_a_std_of_002() -> None:
    decoder = Decoder(example.gpt2(5_000, 1024, 64, 1, 4))
    for table in (decoder.embed, decoder.position_embed):
        assert table.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_position_1024_has_no_row() -> None:
    assert "1025" in example.beyond_the_context()
    assert "1024" in example.beyond_the_context()
    whole = torch.zeros(1, 1024, dtype=torch.long)
    assert Decoder(example.gpt2(10, 1024, 8, 1, 2)).eval()(whole).isfinite().all()  # the one before has
