"""What a run needs to go on as if it had never stopped, in one directory that is whole or absent.

    RUN/checkpoints/step-00000400/   model.safetensors (fp32 masters), optimizer.safetensors, state.json

There is no random state to keep: the order of the data and the dropout of a step follow from the seed and the step.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from leftward import files
from leftward.errors import UserError
from leftward.formats.tensors import DTYPES, read_tensors, write_tensors
from leftward.training.schedule import Plan

DIRECTORY = "checkpoints"
VERSION = 1


@dataclass(frozen=True)
class State:
    """Where a run stands after `step` optimizer steps."""

    step: int
    position: int
    """Windows of the training split consumed."""
    tokens: int
    elapsed: float
    """Seconds of training, over all sessions."""
    dtype: str
    threads: int
    """CPU threads: another number may round sums differently."""
    data_fingerprint: str
    recipe_fingerprint: str
    plan: Plan
    evaluated_at: float = 0.0
    """`elapsed` at the last evaluation: a run that was killed in one is due for it again."""
    evaluated_step: int = 0
    """The last step that was evaluated, and the validation loss there."""
    last_loss: float | None = None
    native: bool = False
    """Whether the kernels of kernels/native.py compute, which round differently from PyTorch's operations."""
    best_step: int | None = None
    best_loss: float | None = None
    stale: int = 0
    """Evaluations since the best one."""

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Any, path: Path) -> State:
        if not isinstance(values, dict) or "version" not in values:
            raise UserError(f"{path} is damaged: it holds no training state")
        version = values.pop("version")
        if version != VERSION:
            raise UserError(f"{path} is of version {version}, this program reads {VERSION}")
        try:
            state = cls(**{**values, "plan": Plan(**values["plan"])})
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error})") from None
        for part in (state, state.plan):
            for name, kind in typing.get_type_hints(type(part)).items():
                value = getattr(part, name)
                if not isinstance(value, kind) or (isinstance(value, (int, float)) and not 0 <= value < 2**62):
                    raise UserError(f"{path} is damaged: {name} is {value!r}")
        if state.dtype not in DTYPES:
            raise UserError(f"{path} is damaged: dtype is {state.dtype!r}")
        return state


def save(run: Path, state: State, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
    """Add the checkpoint of `state.step`, then drop older ones (which stay when it fails).

    Where the step has one already, only its state is written: evaluating a step changes no weights.

    Raises:
        UserError: the disk refuses.
    """
    target = run / DIRECTORY / f"step-{state.step:08d}"
    if target.exists():
        files.write_json(target / "state.json", state.to_dict())
    else:
        with files.directory_atomic(target) as directory:
            write_tensors(directory / "model.safetensors", weights)
            write_tensors(directory / "optimizer.safetensors", optimizer)
            files.write_json(directory / "state.json", state.to_dict())
    for older in _all(run):
        if older != target:
            shutil.rmtree(older, ignore_errors=True)


def load_latest(run: Path) -> tuple[State, dict[str, Tensor], dict[str, Tensor]] | None:
    """State, weights and optimizer state of the newest checkpoint, or None where there is none. Raises: UserError."""
    checkpoints = _all(run)
    if not checkpoints:
        return None
    newest = checkpoints[-1]
    path = newest / "state.json"
    state = State.from_dict(files.read_json(path), path)
    if newest.name != f"step-{state.step:08d}" or (state.plan.max_steps or state.step) < state.step:
        raise UserError(f"{path} is damaged: step is {state.step}")
    return state, read_tensors(newest / "model.safetensors"), read_tensors(newest / "optimizer.safetensors")


def _all(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    directory = run / DIRECTORY
    return (
        sorted(p for p in directory.glob("step-*") if re.fullmatch(r"step-\d+", p.name)) if directory.is_dir() else []
    )
