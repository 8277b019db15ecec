"""The weights of this moment, for whoever looks into a run while it goes on: a reader asks (`explore --follow`), and
training answers between two steps. Where nobody asks nothing is written, and nothing that is written changes the run.

    RUN/current/   asked, and the answer: step-00000400/, a model directory
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path

from leftward import files
from leftward.errors import UserError

_DIRECTORY, _ASKED = "current", "asked"
_STEP = re.compile(r"step-(\d+)")
_SHARE = 0.05  # of a run's time that may go into answers


def ask(run: Path) -> None:
    """Leave word that the weights of this moment are wanted, where somebody trains there who can give them."""
    if files.is_locked(run):
        with contextlib.suppress(OSError):  # what can't be asked isn't answered
            (run / _DIRECTORY).mkdir(exist_ok=True)
            (run / _DIRECTORY / _ASKED).touch()


def newest(run: Path) -> tuple[Path, int] | None:
    """The last answer and its step; None where there is none. It vanishes when there is another, or training ends."""
    found = [(path, int(match[1])) for path in (run / _DIRECTORY).glob("*") if (match := _STEP.fullmatch(path.name))]
    return max(found, key=itemgetter(1), default=None)


class Answers:
    """Those of one run."""

    def __init__(self, run: Path) -> None:
        self._directory = run / _DIRECTORY
        self._not_before = 0.0  # by the clock of `time.monotonic`

    def is_due(self) -> bool:
        """Whether somebody has asked, and the time of the last answer is worked off."""
        return (self._directory / _ASKED).exists() and time.monotonic() >= self._not_before

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """The time of the block is that of an answer."""
        began = time.monotonic()
        yield
        ended = time.monotonic()
        self._not_before = ended + (ended - began) / _SHARE

    def write(self, step: int, save: Callable[[Path], None]) -> None:
        """Let `save` write a model directory. A disk that refuses must not end the run: then there is no answer."""
        with contextlib.suppress(UserError, OSError):
            (self._directory / _ASKED).unlink()
            older = list(self._directory.glob("step-*"))
            with files.directory_atomic(self._directory / f"step-{step:08d}") as directory:
                save(directory)
            for each in older:
                files.remove_directory(each)


@contextlib.contextmanager
def answering(run: Path, is_first: bool) -> Iterator[Answers]:
    """While a run trains. Before and after there are no answers: of several ranks the first clears them away."""

    def clear() -> None:
        if is_first:
            files.remove_directory(run / _DIRECTORY)

    clear()
    try:
        yield Answers(run)
    finally:
        clear()
