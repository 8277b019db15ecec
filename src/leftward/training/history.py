"""What run directories say of themselves: a line each, their curves, and where their recipes differ. No torch.

Nothing in a directory may stop this: what cannot be read is None, and the reason stands beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from leftward import files
from leftward.errors import UserError, missing_extra
from leftward.planner import count_parameters
from leftward.training import directory as directories

State = Literal["finished", "running", "interrupted", "damaged"]
Axis = Literal["steps", "tokens", "minutes"]
Curve = list[tuple[float, float]]

AXES: dict[Axis, tuple[str, float]] = {"steps": ("step", 1), "tokens": ("tokens", 1), "minutes": ("elapsed_s", 1 / 60)}
"""What a curve can be drawn against: the key in metrics.jsonl, and what its values are multiplied by."""

_MARKS = frozenset([directories.RECIPE, "metrics.jsonl", "summary.json", "checkpoints"])  # of a run directory
_DATASET = "tokens/dataset.json"
_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Entry:
    """A run directory, as far as it can be read."""

    directory: Path
    state: State
    problem: str | None = None
    """Why something below is missing."""
    parameters: int | None = None
    steps: int | None = None
    tokens: int | None = None
    """Trained on so far."""
    val_loss: float | None = None
    """The best so far, in nats a token."""
    bits_per_byte: float | None = None
    """There."""
    minutes: float | None = None
    """Of training, over all sessions."""
    seed: int | None = None
    stopped_early: bool = False


def find(paths: Iterable[Path]) -> list[Path]:
    """The run directories at and below `paths`. Raises: UserError: a path that is no directory."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a directory: give run directories, or one that holds some")
        for folder, subfolders, names in os.walk(path):
            if _MARKS & {*subfolders, *names}:
                found.setdefault(Path(folder))
                subfolders.clear()
            subfolders.sort()
    return list(found)


def entry(directory: Path) -> Entry:
    """What a run directory says of itself."""
    values: dict[str, Any] = {}
    problems = []
    for name, read in _PARTS.items():
        try:
            values |= read(directory)
        except UserError as error:
            problems.append(str(error))
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            problems.append(f"{directory / name} is damaged ({type(error).__name__}: {error})")
    if files.is_locked(directory):
        return Entry(directory, "running", **values)  # what is missing may be about to be written
    if problems:
        return Entry(directory, "damaged", "; ".join(dict.fromkeys(problems)), **values)
    if (directory / "summary.json").exists():
        return Entry(directory, "finished", **values)
    return Entry(directory, "interrupted", None if values.get("steps") else "before its first step", **values)


def _of_recipe(directory: Path) -> dict[str, Any]:
    return {"seed": directories.read(directory).seed}


def _of_tokens(directory: Path) -> dict[str, Any]:
    path = directory / _DATASET
    if not path.exists():
        return {}
    config = directories.read(directory).config(files.read_json(path)["vocab_size"])
    return {"parameters": count_parameters(config).total}


def _of_metrics(directory: Path) -> dict[str, Any]:
    lines = list(metrics(directory))
    values: dict[str, Any] = {}
    if lines:
        values = {"steps": lines[-1]["step"], "tokens": lines[-1]["tokens"], "minutes": lines[-1]["elapsed_s"] / 60}
    if evaluations := [line for line in lines if "val_loss" in line]:
        best = min(evaluations, key=lambda line: float(line["val_loss"]))
        values |= {"val_loss": best["val_loss"], "bits_per_byte": best["val_bits_per_byte"]}
    return values


def _of_summary(directory: Path) -> dict[str, Any]:
    if not (directory / "summary.json").exists():
        return {}
    summary = files.read_json(directory / "summary.json")
    return {
        "parameters": summary["params"],
        "steps": summary["steps"],
        "tokens": summary["tokens"],
        "val_loss": summary["val_loss"],
        "bits_per_byte": summary["val_bits_per_byte"],
        "minutes": summary["training_s"] / 60,
        "stopped_early": summary.get("stopped_early", False),
    }


_PARTS = {
    directories.RECIPE: _of_recipe,
    _DATASET: _of_tokens,
    "metrics.jsonl": _of_metrics,
    "summary.json": _of_summary,
}


def metrics(directory: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; one that a kill has cut short is passed over."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and "step" in values:
            yield values


def curve(directory: Path, axis: Axis, kind: Literal["val", "train"] = "val") -> Curve:
    """Bits a byte of a run, of its evaluations or of its logged batches, against `axis`."""
    key, factor = AXES[axis]
    name = {"val": "val_bits_per_byte", "train": "bits_per_byte"}[kind]
    points = [(line.get(key), line.get(name)) for line in metrics(directory)]
    return [(x * factor, y) for x, y in points if isinstance(x, int | float) and isinstance(y, int | float)]


def differences(runs: Iterable[Path]) -> dict[str, dict[Path, Any]]:
    """The settings in which the recipes of `runs` are not all alike, each with its value by run.

    Where a run is kept, and who is told of it, is no difference. Runs whose recipes can't be read are left out.
    """
    settings: dict[Path, dict[str, Any]] = {}
    for run in runs:
        try:
            recipe = directories.read(run)
        except (UserError, OSError):
            continue
        sections = recipe.model_dump(exclude={"out", "size", "logging"})
        sections["model"] = {k: v for k, v in recipe.config(vocab_size=1).to_dict().items() if k != "vocab_size"}
        settings[run] = dict(_flat(sections))
    keys = dict.fromkeys(key for flat in settings.values() for key in flat)
    by_key = {key: {run: flat.get(key) for run, flat in settings.items()} for key in keys}
    return {key: values for key, values in by_key.items() if len({repr(value) for value in values.values()}) > 1}


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def draw(runs: Sequence[tuple[str, Path]], path: Path, axis: Axis) -> None:
    """A picture of the curves of (name, run directory): evaluations as lines with dots, batches as faint ones.

    Raises:
        UserError: matplotlib is missing, `path` says no kind of picture or can't be written, or there is no curve.
    """
    if path.suffix.lower() not in _PICTURES:
        raise UserError(f"{path} is no picture: give a name that ends in {', '.join(_PICTURES)}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "plot", f"drawing {path}") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, run) in enumerate(runs):
        val, train = curve(run, axis), curve(run, axis, "train")
        if not val and not train:
            continue
        marker = "os^v"[number // 10 % 4] if val else None  # colours come again after ten
        (line,) = axes.plot(*_columns(val or train), marker=marker, markersize=3.5, label=name)
        if val and train:
            axes.plot(*_columns(train), color=line.get_color(), alpha=0.25, linewidth=0.8, zorder=1)
    if not axes.lines:
        raise UserError("there is no curve to draw: no run has a line in its metrics.jsonl yet")
    axes.set_xlabel({"steps": "steps", "tokens": "tokens trained on", "minutes": "minutes of training"}[axis])
    axes.set_ylabel("bits/byte (faint: training batches)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    picture = path.suffix.lower().removeprefix(".")
    files.write_atomic(path, lambda temporary: figure.savefig(temporary, format=picture, dpi=150))


def _columns(points: Curve) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
