"""Positions that pass through the model, counted by a hook, against arithmetic by hand."""

from __future__ import annotations

import counting_positions as example
import pytest
import torch


def test_the_pages_example() -> None:
    results = example.count(10, 20)
    assert {name: sum(passes) for name, (passes, _) in results.items()} == {
        "recomputing": 390,
        "with a cache": 29,
        "leftward's": 29,
    }
    assert all(len(passes) == 20 for passes, _ in results.values())


@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (1, 8), (7, 2), (30, 34)])
def test_other_lengths(prompt: int, new: int) -> None:
    results = example.count(prompt, new)
    (recomputing, a), (cached, b), (package, c) = results.values()
    assert recomputing == list(range(prompt, prompt + new))
    assert cached == package == [prompt] + [1] * (new - 1)
    assert a == b == c
    assert len(a) == prompt + new


def test_rows_of_a_batch_are_counted_each() -> None:
    decoder = example.small_model()
    ids = torch.randint(26, (3, 4))
    with example.counted(decoder) as passes:
        cached = example.with_cache(decoder, ids, 5)
    assert sum(passes) == 3 * (4 + 4)
    assert torch.equal(cached, example.recompute(decoder, ids, 5))
