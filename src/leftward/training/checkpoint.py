"""What a run needs to go on as if it had never stopped, in one directory that is whole or absent.

    RUN/checkpoints/step-00000400/   model.safetensors (fp32 masters), optimizer.safetensors, state.json

Several ranks write the tensors as shards.py says instead; any number of ranks reads either.

There is no random state to keep: the order of the data and the dropout of a step follow from the seed and the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from leftward import files
from leftward.errors import UserError
from leftward.formats.tensors import DTYPES, read_tensors, write_tensors
from leftward.training.schedule import Plan
from leftward.training.spikes import Spikes

if TYPE_CHECKING:
    from leftward.training.sharding import Sharding  # FSDP takes a second to import

DIRECTORY = "checkpoints"
_WEIGHTS, _OPTIMIZER = "weights.", "optimizer."  # before the names of tensors, where they are in one set of files
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
    evaluated_step: int | None = None
    """The last step that was evaluated, and the validation loss there."""
    last_loss: float | None = None
    native: bool = False
    """Whether the kernels of kernels/native.py compute, which round differently from PyTorch's operations."""
    base_fingerprint: str | None = None
    """Of the model that the run began from; with LoRA what is saved are the adapters, beside this."""
    best_step: int | None = None
    best_loss: float | None = None
    stale: int = 0
    """Evaluations since the best one."""
    spikes: Spikes = field(default_factory=Spikes)

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
            parts = {"plan": Plan(**values["plan"]), "spikes": Spikes(**values.get("spikes", {}))}
            state = cls(**{**values, **parts})
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error})") from None
        for part in (state, state.plan, state.spikes):
            for name, kind in typing.get_type_hints(type(part)).items():
                if not _is_possible(value := getattr(part, name), kind):
                    raise UserError(f"{path} is damaged: {name} is {value!r}")
        if state.dtype not in DTYPES:
            raise UserError(f"{path} is damaged: dtype is {state.dtype!r}")
        return state


def _is_possible(value: Any, kind: Any) -> bool:
    """Whether a value of a state is of its kind; none of its numbers is negative, infinite or beyond 62 bits."""
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(_is_possible(item, *typing.get_args(kind)) for item in value)
    return isinstance(value, kind) and (not isinstance(value, (int, float)) or 0 <= value < 2**62)


def save(
    run: Path,
    state: State,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    *,
    keep: int = 1,
    keep_every: int | None = None,
    sharding: Sharding | None = None,
) -> None:
    """Add the checkpoint of `state.step`, then drop older ones (which stay when it fails).

    Where the step has one already, only its state is written: evaluating a step changes no weights.

    Args:
        keep: how many of the newest stay.
        keep_every: those of every such step stay too.
        sharding: whose ranks call this together, each with what it has of the tensors.

    Raises:
        UserError: the disk refuses.
    """
    target = run / DIRECTORY / f"step-{state.step:08d}"
    if sharding is not None:
        _save_together(target, state, _named(weights, optimizer), sharding)
        if not sharding.world.is_first:
            return
    elif target.exists():
        files.write_json(target / "state.json", state.to_dict())
    else:
        with files.directory_atomic(target) as directory:
            write_tensors(directory / "model.safetensors", weights)
            write_tensors(directory / "optimizer.safetensors", optimizer)
            files.write_json(directory / "state.json", state.to_dict())
    for older in _all(run)[:-keep]:
        if keep_every is None or _step(older) % keep_every:
            files.remove_directory(older)


def _save_together(target: Path, state: State, tensors: dict[str, Tensor], sharding: Sharding) -> None:
    """The same by all ranks: the first one makes the directory and puts it in its place, or writes the state alone."""
    from leftward.training import shards

    world = sharding.world
    with contextlib.ExitStack() as stack:

        def begin() -> str | None:
            if target.exists():
                return None
            return str(stack.enter_context(files.directory_atomic(target)))

        directory = world.from_first(begin)
        with files.writing(target):
            if directory is not None:
                shards.write(Path(directory), tensors, sharding)
            if world.is_first:
                files.write_json((target if directory is None else Path(directory)) / "state.json", state.to_dict())
    world.wait()


def _named(weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors under names of their own."""
    parts = ((_WEIGHTS, weights), (_OPTIMIZER, optimizer))
    return {prefix + name: tensor for prefix, named in parts for name, tensor in named.items()}


def latest_state(run: Path) -> State | None:
    """The state of the newest checkpoint, or None where there is none. Raises: UserError."""
    checkpoints = _all(run)
    if not checkpoints:
        return None
    newest = checkpoints[-1]
    path = newest / "state.json"
    state = State.from_dict(files.read_json(path), path)
    if newest.name != f"step-{state.step:08d}" or (state.plan.max_steps or state.step) < state.step:
        raise UserError(f"{path} is damaged: step is {state.step}")
    return state


def load_latest(
    run: Path, sharding: Sharding | None = None
) -> tuple[State, dict[str, Tensor], dict[str, Tensor]] | None:
    """State, weights and optimizer state of the newest checkpoint, or None where there is none; with a `sharding`, what
    this rank has of them, whoever wrote it. Raises: UserError."""
    state = latest_state(run)
    if state is None:
        return None
    newest = _all(run)[-1]
    if (newest / "model.safetensors").exists() or not any(newest.glob("shard-*")):
        parts = [read_tensors(newest / f"{name}.safetensors") for name in ("model", "optimizer")]
        if sharding is not None:
            parts = [sharding.own(part) for part in parts]
        return state, parts[0], parts[1]
    from leftward.training import shards

    tensors = shards.read(newest, sharding)
    weights, optimizer = (
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for prefix in (_WEIGHTS, _OPTIMIZER)
    )
    return state, weights, optimizer


def _all(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted((p for p in (run / DIRECTORY).glob("step-*") if re.fullmatch(r"step-\d+", p.name)), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
