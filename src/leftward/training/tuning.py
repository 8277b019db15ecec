"""Which settings are better: runs over a grid of them, each with several seeds; and where to begin with the rates.

Every run is a run directory like any other, so that a sweep which was stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leftward import files
from leftward.errors import UserError
from leftward.overrides import YAML_FAULTS, override, parse_yaml
from leftward.training import directory as directories
from leftward.training import trackers
from leftward.training.progress import Diverged, Observer, Progress
from leftward.training.recipe import Recipe

Grid = Mapping[str, Sequence[Any]]

# ---- a grid and seeds


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    settings: dict[str, Any]
    """What sets it apart, as {"optimizer.lr": 0.02}."""
    seed: int
    directory: Path
    summary: dict[str, Any] | None
    """As in summary.json; None: its numbers became infinite."""


@dataclass(frozen=True)
class Outcome:
    """The runs of one setting, over its seeds. Nothing is averaged over a run that diverged: infinite."""

    settings: dict[str, Any]
    trials: tuple[Trial, ...]

    def mean(self, name: str) -> float:
        values = self._values(name)
        return statistics.fmean(values) if len(values) == len(self.trials) else math.inf

    def deviation(self, name: str) -> float | None:
        """Standard deviation over the seeds, n − 1 in the denominator; None of fewer than two."""
        values = self._values(name)
        return statistics.stdev(values) if len(values) == len(self.trials) > 1 else None

    def _values(self, name: str) -> list[float]:
        return [trial.summary[name] for trial in self.trials if trial.summary is not None]


def parse_grid(arguments: Iterable[str]) -> dict[str, list[Any]]:
    """{"optimizer.lr": [0.01, 0.02]} of "optimizer.lr=0.01,0.02". A list among the values is written [a,b].

    Raises: UserError.
    """
    grid: dict[str, list[Any]] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        try:
            values = parse_yaml(f"[{text}]")
        except YAML_FAULTS:
            values = []
        if not equals or not key or not values:
            raise UserError(f"{argument!r} is no setting: write it as key.sub=value, or key.sub=a,b,c to try several")
        grid[key] = values
    return grid


def tune(recipe: Mapping[str, Any], grid: Grid, n_seeds: int, out: Path | None, observer: Observer) -> list[Outcome]:
    """Train every combination of `grid` with `n_seeds` seeds from the recipe's on, one after the other.

    Args:
        recipe: its fields as plain data.
        out: holds the run directories. What has finished there is not repeated, what was interrupted goes on. None:
            runs/tune- and the name of the data.

    Returns:
        The best first, by the mean of val_bits_per_byte.

    Raises:
        UserError: a combination is no recipe (before any is trained), or a directory there is of another one.
        Interrupted: a signal ended a run; all is saved.
    """
    if n_seeds < 1:
        raise UserError(f"seeds is {n_seeds}: it must be at least 1")
    varied = [key for key, values in grid.items() if len(values) > 1]
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    planned: list[tuple[dict[str, Any], Recipe]] = []
    for settings in combinations:
        base = override(recipe, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
        apart = {key: settings[key] for key in varied}
        first = Recipe.from_dict(base)
        parent = Path("runs") / f"tune-{directories.name_of(first)}" if out is None else out
        for seed in range(first.seed, first.seed + n_seeds):
            run = {**base, "seed": seed, "out": str(parent / _name(apart, seed))}
            planned.append((apart, Recipe.from_dict(run)))
    names = [recipe.out for _, recipe in planned]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two combinations would be in {double}: leave one of them out")
    trials = []
    prepared: dict[str, Path] = {}
    for number, (apart, one) in enumerate(planned, start=1):
        trackers.check(one)
        observer.note(f"run {number} of {len(planned)}: {one.out}")
        directory = directories.directory_of(one)
        trials.append(Trial(apart, one.seed, directory, _train(one, directory, prepared, observer)))
    return outcomes(trials)


def outcomes(trials: Iterable[Trial]) -> list[Outcome]:
    """`trials` by their settings, the best first."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(repr(trial.settings), []).append(trial)
    found = [Outcome(group[0].settings, tuple(group)) for group in groups.values()]
    return sorted(found, key=lambda outcome: outcome.mean("val_bits_per_byte"))


def _name(settings: Mapping[str, Any], seed: int) -> str:
    """Of a run's directory."""
    short = [key.rpartition(".")[2] for key in settings]
    keys = short if len({*short}) == len(short) else list(settings)
    parts = [f"{key}={value}" for key, value in zip(keys, settings.values(), strict=True)]
    return re.sub(r"[^\w.,=+-]+", "-", ",".join([*parts, f"seed={seed}"]))


def _train(recipe: Recipe, directory: Path, prepared: dict[str, Path], observer: Observer) -> dict[str, Any] | None:
    """The summary of a run, which may have finished or begun before; None where it diverges."""
    from leftward.training import loop  # torch takes a second or two, which no mistake in the settings waits for
    from leftward.training.finetuning import settled

    recipe = settled(recipe)
    # Runs that read the same text in the same way share its tokens.
    of_tokens = [recipe.data.model_dump(), recipe.tokenizer.model_dump(), recipe.init_from, recipe.split_seed]
    data = json.dumps(of_tokens, sort_keys=True)
    try:
        if not directories.is_free(directory):
            with directories.existing(directory) as begun:
                if begun.fingerprint() != recipe.fingerprint():
                    raise UserError(f"{directory} is a run of another recipe: choose another --out")
                if (directory / loop.SUMMARY).exists():
                    return dict(files.read_json(directory / loop.SUMMARY))
                with trackers.tracked(observer, begun, directory) as told:
                    return loop.run(begun, directory, told)
        with directories.new(recipe) as made:
            if data in prepared:
                _link(prepared[data], made / "tokens")
            with trackers.tracked(observer, recipe, made) as told:
                return loop.run(recipe, made, told)
    except Diverged as error:
        observer.note(f"{directory} diverged: {error}")
        return None
    finally:
        if (directory / "tokens").is_dir():
            prepared[data] = directory / "tokens"


def _link(source: Path, target: Path) -> None:
    """The same files in another directory, which costs no space where the disk knows hard links."""

    def link(file: str, copy: str) -> None:
        try:
            os.link(file, copy)
        except OSError:
            shutil.copyfile(file, copy)

    with files.directory_atomic(target) as directory:
        shutil.copytree(source, directory, copy_function=link, dirs_exist_ok=True)


# ---- the range of learning rates

_LOWEST, _HIGHEST = 1e-3, 1e2  # times the rates of the recipe
_SMOOTHING = 0.9
_NOISE = 0.05  # nats: so much a smoothed loss moves by itself
# How many times the factor of the fastest fall is suggested, and for which rates: what whole runs of shakespeare-char
# liked best, in two shapes (docs/log.md).
_MULTIPLES = {"muon": (8.0, ("lr", "adamw_lr")), "adamw": (1.0, ("adamw_lr",))}
# Shares of what the loss has fallen: above the lowest by the first it rises again, by the second all is seen.
_RISE, _ENOUGH = 0.03, 0.3


@dataclass(frozen=True)
class Range:
    """What a run tells whose learning rate rises until it is too high."""

    factors: tuple[float, ...]
    """What the recipe's rates were multiplied by, step by step."""
    losses: tuple[float, ...]
    """Of the batches, smoothed, in nats a token."""
    suggested: float
    """A factor: a multiple of where the loss fell fastest."""
    multiple: float
    """Which."""
    rates: dict[str, float]
    """The recipe's rates times that."""


def find_rates(recipe: Mapping[str, Any], observer: Observer, steps: int = 100) -> Range:
    """Train for a moment while the learning rate rises exponentially, and say which is about right.

    The range test of Smith 2015, arXiv 1506.01186, over a hundred thousandth part of the highest rate; all rates of the
    recipe are multiplied by one factor. Suggested is a multiple of the factor at which the smoothed loss fell fastest,
    and not of where it was lowest: embeddings alone can hold the loss down at rates that break the blocks. Nothing of
    the run is kept.

    Raises:
        UserError: the recipe is none, its text cannot be read, or no rate taught the model anything.
        Interrupted: a signal ended it.
    """
    whole = Recipe.from_dict(recipe)
    from leftward.training import loop  # as above

    with tempfile.TemporaryDirectory() as directory:
        short = Recipe.from_dict(
            whole.model_dump(exclude={"logging"})
            | {
                "out": directory,
                "training": whole.training.model_dump() | {"max_steps": steps, **_PLAIN},
                "schedule": {"warmup_steps": 0},
            }
        )
        watcher = _Watcher(observer)
        with directories.new(short) as made, contextlib.suppress(_Enough, Diverged):
            loop.run(short, made, watcher, rate=lambda step, *_: _LOWEST * (_HIGHEST / _LOWEST) ** (step / (steps - 1)))
    lowest = _lowest_before_the_rise(watcher.losses)
    if not watcher.losses or watcher.losses[0] - watcher.losses[lowest] < 2 * _NOISE:
        raise UserError(
            f"no rate from {_LOWEST:g} to {_HIGHEST:g} times the recipe's lowered the loss: set optimizer.lr and "
            "optimizer.adamw_lr nearer by hand"
        )
    multiple, names = _MULTIPLES[whole.optimizer.name]
    suggested = watcher.factors[_fastest_fall(watcher.losses[: lowest + 1], steps // 10)] * multiple
    rates = {f"optimizer.{name}": float(f"{getattr(whole.optimizer, name) * suggested:.2g}") for name in names}
    return Range(tuple(watcher.factors), tuple(watcher.losses), suggested, multiple, rates)


# A run with nothing but steps.
_PLAIN: dict[str, Any] = {
    "max_epochs": None,
    "minutes": None,
    "eval_interval": 0,
    "patience": None,
    "sample_prompts": [],
    "save_interval": None,
    "keep_every": None,
    "skip_spikes": None,  # it is the spike that the rates are raised to
}


class _Enough(Exception):
    """The loss has risen so far that nothing more is to be seen."""


class _Watcher(Observer):
    """Smooths the losses, and shows the run to `shown`."""

    def __init__(self, shown: Observer) -> None:
        self._shown = shown
        self._average = 0.0
        self.factors: list[float] = []
        self.losses: list[float] = []

    def preparing(self, stage: str, done: int, total: int | None) -> None:
        self._shown.preparing(stage, done, total)

    def stepped(self, progress: Progress) -> None:
        self._shown.stepped(progress)
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * progress.loss
        self.factors.append(progress.lr_fraction)
        # An average that began at nothing is too low by so much (Kingma and Ba 2014, arXiv 1412.6980).
        self.losses.append(self._average / (1 - _SMOOTHING ** len(self.factors)))
        lowest = min(self.losses)
        if self.losses[-1] > lowest + _ENOUGH * (self.losses[0] - lowest) + _NOISE:
            raise _Enough


def _lowest_before_the_rise(losses: Sequence[float]) -> int:
    """Where the loss was lowest before it first rose again: after the break, Adam can find another valley."""
    best = 0
    for step, loss in enumerate(losses):
        if loss > losses[best] + _RISE * (losses[0] - losses[best]) + _NOISE:
            break
        best = step if loss < losses[best] else best
    return best


def _fastest_fall(losses: Sequence[float], steps: int) -> int:
    """The middle of those `steps` over which the loss fell most; of all, where there are fewer."""
    steps = max(1, min(steps, len(losses) - 1))
    return max(range(len(losses) - steps), key=lambda step: losses[step] - losses[step + steps]) + steps // 2
