"""What a user can do wrong, said in one line. Not for bugs: those stay assertions and tracebacks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can mend: the message names the value and the way out. The CLI exits with 2."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """The hint for an unknown `name`: the most similar valid names, or all of them when none is similar."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"valid: {', '.join(valid)}"


def missing_extra(library: str, extra: str, purpose: str) -> UserError:
    """The error for an optional dependency that is not installed."""
    return UserError(f"{purpose} needs {library}: pip install {library} (leftward's extra `{extra}`)")


def printable(text: str, longest: int = 100) -> str:
    """Text that comes out of a file, for a message: one line of bounded length, and no character steers a terminal."""
    shown = text[:longest] + ("…" if len(text) > longest else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
