"""A curve as text, for the end of a run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence


def chart(points: Sequence[tuple[float, float]], y_name: str, x_name: str, height: int = 8) -> str:
    """The curve through `points` (x, y) in text, wide enough to read and no wider than the terminal."""
    width = max(20, min(64, shutil.get_terminal_size().columns - 12))
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    rows = [[" "] * width for _ in range(height)]
    point, side, corner, line = "•┤└─" if _can_print("•┤└─") else "*|+-"
    x_span, y_span = max(xs) - min(xs), high - low
    for x, y in points:
        column = round((x - min(xs)) / x_span * (width - 1)) if x_span else 0
        row = round((high - y) / y_span * (height - 1)) if y_span else height - 1
        rows[row][column] = point
    labels = [f"{high - y_span * row / (height - 1):8.3f} " for row in range(height)]
    body = [f"{label}{side}{''.join(cells)}".rstrip() for label, cells in zip(labels, rows, strict=True)]
    axis = f"{min(xs):,.0f}".ljust(width - len(f"{max(xs):,.0f}")) + f"{max(xs):,.0f}"
    return "\n".join([f"{y_name} against {x_name}", *body, f"{'':9}{corner}{line * width}", f"{'':10}{axis}"])


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
