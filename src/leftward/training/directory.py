"""Run directories: a new one for each run, never one that is in use, and one process at a time in each."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from leftward import files
from leftward.errors import UserError
from leftward.training.recipe import Recipe, read_yaml

RECIPE = "recipe.yaml"
_END = b"..."  # YAML's end of a document: without it a recipe that lost its tail would be read as a shorter one


@contextlib.contextmanager
def new(recipe: Recipe) -> Iterator[Path]:
    """Make and lock the directory of a new run, with its recipe in it. If training has not begun when the block fails,
    the directory vanishes again, so that the same command can be repeated.

    Raises:
        UserError: the directory is in use or cannot be made.
    """
    directory = directory_of(recipe)
    existed = directory.exists()
    if not is_free(directory):
        raise UserError(
            f"{directory} is already used: choose another --out, or go on with `leftward train --resume {directory}`"
        )
    with _locked(directory):
        try:
            write(recipe, directory)
            yield directory
        except BaseException:
            if not (directory / "metrics.jsonl").exists():
                for child in directory.iterdir():
                    shutil.rmtree(child) if child.is_dir() else child.unlink()
                if not existed:
                    directory.rmdir()
            raise


def is_free(directory: Path) -> bool:
    """Whether a run may begin there: there is nothing, or what one leaves that was killed before it had a recipe."""
    if not directory.is_dir():
        return not directory.exists()
    return all(path.name == files.LOCK or path.name.endswith(files.TEMPORARY) for path in directory.iterdir())


@contextlib.contextmanager
def existing(directory: Path) -> Iterator[Recipe]:
    """Lock the directory of a run that was begun, and read its recipe. Raises: UserError."""
    recipe = read(directory)
    with _locked(directory):
        files.sweep(directory)
        files.sweep(directory / "checkpoints")
        yield recipe


def read(directory: Path) -> Recipe:
    """The recipe of a run that was begun. Raises: UserError."""
    if not (directory / RECIPE).is_file():
        raise UserError(f"{directory} is not a run directory (it has no {RECIPE}): give the directory of a run")
    if not (directory / RECIPE).read_bytes().rstrip().endswith(_END):
        raise UserError(f"{directory / RECIPE} is cut short: it must end with the line `{_END.decode()}`")
    return Recipe.from_dict(read_yaml(directory / RECIPE))


def write(recipe: Recipe, directory: Path) -> None:
    """Put a recipe into its run directory. Raises: UserError, where the disk refuses."""
    whole = recipe.model_copy(update={"out": str(directory)})
    files.write_text(directory / RECIPE, whole.to_yaml() + f"{_END.decode()}\n")


def directory_of(recipe: Recipe) -> Path:
    """Where a new run goes: where the recipe says, or a place under runs/ that is free."""
    # Path's own expanduser raises where there is no such user.
    return Path(os.path.expanduser(recipe.out)) if recipe.out else _unused(Path("runs") / name_of(recipe))  # noqa: PTH111


def name_of(recipe: Recipe) -> str:
    """A run is called after its data."""
    path = recipe.data_settings().paths[0]
    name = "stdin" if path == "-" else Path(path.removeprefix("builtin:")).name.split(".")[0]
    return re.sub(r"[^\w-]+", "-", name).strip("-") or "run"


def _unused(path: Path) -> Path:
    number = 1
    while (numbered := path if number == 1 else path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return numbered


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with files.locked(directory) as is_ours:
        if not is_ours:
            raise UserError(f"{directory} is in use by another process: wait for it, or choose another --out")
        yield
