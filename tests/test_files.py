"""Atomic writes: the old file or the new one, never a half."""

import errno
import os

import pytest

from leftward import files
from leftward.errors import UserError


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "summary.json"
    files.write_json(target, {"a": 1})

    def half(temporary):
        temporary.write_text('{"a": ')
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="the disk is full"):
        files.write_atomic(target, half)
    assert files.read_json(target) == {"a": 1}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_directory_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), files.directory_atomic(tmp_path / "made") as directory:
        (directory / "one").write_text("1")
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    with files.directory_atomic(tmp_path / "made") as directory:
        (directory / "one").write_text("1")
    assert (tmp_path / "made" / "one").read_text() == "1"


def test_sweep_removes_what_a_kill_left(tmp_path):
    (tmp_path / "model.safetensors.tmp").write_text("half")
    (tmp_path / "step-1.tmp").mkdir()
    (tmp_path / "step-1.tmp" / "x").write_text("half")
    (tmp_path / "kept").write_text("whole")
    files.sweep(tmp_path)
    assert os.listdir(tmp_path) == ["kept"]


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_json_file_is_one_line(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        files.read_json(path)


def test_a_real_full_disk_is_one_line():
    # /dev/full answers every write with ENOSPC.
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    with pytest.raises(UserError, match="the disk is full"), files.writing("/dev/full"), open("/dev/full", "w") as file:
        file.write("x")
        file.flush()
