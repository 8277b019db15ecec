"""A page that follows a run: whenever there are newer weights, the text is read anew with them. While the run trains
those are the weights of this moment, for which it is asked (training/current.py); then the best ones."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from leftward.errors import UserError
from leftward.formats.kinds import Weights
from leftward.formats.model_directory import WEIGHTS
from leftward.inspection.server import SETTINGS, Explorer
from leftward.language_model import load
from leftward.training import current

_LOOKED_EVERY = 2.0  # seconds
_SHARE = 0.1  # of the time that may go into reading anew: the run needs the processor too
_KEPT = 2  # texts: the newest, and the one that a page still shows; each holds the weights that it was read with


def follow(explorer: Explorer, directory: Path, until: threading.Event, dtype: Weights = "stored") -> None:
    """Look for newer weights in a run's directory until the event comes. To be called in a thread of its own."""
    seen, pause = newest(directory), _LOOKED_EVERY
    current.ask(directory)
    while not until.wait(pause):
        found, began = newest(directory), time.monotonic()
        if found is not None and found != seen:
            with contextlib.suppress(UserError):  # it is being written: next time
                read_anew(explorer, directory, *found, dtype)
                seen = found
        pause = max(_LOOKED_EVERY, (time.monotonic() - began) / _SHARE)
        current.ask(directory)


def newest(run: Path) -> tuple[Path, int] | None:
    """The directory of the newest weights, and their step; or when they were written, where those are the best ones."""
    if (answer := current.newest(run)) is not None:
        return answer
    with contextlib.suppress(OSError):
        return run, (run / WEIGHTS).stat().st_mtime_ns
    return None


def read_anew(explorer: Explorer, run: Path, directory: Path, step: int, dtype: Weights = "stored") -> None:
    """The newest text of the page, with the weights in `directory`. Raises: UserError: they can't be read now."""
    model = load(directory, dtype=dtype)
    with explorer.lock:
        before = explorer.get(None).subject
        assert before is not None  # an explorer's traces are live
        sampling = before.sampling
        settings = {name: getattr(sampling, name) for name in SETTINGS}
        explorer.model = model
        explorer.name = run.name if directory == run else f"{run.name}, step {step:,}"
        explorer.add(list(before.ids[: before.n_prompt]), settings, lambda: False)
        while len(explorer.traces) > _KEPT:
            explorer.traces.popitem(last=False)
