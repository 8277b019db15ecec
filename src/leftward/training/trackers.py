"""Who follows a run from outside: TensorBoard and Weights & Biases, each an Observer beside the one that shows the run.

metrics.jsonl is always written and is the truth; a tracker that fails while a run goes on is left behind, with a note.
"""

from __future__ import annotations

import contextlib
import importlib.util
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leftward import files
from leftward.errors import UserError, missing_extra
from leftward.training.progress import Observer, Progress, Several
from leftward.training.recipe import Recipe

if TYPE_CHECKING:
    from leftward.training.loss import Evaluation

Values = dict[str, float | str]
Log = Callable[[int, Values], None]
"""Takes what there is to say of a step: numbers and texts by name."""


def check(recipe: Recipe) -> None:
    """Raises: UserError: a tracker of the recipe is not installed."""
    for name in recipe.logging.trackers:
        if importlib.util.find_spec(name) is None:
            raise missing_extra(name, name, f"logging.trackers: {name}")


@contextlib.contextmanager
def tracked(observer: Observer, recipe: Recipe, directory: Path) -> Iterator[Observer]:
    """`observer`, and the trackers of the recipe beside it."""
    trackers = [_Tracker(name, recipe, directory, observer.note) for name in dict.fromkeys(recipe.logging.trackers)]
    try:
        yield Several([observer, *trackers]) if trackers else observer
    finally:
        for tracker in trackers:
            tracker.close()


class _Tracker(Observer):
    """Passes numbers and texts on, those of steps as often as metrics.jsonl has them."""

    def __init__(self, name: str, recipe: Recipe, directory: Path, complain: Callable[[str], None]) -> None:
        self._name, self._recipe, self._directory, self._complain = name, recipe, directory, complain
        self._log: Log | None = None
        self._close: Callable[[], None] = lambda: None

    def starting(self, step: int) -> None:
        try:
            self._log, self._close = _TRACKERS[self._name](self._recipe, self._directory, step)
        except Exception as error:  # whatever a service may refuse; before the first step the user can still mend it
            raise UserError(
                f"logging.trackers: {self._name} does not start ({type(error).__name__}: {error}); mend it and go on "
                f"with --resume, or take it out of recipe.yaml in {self._directory}"
            ) from error

    def stepped(self, progress: Progress) -> None:
        if progress.step % self._recipe.training.log_interval == 0 or progress.step == progress.max_steps:
            values: Values = {
                "train/loss": progress.loss,
                "train/bits_per_byte": progress.bits_per_byte,
                "train/lr_fraction": progress.lr_fraction,
                "train/grad_norm": progress.grad_norm,
                "train/tokens": float(progress.tokens),
                "train/tokens_per_second": progress.tokens_per_second,
            }
            self._safely(lambda log: log(progress.step, values))

    def evaluated(self, step: int, evaluation: Evaluation, is_best: bool) -> None:
        values: Values = {"val/loss": evaluation.loss, "val/bits_per_byte": evaluation.bits_per_byte}
        self._safely(lambda log: log(step, values))

    def sampled(self, step: int, prompt: str, text: str) -> None:
        self._safely(lambda log: log(step, {f"samples/{prompt or 'new text'}": prompt + text}))

    def close(self) -> None:
        self._safely(lambda _: self._close())
        self._log = None

    def _safely(self, tell: Callable[[Log], None]) -> None:
        """Nothing that becomes of a tracker may end the run that it follows."""
        if self._log is None:
            return
        try:
            tell(self._log)
        except Exception as error:
            self._log = None
            self._complain(f"{self._name} failed ({type(error).__name__}: {error}); going on without it")


def _tensorboard(recipe: Recipe, directory: Path, step: int) -> tuple[Log, Callable[[], None]]:
    from torch.utils.tensorboard.writer import SummaryWriter

    # What an interrupted run wrote after its checkpoint comes again.
    writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else None)

    def log(step: int, values: Values) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                writer.add_text(name, value, step)
            else:
                writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(recipe: Recipe, directory: Path, step: int) -> tuple[Log, Callable[[], None]]:
    import wandb

    # The name under which the service knows this run goes with its directory.
    path = directory / "wandb.json"
    if not path.exists():
        files.write_json(path, {"id": uuid.uuid4().hex})
    run: Any = wandb.init(
        project=recipe.logging.project,
        name=directory.name,
        id=files.read_json(path)["id"],
        resume="allow",
        dir=str(directory),
        config=recipe.model_dump(),
    )

    # Steps that were logged before a kill come again, and the service keeps the first of each: they are the same.
    def log(step: int, values: Values) -> None:
        run.log(values, step=step)

    return log, run.finish


_TRACKERS: dict[str, Callable[[Recipe, Path, int], tuple[Log, Callable[[], None]]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
