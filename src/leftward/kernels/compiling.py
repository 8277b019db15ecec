"""The C++ of this directory, compiled: for the machine that asks (native.py), or for kinds of machines ahead of time,
which is what a wheel brings (hatch_build.py). Nothing of PyTorch is needed for it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-mprefer-vector-width=512",
    "-fno-math-errno",
    "-fno-trapping-math",
)
# Each source with its own flags. In training sums may be taken in any order, so that they become vectors; but
# infinities and what is no number stay what they are. In generation the order is written out.
SOURCES = {
    "native.cpp": ("-fassociative-math", "-fno-signed-zeros"),
    "forward.cpp": ("-ffp-contract=off", "-fno-tree-reassoc"),
}
HEADERS = ("numbers.h",)
PREBUILT = HERE / "prebuilt"
# Kinds of x86 processors, the most able first: the compiler's flags, and what Linux must say of the processor.
KINDS = {
    "x86-64-v4": (
        ("-march=x86-64-v4", "-mavx512vnni"),
        frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}),
    ),
    "x86-64-v3": (("-march=x86-64-v3",), frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})),
}
_SECONDS = 120  # for a compiler that hangs


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def compile_into(path: Path, compiler: str, *flags: str) -> None:
    """Raises: OSError, SubprocessError."""
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        objects = [str(Path(temporary) / f"{source}.o") for source in SOURCES]
        compiled = [
            [compiler, *FLAGS, *flags, *own, "-fopenmp", "-c", str(HERE / source), "-o", made]
            for (source, own), made in zip(SOURCES.items(), objects, strict=True)
        ]
        # Linked without OpenMP's library: its functions are then found in the copy that PyTorch has loaded, and there
        # is one set of threads in the process instead of two that wait for each other's cores.
        for command in (*compiled, [compiler, "-shared", *objects, "-o", str(path)]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
            if done.returncode:
                raise OSError(f"{compiler} failed: {done.stderr}")


def prebuilt() -> Path | None:
    """What came with the package for a processor like this one."""
    able = set(processor().split())
    fitting = (PREBUILT / f"{kind}.so" for kind, (_, needed) in KINDS.items() if needed <= able)
    return next((path for path in fitting if path.exists()), None)


def processor() -> str:
    """What the system says of it, and -march=native means here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"
