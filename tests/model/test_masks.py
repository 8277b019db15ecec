"""Masks as data: each rule against its definition, and all of them together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leftward.model.masks import Mask, document_positions

EVERYTHING = slice(None)  # rows or columns


def visible(length: int, offset: int = 0, **rules: object) -> torch.Tensor:
    """[T, S] of `length` queries behind `offset` cached keys."""
    places = torch.arange(offset + length)[None]
    mask = Mask(queries=places[:, offset:], keys=places, **rules)  # type: ignore[arg-type]
    return mask.visible(EVERYTHING, EVERYTHING)[0, 0]


@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_the_causal_mask_is_pytorchs_square_subsequent_mask(length: int) -> None:
    reference = nn.Transformer.generate_square_subsequent_mask(length) == 0  # True: may look
    assert torch.equal(visible(length), reference)
    assert torch.equal(reference, torch.triu(torch.full((length, length), -torch.inf), diagonal=1) == 0)
    behind = visible(length, offset=3)
    assert behind[:, :3].all() and torch.equal(behind[:, 3:], reference)


def test_a_window_is_the_last_keys_the_querys_own_among_them() -> None:
    # transformers' sliding_window has the same meaning: i − j < window
    assert visible(5, window=2).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert torch.equal(visible(5, window=5), visible(5))
    assert visible(3, window=1).int().tolist() == torch.eye(3, dtype=torch.int).tolist()


def test_a_prefix_sees_itself_whole_and_the_rest_is_causal() -> None:
    # seeds/001: prompt tokens see each other fully, only the generated part is causal
    assert visible(4, prefix_lengths=torch.tensor([[2]])).int().tolist() == [
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 1],
    ]


def test_documents_of_a_packed_row_do_not_see_each_other() -> None:
    numbers = torch.tensor([[0, 0, 1, 1, 1]])
    seen = visible(5, documents=(numbers, numbers))
    expected = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).tril().bool()
    assert torch.equal(seen, expected)


def test_no_mask_and_rules_together() -> None:
    assert visible(4, causal=False).all()
    numbers = torch.tensor([[0, 0, 0, 1]])
    both = visible(4, causal=False, window=2, documents=(numbers, numbers))
    assert both.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]


def test_rows_of_unequal_length_and_empty_slots() -> None:
    mask = Mask(queries=torch.tensor([[2, 3], [0, 1]]), keys=torch.tensor([[0, 1, 2, 3], [0, 1, -1, -1]]))
    assert mask.visible(EVERYTHING, EVERYTHING)[:, 0].int().tolist() == [
        [[1, 1, 1, 0], [1, 1, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0]],
    ]


@pytest.mark.parametrize("rules", [{}, {"window": 3}, {"causal": False, "window": 3}, {"causal": False}])
def test_the_columns_of_a_block_leave_nothing_visible_out(rules: dict[str, object]) -> None:
    places = torch.arange(12)[None]
    mask = Mask(queries=places[:, 4:], keys=places, offset=4, **rules)  # type: ignore[arg-type]
    whole = mask.visible(EVERYTHING, EVERYTHING)[0, 0]
    for start in range(0, 8, 2):
        columns = mask.columns(start, start + 2)
        rows = whole[start : start + 2].clone()
        assert torch.equal(mask.visible(slice(start, start + 2), columns)[0, 0], rows[:, columns])
        rows[:, columns] = False
        assert not rows.any()


def test_positions_begin_anew_in_each_document() -> None:
    documents = torch.tensor([[4, 4, 4, 7, 4, 4], [0, 1, 1, 1, 1, 2]])
    assert document_positions(documents).tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 0]]
