"""Curves as text, for the end of a run and for several beside each other."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence

Points = Sequence[tuple[float, float]]

MOST_CURVES = 8
"""What can be told apart: each has a mark of its own."""
_MARKS, _ASCII_MARKS = "•×+o#@%&", "*x+o#@%&"


def chart(points: Points, y_name: str, x_name: str, height: int = 8, log_x: bool = False) -> str:
    """The curve through `points` (x, y) in text, wide enough to read and no wider than the terminal."""
    return charts({"": points}, y_name, x_name, height, log_x)


def charts(curves: Mapping[str, Points], y_name: str, x_name: str, height: int = 8, log_x: bool = False) -> str:
    """Curves by name in one chart, at most MOST_CURVES of them, each with a mark and at least a point."""
    width = max(20, min(64, shutil.get_terminal_size().columns - 12))
    scale = math.log if log_x else float
    xs = [scale(x) for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points]
    low, high, left, right = min(ys), max(ys), min(xs), max(xs)
    rows = [[" "] * width for _ in range(height)]
    marks, (side, corner, line) = (_MARKS, "┤└─") if _can_print(_MARKS + "┤└─") else (_ASCII_MARKS, "|+-")
    for mark, points in reversed([*zip(marks, curves.values(), strict=False)]):  # the first lies on top
        for x, y in points:
            column = round((scale(x) - left) / (right - left) * (width - 1)) if right > left else 0
            row = round((high - y) / (high - low) * (height - 1)) if high > low else height - 1
            rows[row][column] = mark
    labels = [f"{high - (high - low) * row / (height - 1):8.3f} " for row in range(height)]
    body = [f"{label}{side}{''.join(cells)}".rstrip() for label, cells in zip(labels, rows, strict=True)]
    first, last = (_number(x) for x in _ends([x for points in curves.values() for x, _ in points]))
    axis = first.ljust(width - len(last)) + last
    legend = [f"{'':9}{mark} {name}" for mark, name in zip(marks, curves, strict=False) if name]
    return "\n".join([f"{y_name} against {x_name}", *body, f"{'':9}{corner}{line * width}", f"{'':10}{axis}", *legend])


def _ends(numbers: Sequence[float]) -> tuple[float, float]:
    return min(numbers), max(numbers)


def _number(x: float) -> str:
    return f"{x:,.0f}" if x == round(x) or abs(x) >= 1000 else f"{x:.3g}"


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
