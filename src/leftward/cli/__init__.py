"""The command line: one file a verb. Parses, calls, prints; no logic of its own, and no torch before it is needed."""

import time
from pathlib import Path

from leftward.errors import UserError

STARTED = time.perf_counter()
"""When the command began: before the imports that take time, so that a run's wall_s counts them."""

INTERRUPTED = 130
"""The exit code that a shell expects after Ctrl-C."""


def read_text(path: Path) -> str:
    """A file of the user's. Raises: UserError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
