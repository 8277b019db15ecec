"""A command with its output on a terminal, as a person would see it."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Sequence


def shown_on_a_terminal(command: Sequence[str], columns: int = 80) -> tuple[str, int]:
    """What `command` writes to a terminal of that width, and its exit code."""
    leader, follower = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "24"}
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env=variables)
    os.close(follower)
    output = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        output += part
    return output.decode(), process.wait()
