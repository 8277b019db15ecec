"""What a person sees while a run goes on: a live bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from leftward.training import progress as training

if TYPE_CHECKING:  # imports torch
    from leftward.training.loss import Evaluation

_LINE_SECONDS = 5.0  # between two plain lines


class _Console(Console):
    """Rich's own answer to a broken pipe closes stdout, which holds results, and ends the program."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Watcher(training.Observer):
    """Shows a run on stderr, so that stdout stays for results."""

    def __init__(self) -> None:
        self._console = _Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._shown_at = time.monotonic()  # of the last plain line
        self._loss: float | None = None
        self._stage = ("", 0.0, 0)  # of preparing the data: which, when it began, and at how many bytes
        self._is_blind = False  # nobody reads any more

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
            self._safely(self._bar.stop)

    def note(self, text: str) -> None:
        # On a terminal lines break between words; in a pipe whoever reads them decides.
        self._safely(
            lambda: self._console.print(text, markup=False, emoji=False, soft_wrap=not self._console.is_terminal)
        )

    def preparing(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if self._stage[0] != stage:
            self._stage = (stage, now, done)
        _, began, before = self._stage
        text = f"{stage} text: {done / 1e6:,.1f}" + (f" of {total / 1e6:,.1f} MB" if total else " MB")
        if now - began > 1 and done > before:
            rate = (done - before) / (now - began)
            text += f"  {rate / 1e6:,.1f} MB/s" + (f"  ETA {_clock(max(0, total - done) / rate)}" if total else "")
        self._show(text, float(done), float(total or 0) or None)

    def stepped(self, progress: training.Progress) -> None:
        # One batch's loss jumps about; an average over some twenty is what an eye can follow.
        weight = max(0.05, 1 / progress.step)
        self._loss = progress.loss if self._loss is None else self._loss + weight * (progress.loss - self._loss)
        of_max = f"/{progress.max_steps:,}" if progress.max_steps else ""
        bits = self._loss * progress.bits_per_byte / progress.loss if progress.loss else 0.0
        text = (
            f"step {progress.step:,}{of_max}  ETA {_clock(progress.eta)}  loss {self._loss:.3f}  "
            f"{bits:.3f} bits/byte  {progress.tokens_per_second:,.0f} tokens/s"
        )
        is_last = progress.step == progress.max_steps
        self._show(text, progress.elapsed, progress.elapsed + progress.eta, now=is_last)

    def evaluated(self, step: int, evaluation: Evaluation, is_best: bool) -> None:
        worse = "" if is_best else " (not the best)"
        self.note(
            f"step {step:,}: validation loss {evaluation.loss:.4f}, {evaluation.bits_per_byte:.4f} bits/byte{worse}"
        )

    def sampled(self, step: int, prompt: str, text: str) -> None:
        self.note(f"  {' '.join((prompt + text).split())}")

    def _safely(self, show: Callable[[], object]) -> None:
        """Nothing that becomes of stderr (a closed pipe, a full disk) may end the run that it tells of."""
        if self._is_blind:
            return
        try:
            show()
        except (OSError, ValueError):  # what is closed raises ValueError
            self._is_blind = True

    def _show(self, text: str, done: float, total: float | None, now: bool = False) -> None:
        bar, task = self._bar, self._task
        if bar is not None and task is not None:
            self._safely(lambda: bar.update(task, description=text, completed=done, total=total))
        elif now or time.monotonic() - self._shown_at > _LINE_SECONDS:
            self._shown_at = time.monotonic()
            self.note(text)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
