"""What a person sees while a run goes on: a live bar on a terminal, plain lines in a pipe; and the curve at its end."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from leftward.training import progress as training

if TYPE_CHECKING:  # imports torch
    from leftward.training.loss import Evaluation

_LINE_SECONDS = 5.0  # between two plain lines


class Watcher(training.Observer):
    """Shows a run on stderr, so that stdout stays for results."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._shown_at = 0.0
        self._stage = ""
        self._loss: float | None = None
        self._validation = ""

    def __enter__(self) -> Watcher:
        if self._console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=None), TextColumn("{task.description}"), console=self._console, expand=True
            )
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def preparing(self, stage: str, done: int, total: int | None) -> None:
        is_new = stage != self._stage
        self._stage = stage
        of_total = f" of {total / 1e6:,.1f} MB" if total else " MB"
        self._show(f"{stage} text: {done / 1e6:,.1f}{of_total}", float(done), float(total or 0) or None, now=is_new)

    def stepped(self, progress: training.Progress) -> None:
        # One batch's loss jumps about; an average over some twenty is what an eye can follow.
        weight = max(0.05, 1 / progress.step)
        self._loss = progress.loss if self._loss is None else self._loss + weight * (progress.loss - self._loss)
        of_max = f"/{progress.max_steps:,}" if progress.max_steps else ""
        bits = self._loss * progress.bits_per_byte / progress.loss if progress.loss else 0.0
        text = (
            f"step {progress.step:,}{of_max}  loss {self._loss:.3f}  {bits:.3f} bits/byte  "
            f"{progress.tokens_per_second:,.0f} tokens/s  ETA {_clock(progress.eta)}"
        )
        is_last = progress.step == progress.max_steps
        self._show(text + self._validation, progress.elapsed, progress.elapsed + progress.eta, now=is_last)

    def evaluated(self, step: int, evaluation: Evaluation, is_best: bool) -> None:
        best = ", the best so far" if is_best else ""
        self.note(
            f"step {step:,}: validation loss {evaluation.loss:.4f}, {evaluation.bits_per_byte:.4f} bits/byte{best}"
        )

    def _show(self, text: str, done: float, total: float | None, now: bool = False) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text, completed=done, total=total)
        elif now or time.monotonic() - self._shown_at > _LINE_SECONDS:
            self._shown_at = time.monotonic()
            self.note(text)


def chart(points: Sequence[tuple[float, float]], y_name: str, x_name: str, height: int = 8) -> str:
    """The curve through `points` (x, y) in text, wide enough to read and no wider than the terminal."""
    width = max(20, min(64, shutil.get_terminal_size().columns - 12))
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    rows = [[" "] * width for _ in range(height)]
    x_span, y_span = max(xs) - min(xs), high - low
    for x, y in points:
        column = round((x - min(xs)) / x_span * (width - 1)) if x_span else 0
        row = round((high - y) / y_span * (height - 1)) if y_span else height - 1
        rows[row][column] = "•" if _can_print("•┤└─") else "*"
    side, corner, line = ("┤", "└", "─") if _can_print("•┤└─") else ("|", "+", "-")
    labels = [f"{high - y_span * row / (height - 1):8.3f} " for row in range(height)]
    body = [f"{label}{side}{''.join(cells)}" for label, cells in zip(labels, rows, strict=True)]
    axis = f"{min(xs):,.0f}".ljust(width - len(f"{max(xs):,.0f}")) + f"{max(xs):,.0f}"
    return "\n".join([f"{y_name} against {x_name}", *body, f"{'':9}{corner}{line * width}", f"{'':10}{axis}"])


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
