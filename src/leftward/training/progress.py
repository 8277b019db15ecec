"""What a run tells while it goes on, and to whom. No torch: a terminal can be made ready before that is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leftward.training.loss import Evaluation


class Interrupted(Exception):
    """A signal ended a run. Its directory goes on from where it was saved: at that step, or at its last checkpoint."""

    def __init__(self, directory: Path, saved: bool = True) -> None:
        super().__init__(f"the run in {directory} was interrupted")
        self.directory = directory
        self.saved = saved


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
    eta: float
    """Seconds to the end, as far as it can be told."""


class Observer:
    """Whoever shows a run to somebody; this one shows nothing. Each method may be called often and must be quick."""

    def note(self, text: str) -> None:
        """Something that a user should know."""

    def preparing(self, stage: str, done: int, total: int | None) -> None:
        """`done` bytes of text are read or encoded."""

    def stepped(self, progress: Progress) -> None:
        """An optimizer step was made."""

    def evaluated(self, step: int, evaluation: Evaluation, is_best: bool) -> None:
        """The validation split was gone through."""
