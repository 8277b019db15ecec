"""Our own CPU kernels (native.cpp, forward.cpp): those that a wheel brings, or else built once for a machine, where
there is a compiler. Without either, or where LEFTWARD_NATIVE=0 asks for it, everything runs on PyTorch's operations,
which every kernel has as its twin.

A kernel is a C function on addresses, called through ctypes: nothing of PyTorch's headers is compiled, so that building
takes some ten seconds, and nothing is linked against, so that one file serves every version.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leftward.kernels import compiling

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def serves(x: Tensor) -> bool:
    """Whether the kernels are in use, and take `x`."""
    return _library is not None and x.device.type == "cpu" and x.dtype in _TYPES and not torch.compiler.is_compiling()


@contextlib.contextmanager
def in_use() -> Iterator[str]:
    """Within it the kernels are in use, built first where that has not been done. Gives "native", or why they are not.

    They are for training: elsewhere a model's numbers are PyTorch's own.
    """
    global _library
    before = _library
    _library, how = _load()
    try:
        yield how
    finally:
        _library = before


def call(name: str, dtype: torch.dtype, *arguments: Tensor | int | float | None) -> None:
    """The kernel `name` for numbers of `dtype`. Tensors are passed by address and must be contiguous."""
    converted = [_as_c(argument) for argument in arguments]
    getattr(_library, f"leftward_{name}")(ctypes.c_int(_TYPES[dtype]), *converted)


def library() -> ctypes.CDLL:
    """The kernels of generation and of packed weights. Raises: OSError, with the reason why there are none."""
    loaded, how = _load()
    if loaded is None:
        raise OSError(how)
    return loaded


def available() -> bool:
    """Whether there are kernels; builds them, where that has not been done."""
    return _load()[0] is not None


_library: ctypes.CDLL | None = None


def _as_c(argument: Tensor | int | float | None) -> Any:
    if isinstance(argument, Tensor):
        assert argument.is_contiguous()
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p()
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


def keep_freed_memory() -> None:
    """Tell the C library not to give large blocks back to the system when they are freed: a training step takes the
    same ones again, and to get them filled with zeros page by page is a fifth of its time. Only glibc has that switch,
    and only for the whole process."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("LEFTWARD_NATIVE") == "0":
        return None, "plain: LEFTWARD_NATIVE=0"
    why = ""
    for find in (compiling.prebuilt, build):
        try:
            if (path := find()) is not None:
                return ctypes.CDLL(str(path)), "native"
        except (OSError, subprocess.SubprocessError) as error:
            why = str(error).strip().splitlines()[-1][:200]
    return None, f"plain: {why}"


def build() -> Path:
    """The compiled kernels, from the user's cache or made now. Raises: OSError, SubprocessError."""
    compiler = compiling.compiler()
    if compiler is None:
        raise OSError("no C++ compiler is found")
    sources = [(compiling.HERE / name).read_bytes() for name in (*compiling.SOURCES, *compiling.HEADERS)]
    # A home directory may be shared by machines of several kinds.
    machine = (sys.platform, compiling.processor(), torch.__version__)
    made_of = (sources, compiler, compiling.FLAGS, compiling.SOURCES, *machine)
    name = hashlib.blake2b(repr(made_of).encode(), digest_size=12).hexdigest()
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leftward"
    path = directory / f"native-{name}.so"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    if sys.stderr.isatty():  # somebody waits
        print("[compiling kernels for this machine, once: some ten seconds]", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        made = Path(temporary) / "native.so"
        compiling.compile_into(made, compiler, "-march=native")
        ctypes.CDLL(str(made))  # one that can't be loaded must not be kept
        made.replace(path)
    return path
