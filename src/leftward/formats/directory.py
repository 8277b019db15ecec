"""Whether a path is a model at all. No torch in here: a mistyped path is answered at once."""

from __future__ import annotations

import re
from pathlib import Path

from leftward.errors import UserError


def check_model(what: Path | str) -> None:
    """Whether `what` may be what `lw.load` takes. Raises: UserError."""
    if not (Path(what).suffix in (".gguf", ".bin") and Path(what).is_file()) and not is_hub_id(what):
        check_model_directory(Path(what))


def check_model_directory(path: Path) -> None:
    """Raises: UserError, where `path` does not exist or holds no model."""
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if not (path / "config.json").is_file():
        what = "is not a directory" if path.is_file() else "has no config.json"
        raise UserError(f"{path} is not a model directory: it {what}")


def is_hub_id(what: Path | str) -> bool:
    """Whether a text is "owner/name", a repository of the Hugging Face hub, and no path that is there."""
    text = str(what)
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text) is not None
    return is_name and not Path(text).exists() and not Path(text).parent.exists()
