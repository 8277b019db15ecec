"""A page that follows a run: whenever training publishes better weights, the text is read anew with them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from leftward.errors import UserError
from leftward.inspection.server import Explorer
from leftward.language_model import load

WEIGHTS = "model.safetensors"
_LOOKED_EVERY = 2.0  # seconds


def follow(explorer: Explorer, directory: Path, until: threading.Event) -> None:
    """Look for newer weights in a run's directory until the event comes. To be called in a thread of its own."""
    seen = published(directory)
    while not until.wait(_LOOKED_EVERY):
        newest = published(directory)
        if newest == seen:
            continue
        with contextlib.suppress(UserError):  # it is being written: next time
            read_anew(explorer, directory)
            seen = newest


def published(directory: Path) -> int:
    """When weights were last written there, in nanoseconds; 0: not yet."""
    with contextlib.suppress(OSError):
        return (directory / WEIGHTS).stat().st_mtime_ns
    return 0


def read_anew(explorer: Explorer, directory: Path) -> None:
    """The newest text of the page, with the newest weights. Raises: UserError: they can't be read now."""
    model = load(directory)
    with explorer.lock:
        before = explorer.get(None).subject
        assert before is not None  # an explorer's traces are live
        sampling = before.sampling
        settings = {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p")}
        explorer.model = model
        explorer.add(list(before.ids[: before.n_prompt]), settings | {"seed": sampling.seed}, lambda: False)
