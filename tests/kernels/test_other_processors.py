"""The kernels' other ways, for processors that the tests' machine may not be: each is compiled in the place of its own,
and must pass the tests that its own passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leftward.kernels import compiling

HERE = Path(__file__).parent
EMULATED = HERE / "emulated_avx512.h"
TESTS = [HERE / "test_packed.py", HERE.parent / "generation" / "test_program.py"]
# Their processors, the flags of the compiler that say so, and what is put before forward.cpp.
WAYS = {
    "AVX-512 with VNNI, emulated": ("-march=x86-64-v3", f"-Wno-psabi -include '{EMULATED}'"),
    "no vectors beyond SSE2": ("-march=x86-64", ""),
}

pytestmark = pytest.mark.skipif(
    compiling.compiler() is None or "avx2" not in compiling.processor().split(),
    reason="needs a C++ compiler, and an x86 processor with AVX2",
)


@pytest.mark.parametrize("way", WAYS)
def test_they_compute_the_same(way: str, tmp_path: Path) -> None:
    flags, before = WAYS[way]
    compiler = tmp_path / "c++"
    compiler.write_text(
        f"""#!/bin/sh
case " $* " in *forward.cpp*) before="{before}";; esac
for each in "$@"; do
    shift
    [ "$each" = -march=native ] && each={flags}
    set -- "$@" "$each"
done
eval exec {compiling.compiler()} $before '"$@"' -O1
"""
    )
    compiler.chmod(0o755)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PYTEST")},
        "CXX": str(compiler),
        "XDG_CACHE_HOME": str(tmp_path),
        "OMP_NUM_THREADS": "2",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "not many_keys", *TESTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " skipped" not in done.stdout and list(tmp_path.glob("leftward/native-*.so"))
