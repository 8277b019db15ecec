"""A page that follows a run: whenever training publishes better weights, the text is read anew with them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from leftward.errors import UserError
from leftward.formats.kinds import Weights
from leftward.inspection.server import SETTINGS, Explorer
from leftward.language_model import load

WEIGHTS = "model.safetensors"
_LOOKED_EVERY = 2.0  # seconds
_KEPT = 2  # texts: the newest, and the one that a page still shows; each holds the weights that it was read with


def follow(explorer: Explorer, directory: Path, until: threading.Event, dtype: Weights = "stored") -> None:
    """Look for newer weights in a run's directory until the event comes. To be called in a thread of its own."""
    seen = published(directory)
    while not until.wait(_LOOKED_EVERY):
        newest = published(directory)
        if newest == seen:
            continue
        with contextlib.suppress(UserError):  # it is being written: next time
            read_anew(explorer, directory, dtype)
            seen = newest


def published(directory: Path) -> int:
    """When weights were last written there, in nanoseconds; 0: not yet."""
    with contextlib.suppress(OSError):
        return (directory / WEIGHTS).stat().st_mtime_ns
    return 0


def read_anew(explorer: Explorer, directory: Path, dtype: Weights = "stored") -> None:
    """The newest text of the page, with the newest weights. Raises: UserError: they can't be read now."""
    model = load(directory, dtype=dtype)
    with explorer.lock:
        before = explorer.get(None).subject
        assert before is not None  # an explorer's traces are live
        sampling = before.sampling
        settings = {name: getattr(sampling, name) for name in SETTINGS}
        explorer.model = model
        explorer.add(list(before.ids[: before.n_prompt]), settings, lambda: False)
        while len(explorer.traces) > _KEPT:
            explorer.traces.popitem(last=False)
