"""Our own CPU kernels (native.cpp, forward.cpp), built once for a machine where there is a compiler. Where there is
none, or LEFTWARD_NATIVE=0 asks for it, everything runs on PyTorch's own operations, which every kernel has as its twin.

A kernel is a C function on addresses, called through ctypes: nothing of PyTorch's headers is compiled, so that building
takes three seconds, and nothing is linked against, so that one file serves every version.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-mprefer-vector-width=512",
    "-fno-math-errno",
    "-fno-trapping-math",
)
# Each source with its own flags. In training sums may be taken in any order, so that they become vectors; but
# infinities and what is no number stay what they are. In generation the order is written out.
_SOURCES = {
    "native.cpp": ("-fassociative-math", "-fno-signed-zeros"),
    "forward.cpp": ("-ffp-contract=off", "-fno-tree-reassoc"),
}
_HEADERS = ("numbers.h",)
_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_SECONDS = 120  # for a compiler that hangs


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
    try:
        return ctypes.CDLL(str(build())), "native"
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"plain: {str(error).strip().splitlines()[-1][:200]}"


def build() -> Path:
    """The compiled kernels, from the user's cache or made now. Raises: OSError, SubprocessError."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        raise OSError("no C++ compiler is found")
    here = Path(__file__).parent
    sources = [(here / name).read_bytes() for name in (*_SOURCES, *_HEADERS)]
    made_of = (sources, compiler, _FLAGS, _SOURCES, sys.platform, _processor(), torch.__version__)
    name = hashlib.blake2b(repr(made_of).encode(), digest_size=12).hexdigest()
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leftward"
    path = directory / f"native-{name}.so"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        made = Path(temporary) / "native"
        objects = [str(Path(temporary) / f"{source}.o") for source in _SOURCES]
        compiled = [
            [compiler, *_FLAGS, *flags, "-fopenmp", "-c", str(here / source), "-o", made_object]
            for (source, flags), made_object in zip(_SOURCES.items(), objects, strict=True)
        ]
        # Linked without OpenMP's library: its functions are then found in the copy that PyTorch has loaded, and there
        # is one set of threads in the process instead of two that wait for each other's cores.
        commands = [*compiled, [compiler, "-shared", *objects, "-o", f"{made}.so"]]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
            if done.returncode:
                raise OSError(f"{compiler} failed: {done.stderr}")
        ctypes.CDLL(f"{made}.so")  # one that can't be loaded must not be kept
        Path(f"{made}.so").replace(path)
    return path


def _processor() -> str:
    """What -march=native means here: a home directory may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"
