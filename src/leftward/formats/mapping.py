"""Files mapped into memory: tensors that are read when they are used, and a part of one without the rest."""

from __future__ import annotations

import mmap
from pathlib import Path

from leftward.errors import UserError


def map_file(path: Path, least: int = 1) -> mmap.mmap:
    """All bytes of `path`, of which there must be `least`. Private and writable: a tensor that is changed in place
    changes its own memory, not the file.

    Raises: UserError, where there is no such file, it is too short, or the system refuses.
    """
    if not path.is_file():
        raise UserError(f"{path} {'is no file' if path.exists() else 'does not exist'}")
    try:
        if (size := path.stat().st_size) < least:
            raise UserError(f"{path} is damaged: expected at least {least} bytes, found {size}")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
