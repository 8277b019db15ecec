"""Which of a wheel's kernels a processor gets. That they are in a wheel, and run without a compiler, is .ci/run's to
show."""

from __future__ import annotations

from pathlib import Path

import pytest

from leftward.kernels import compiling, native

# What Linux says of a Zen 3, an Ice Lake and an early Xeon without AVX2, cut to the flags that matter.
ZEN3 = "flags : fpu sse2 ssse3 fma movbe f16c avx avx2 bmi1 bmi2"
ICE_LAKE = f"{ZEN3} avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"
SKYLAKE_X = ICE_LAKE.replace(" avx512_vnni", "")
IVY_BRIDGE = "flags : fpu sse2 ssse3 f16c avx"


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a wheel brings."""
    for kind in compiling.KINDS:
        (tmp_path / f"{kind}.so").touch()
    monkeypatch.setattr(compiling, "PREBUILT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "kind"),
    [(ZEN3, "x86-64-v3"), (ICE_LAKE, "x86-64-v4"), (SKYLAKE_X, "x86-64-v3"), (IVY_BRIDGE, None), ("aarch64 ", None)],
)
def test_a_processor_gets_what_it_can_run(
    brought: Path, monkeypatch: pytest.MonkeyPatch, flags: str, kind: str | None
) -> None:
    monkeypatch.setattr(compiling, "processor", lambda: flags)
    found = compiling.prebuilt()
    assert (None if found is None else found.stem) == kind


def test_a_damaged_one_is_not_used(brought: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "processor", lambda: ZEN3)
    monkeypatch.setattr(compiling, "compiler", lambda: None)
    library, why = native._load.__wrapped__()
    assert library is None and why.startswith("plain: ")


def test_there_are_none_where_none_came(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiling, "PREBUILT", tmp_path)
    monkeypatch.setattr(compiling, "compiler", lambda: None)
    assert native._load.__wrapped__() == (None, "plain: no C++ compiler is found")
