"""What a run tells while it goes on, and to whom. No torch: a terminal can be made ready before that is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from leftward.errors import UserError

if TYPE_CHECKING:
    from leftward.training.loss import Evaluation


class Interrupted(Exception):
    """A signal ended a run. Its directory goes on from where it was saved: at that step, or at its last checkpoint."""

    def __init__(self, directory: Path, saved: bool = True) -> None:
        super().__init__(f"the run in {directory} was interrupted")
        self.directory = directory
        self.saved = saved


class Diverged(UserError):
    """The numbers of a run are no numbers any more: its learning rate is too high."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step."""

    step: int
    max_steps: int | None
    """None while a budget of minutes has not settled it."""
    loss: float
    """Of the step's batch, in nats a token."""
    bits_per_byte: float
    lr_fraction: float
    grad_norm: float
    tokens: int
    """Trained on so far."""
    tokens_per_second: float
    elapsed: float
    data_seconds: float
    """That the step waited for its tokens."""
    eta: float
    """Seconds to the end, as far as it can be told."""


class Observer:
    """Whoever shows a run to somebody; this one shows nothing. Each method may be called often and must be quick."""

    def note(self, text: str) -> None:
        """Something that a user should know."""

    def preparing(self, stage: str, done: int, total: int | None) -> None:
        """`done` bytes of text are read or encoded."""

    def starting(self, step: int) -> None:
        """The steps after `step` are about to come; 0 in a new run."""

    def stepped(self, progress: Progress) -> None:
        """An optimizer step was made."""

    def evaluated(self, step: int, evaluation: Evaluation, is_best: bool) -> None:
        """The validation split was gone through."""

    def sampled(self, step: int, prompt: str, text: str) -> None:
        """The model went on with one of the recipe's sample_prompts."""


class Several(Observer):
    """Tells each of `observers`."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def note(self, text: str) -> None:
        for observer in self._observers:
            observer.note(text)

    def preparing(self, stage: str, done: int, total: int | None) -> None:
        for observer in self._observers:
            observer.preparing(stage, done, total)

    def starting(self, step: int) -> None:
        for observer in self._observers:
            observer.starting(step)

    def stepped(self, progress: Progress) -> None:
        for observer in self._observers:
            observer.stepped(progress)

    def evaluated(self, step: int, evaluation: Evaluation, is_best: bool) -> None:
        for observer in self._observers:
            observer.evaluated(step, evaluation, is_best)

    def sampled(self, step: int, prompt: str, text: str) -> None:
        for observer in self._observers:
            observer.sampled(step, prompt, text)
