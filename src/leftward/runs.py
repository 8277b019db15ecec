"""`lw.train`: from a recipe to a run in hand."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from leftward import files
from leftward.data.batches import Dataset
from leftward.data.order import validation
from leftward.errors import UserError
from leftward.language_model import LanguageModel, load
from leftward.overrides import override
from leftward.training import directory as directories
from leftward.training import loop, trackers
from leftward.training.loss import Evaluation, evaluate
from leftward.training.parallel import joined
from leftward.training.progress import Observer
from leftward.training.recipe import Recipe, read_recipe
from leftward.training.watcher import Watcher

_READ_AT_ONCE = 1 << 20  # tokens of a split


@dataclass(frozen=True)
class Run:
    """A trained run: its directory, which is a Hugging Face model directory too, and what is in it."""

    directory: Path

    @functools.cached_property
    def model(self) -> LanguageModel:
        """The best weights, with the tokenizer."""
        return load(self.directory)

    @property
    def summary(self) -> dict[str, Any]:
        """val_loss, val_bits_per_byte, steps, tokens, params, wall_s, …"""
        return dict(files.read_json(self.directory / "summary.json"))

    @property
    def history(self) -> list[dict[str, Any]]:
        """metrics.jsonl: logged steps have `loss`, evaluations have `val_loss`; all have `step` and `tokens`."""
        path = self.directory / "metrics.jsonl"
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is missing or damaged ({error})") from None

    def evaluate(self, *, stride: int | None = None, dtype: Literal["fp32", "bf16"] | None = None) -> Evaluation:
        """The loss of the best weights on the run's own validation split.

        Args:
            stride: None reads the split as training does, as one stream in windows of training.seq_len that do not
                overlap: summary.json's val_loss. Otherwise each document is read from its own beginning, in windows of
                the whole context that go on by so many tokens.
            dtype: the numbers to compute with. None: those of the run.

        Raises:
            UserError: the directory is no run with its tokens, or the stride is out of range.
        """
        recipe = directories.read(self.directory)
        finished = (self.directory / "summary.json").exists()
        model = load(self.directory, dtype=dtype or (self.summary["dtype"] if finished else "fp32"))
        if stride is not None:
            return model.evaluate(self._held_out(), stride=stride)
        split = validation(Dataset.open(self.directory / "tokens"), recipe.data.packing)
        evaluation = evaluate(model.decoder, split, recipe.seq_len, model.decoder.device)
        assert evaluation is not None  # nothing asks it to stop
        return evaluation

    def _held_out(self) -> Iterator[str]:
        """The documents of the validation split."""
        val, tokenizer = Dataset.open(self.directory / "tokens").val, self.model.tokenizer
        held: list[int] = []
        for start in range(0, len(val), _READ_AT_ONCE):
            ids = val.slice(start, min(start + _READ_AT_ONCE, len(val)))
            *ended, rest = np.split(ids, np.flatnonzero(ids == tokenizer.eos_id))
            for part in ended:
                yield tokenizer.decode([i for i in [*held, *part.tolist()] if i != tokenizer.eos_id])
                held = []
            held += rest.tolist()
        yield tokenizer.decode([i for i in held if i != tokenizer.eos_id])

    def held_out_beginnings(self, n: int) -> list[str]:
        """The first words of n paragraphs of the validation text, for the model to go on from."""
        val, beginnings = Dataset.open(self.directory / "tokens").val, []
        for index in range(n):
            start = len(val) * index // n
            text = self.model.tokenizer.decode(val.slice(start, min(start + 2000, len(val))).tolist())
            found = re.search(r"\n\s*\n([A-Z]\w*(?:[ \t]+\S+){1,3})", text) or re.search(r"\s(\w+(?: +\S+){0,3})", text)
            beginnings.append(found[1] if found else text[:20])
        return beginnings


def train(
    recipe: Recipe | Mapping[str, Any] | Path | str,
    *overrides: str,
    observer: Observer | None = None,
    started: float | None = None,
) -> Run:
    """Train a model: from nothing, or from the one that the recipe's `init_from` names.

    Args:
        recipe: a Recipe, its fields as plain data, the path of a YAML file, or the name of a recipe that comes with
            leftward.
        overrides: "key.sub=value" settings laid over it.
        observer: is told of every step and evaluation. None: they are shown on stderr, as a live bar on a terminal;
            `Observer()` shows nothing.
        started: the `time.perf_counter()` that summary.json's wall_s counts from. None: this call.

    Raises:
        UserError: something is wrong with the recipe, the data or the disk.
        Interrupted: a signal ended the run; all is saved, and `resume` goes on.
    """
    if isinstance(recipe, Recipe):
        recipe = recipe.model_dump()
    elif not isinstance(recipe, Mapping):
        recipe = read_recipe(recipe)
    recipe = Recipe.from_dict(override(recipe, overrides))
    trackers.check(recipe)
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(joined())
        directory = Path(world.from_first(lambda: str(stack.enter_context(directories.new(recipe)))))
        _watched(recipe, directory, observer, started)
    return Run(directory)


def resume(
    directory: Path | str, *overrides: str, observer: Observer | None = None, started: float | None = None
) -> Run:
    """Go on with a run from its last checkpoint; on a CPU to the bit as if it had never stopped, with as many ranks.

    Args:
        overrides: "parallel.sub=value" settings, laid over the run's recipe for this session.

    Raises: as `train`.
    """
    directory = Path(directory)
    if wrong := [setting for setting in overrides if not setting.startswith("parallel.")]:
        raise UserError(f"a run goes on with its own recipe, but for parallel.…: leave out {wrong[0]}")
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(joined())
        own = world.from_first(lambda: stack.enter_context(directories.existing(directory)).model_dump())
        recipe = Recipe.from_dict(override(own, overrides))
        trackers.check(recipe)
        _watched(recipe, directory, observer, started)
    return Run(directory)


def _watched(recipe: Recipe, directory: Path, observer: Observer | None, started: float | None) -> None:
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(joined()).is_first:
            loop.run(recipe, directory, Observer(), started)
            return
        observer = observer or stack.enter_context(Watcher())
        loop.run(recipe, directory, stack.enter_context(trackers.tracked(observer, recipe, directory)), started)
