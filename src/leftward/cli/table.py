"""A table as text that fits its reader: in a narrow terminal the least important columns are left out."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    title: str
    cells: Sequence[str]
    rank: int = 0
    """0 stays always; of the others the highest goes first."""
    left: bool = False
    """Aligned to the left."""


def table(columns: Sequence[Column]) -> str:
    """`columns` side by side under their titles, no wider than the terminal; in a pipe, all of them."""
    shown = list(columns)
    available = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    while available is not None and _width(shown) > available:
        least = max(shown, key=lambda column: column.rank)
        if least.rank == 0:
            break
        shown.remove(least)
    rows = zip(*([column.title, *column.cells] for column in shown), strict=True)
    aligned = [
        [c.ljust(n) if col.left else c.rjust(n) for c, n, col in zip(row, _widths(shown), shown, strict=True)]
        for row in rows
    ]
    return "\n".join("  ".join(row).rstrip() for row in aligned)


def _widths(columns: Sequence[Column]) -> list[int]:
    return [max(map(len, [column.title, *column.cells])) for column in columns]


def _width(columns: Sequence[Column]) -> int:
    return sum(_widths(columns)) + 2 * (len(columns) - 1)
