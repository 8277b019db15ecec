"""The first rows do not know what comes after them; without the mask they do."""

from __future__ import annotations

import prefix_property as example
import pytest
import torch
from torch import nn

# One value of every position scheme and of every block that changes the path from a token to its neighbours.
VARIANTS = [{"positions": p} for p in ("rotary", "learned", "sinusoidal", "alibi", "none")] + [
    {"block": b} for b in ("post", "sandwich", "parallel")
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "run", [example.attention_alone, *(lambda n=n, **k: example.whole_model(n, **k) for n in (1, 4))]
)
def test_the_mask_makes_the_prefix_independent(run, seed: int) -> None:
    kept, lost = run(causal=True, seed=seed), run(causal=False, seed=seed)
    assert kept.dropped == 0.0
    assert kept.replaced_fp32 == 0.0
    assert kept.dropped_fp32 < 1e-5
    assert lost.dropped > 0.01
    assert lost.replaced_fp32 > 0.01


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_in_every_variant(settings: dict[str, str]) -> None:
    assert example.whole_model(3, causal=True, **settings).dropped == 0.0


@pytest.mark.parametrize("length", [1, 2, 4, 9])
def test_the_mask_is_pytorchs(length: int) -> None:
    ours = example.as_floats(example.mask_of(length, causal=True))
    assert torch.equal(ours, nn.Transformer.generate_square_subsequent_mask(length))
    assert torch.equal(ours, torch.triu(torch.full((length, length), -torch.inf), diagonal=1))
    assert not example.as_floats(example.mask_of(length, causal=False)).any()
