"""Whether a path is a model directory at all. No torch in here: a mistyped path is answered at once."""

from __future__ import annotations

from pathlib import Path

from leftward.errors import UserError


def check_model_directory(path: Path) -> None:
    """Raises: UserError, where `path` does not exist or holds no model."""
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if not (path / "config.json").is_file():
        what = "is not a directory" if path.is_file() else "has no config.json"
        raise UserError(f"{path} is not a model directory: it {what}")
