"""The cache changes no token, and the table has a row for each length and batch. Times are no business of a test."""

from __future__ import annotations

from pathlib import Path

import cache_speed as example
import pytest


def test_rows_and_tokens() -> None:
    rows = example.measure(lengths=(3, 9), batches=(1, 4), repeats=1)
    assert [(row.batch, row.length) for row in rows] == [(1, 3), (1, 9), (4, 3), (4, 9)]
    assert all(row.same for row in rows)
    assert [row.bound for row in rows] == [2, 5, 2, 5]  # (1 + 2 + 3) / 3, (1 + … + 9) / 9
    assert all(row.recomputing_ms > 0 and row.cached_ms > 0 for row in rows)


def test_what_would_take_too_long_is_left_out() -> None:
    rows = example.measure(lengths=(3, 9), batches=(1, 4), repeats=1, limit=50)
    assert [(row.batch, row.length) for row in rows] == [(1, 3), (1, 9), (4, 3)]


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    example.plot([example.Row(1, 9, 2.0, 1.0, True), example.Row(1, 32, 4.0, 1.0, True)], str(tmp_path / "it.svg"))
    assert "times faster with a cache" in (tmp_path / "it.svg").read_text()
