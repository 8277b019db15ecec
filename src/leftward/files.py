"""Writing files so that a kill, a full disk or a power cut never leaves half of one under its final name.

Every write goes to a temporary name beside the target, is flushed to the disk, and is renamed over the target, which
POSIX makes atomic. What a crash leaves behind ends in `.tmp` and is swept by the next writer (`sweep`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from leftward.errors import UserError

TEMPORARY = ".tmp"
LOCK = ".lock"

_DISK_FAULTS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than allowed here",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EEXIST: "something that is no directory is in its place",
    errno.ENOENT: "there is no such directory",
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.ENAMETOOLONG: "the name is too long",
}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal to write `path` into one line for the user."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FAULTS:
            raise
        reason = _DISK_FAULTS[error.errno]
        raise UserError(f"cannot write {path}: {reason}; nothing saved earlier was touched") from error


def write_atomic(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write a temporary file, then put it in the place of `path`. On failure `path` is as it was."""
    temporary = path.with_name(path.name + TEMPORARY)
    with writing(path):
        try:
            fill(temporary)
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def directory_atomic(path: Path) -> Iterator[Path]:
    """Give a temporary directory to fill; it becomes `path`, whole, when the block ends, and vanishes if it fails."""
    temporary = path.with_name(path.name + TEMPORARY)
    with writing(path):
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for file in temporary.iterdir():
                _sync(file)
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def remove_directory(path: Path) -> None:
    """Remove a directory so that a kill leaves it whole or leaves none of its name. What a disk refuses to remove stays
    under a temporary name, or its own."""
    temporary = path.with_name(path.name + TEMPORARY)
    with contextlib.suppress(OSError):
        path.replace(temporary)
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: _write(temporary, text))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_text(path: Path) -> str:
    """What `path` holds. Raises: UserError, where it can't be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def read_json(path: Path) -> Any:
    """Parse `path`; a missing or damaged file is an error that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged (not JSON: {error})") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def sweep(directory: Path) -> None:
    """Remove what an earlier crash left half-written in `directory`."""
    for leftover in directory.glob(f"*{TEMPORARY}"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Hold the directory's lock, if nobody else does (False); the system frees it when the process ends, however it
    ends. The directory is made where it is absent.

    Where a system or a file system has no locks, it is for the user not to start a command twice.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield _take_lock(descriptor, exclusive=True)
    finally:
        os.close(descriptor)


def is_locked(directory: Path) -> bool:
    """Whether a process holds the directory's lock, as far as this system can tell."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _take_lock(descriptor, exclusive=False)
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Whether the lock could be had; True too where there are none."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def _sync(path: Path) -> None:
    if os.name == "nt":  # which cannot flush a directory, nor a file that is open for reading
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
