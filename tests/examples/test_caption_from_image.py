"""Pictures in front of words: seen, said, and the cache changes nothing."""

from __future__ import annotations

import caption_from_image as example
import numpy as np
import pytest
import torch
from caption_language import BOS, EOS, MAX_LEN, TOKENIZER


@pytest.fixture(scope="module", params=[False, True], ids=["causal", "prefix_lm"])
def trained(request: pytest.FixtureRequest) -> tuple[example.Captioner, list[float]]:
    return example.train(prefix_lm=request.param, steps=250)


def test_the_drawings() -> None:
    rng = np.random.default_rng(0)
    points = {
        (size, shape): int((example.draw(size, shape, rng) > 0.5).sum())
        for size in example.SIZES
        for shape in example.SHAPES
    }
    # A plus of width w has 2 w − 1 points; the circles leave out corners, or the middle.
    assert points == {("large", "plus"): 9, ("large", "circle"): 12, ("small", "plus"): 5, ("small", "circle"): 8}


def test_patches_are_cut_row_by_row() -> None:
    patches = example.as_patches(np.arange(36.0).reshape(1, 6, 6))
    assert patches.shape == (1, 9, 4)
    assert patches[0, 0].tolist() == [0, 1, 6, 7]
    assert patches[0, 1].tolist() == [2, 3, 8, 9]
    assert patches[0, 3].tolist() == [12, 13, 18, 19]


def test_what_is_seen_is_said(trained: tuple[example.Captioner, list[float]]) -> None:
    model, losses = trained
    without_looking = 3 * example.BEST_LOSS  # size and shape would be coins too
    assert 0.9 * example.BEST_LOSS < sum(losses[-20:]) / 20 < 0.6 * without_looking
    assert all(share > 0.95 for share in example.accuracy(model, 200).values())


@torch.inference_mode()
def test_the_cache_changes_nothing(trained: tuple[example.Captioner, list[float]]) -> None:
    model = trained[0]
    patches, *_ = example.examples(20, seed=5)
    ids = torch.full((20, 1), BOS)
    for _ in range(MAX_LEN - 1):
        ids = torch.cat((ids, model(patches, ids)[:, -1].argmax(dim=-1, keepdim=True)), dim=1)
    recomputed = [TOKENIZER.decode(row[: row.index(EOS)]) for row in ids.tolist()]
    assert model.captions(patches) == recomputed


@torch.inference_mode()
def test_who_sees_whom_among_the_patches(trained: tuple[example.Captioner, list[float]]) -> None:
    """The last patch changes what is kept of the first one only where the patches see each other."""
    model = trained[0]
    patches, *_ = example.examples(1, seed=5)
    changed = patches.clone()
    changed[:, -1] += 1

    def first(of: torch.Tensor) -> torch.Tensor:
        prefix = model.projector(of)
        lengths = [example.N_PATCHES] if model.prefix_lm else None
        return model.decoder(torch.tensor([[BOS]]), prefix_embeddings=prefix, prefix_lengths=lengths)[:, 0]

    assert torch.equal(first(patches), first(changed)) != model.prefix_lm
