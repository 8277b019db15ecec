"""What a disk, a clock, a signal or another process may do to a run: it stops with one line, and goes on to the bit."""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import leftward as lw
from leftward.errors import UserError
from leftward.training import checkpoint
from leftward.training.progress import Interrupted, Observer

COMMAND = [sys.executable, "-m", "leftward.cli.main"]


class At(Observer):
    """Does something once, behind a step."""

    def __init__(self, step, do):
        self._step, self._do = step, do

    def stepped(self, progress):
        if progress.step == self._step:
            self._do()


@pytest.fixture
def whole(recipe, tmp_path):
    """The run that nothing happened to."""
    return lw.train({**recipe, "out": str(tmp_path / "whole")})


def assert_the_same(run, whole):
    histories = [[{k: v for k, v in line.items() if k != "elapsed_s"} for line in r.history] for r in (run, whole)]
    assert histories[0] == histories[1]
    clocks = ("wall_s", "training_s")
    summaries = [{k: v for k, v in r.summary.items() if k not in clocks} for r in (run, whole)]
    assert summaries[0] == summaries[1]
    ours, theirs = (checkpoint.load_latest(r.directory) for r in (run, whole))
    for kind in (1, 2):
        assert all(torch.equal(ours[kind][name], theirs[kind][name]) for name in theirs[kind])
    assert (run.directory / "model.safetensors").read_bytes() == (whole.directory / "model.safetensors").read_bytes()


# ---- the disk


@pytest.fixture
def small_files():
    """A function from when the system refuses files of over some bytes, as a full disk would, until the test ends or
    it is called with None."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda n_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if n_bytes is None else n_bytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("step, limit, at", [(5, 20_000, 4), (1, 20_000, None), (9, 400, 8)])
def test_a_full_disk_keeps_what_was_saved_and_the_run_goes_on(recipe, whole, small_files, step, limit, at):
    # 20 kB are less than the weights; 400 bytes less than metrics.jsonl
    with pytest.raises(UserError, match="cannot write .*larger than allowed here; nothing saved earlier") as caught:
        lw.train(recipe, observer=At(step, lambda: small_files(limit)))
    small_files(None)
    assert "\n" not in str(caught.value)
    saved = checkpoint.load_latest(Path(recipe["out"]))
    assert (None if saved is None else saved[0].step) == at
    assert_the_same(lw.resume(recipe["out"]), whole)


@contextlib.contextmanager
def refusing(monkeypatch, number):
    """Nothing can be opened for writing, made or renamed, with this error."""
    real = os.open, Path.open, Path.mkdir

    def refuse(path, *arguments, **options):
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse)
        patched.setattr(Path, "touch", refuse)
        patched.setattr(Path, "replace", refuse)
        patched.setattr(
            Path, "open", lambda path, mode="r", *a, **k: (refuse if mode[0] in "aw" else real[1])(path, mode, *a, **k)
        )
        yield


@pytest.mark.parametrize("number, says", [(30, "the file system is read-only"), (13, "permission denied")])
def test_a_disk_that_became_read_only(recipe, whole, monkeypatch, number, says):
    with contextlib.ExitStack() as stack:
        with pytest.raises(UserError, match=f"cannot write .*{says}"):
            lw.train(recipe, observer=At(7, lambda: stack.enter_context(refusing(monkeypatch, number))))
    assert checkpoint.load_latest(Path(recipe["out"]))[0].step == 6
    assert_the_same(lw.resume(recipe["out"]), whole)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written(recipe, tmp_path):
    (tmp_path / "kept").mkdir(mode=0o500)
    with pytest.raises(UserError, match="permission denied"):
        lw.train({**recipe, "out": str(tmp_path / "kept" / "run")})


@pytest.mark.parametrize("tail", ['{"step": 6, "lo', "\x00" * 40, '{"step": 5}\n{"st', "[1, 2]\n3\n", "\n\n"])
def test_a_metrics_file_that_was_cut_short(recipe, whole, tail):
    with pytest.raises(Interrupted):
        lw.train(recipe, observer=At(5, lambda: os.kill(os.getpid(), signal.SIGINT)))
    with (Path(recipe["out"]) / "metrics.jsonl").open("a") as file:
        file.write(tail)
    assert_the_same(lw.resume(recipe["out"]), whole)


# ---- signals and processes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_within_a_step(recipe, whole, number):
    with pytest.raises(Interrupted):
        lw.train(recipe, observer=At(7, lambda: os.kill(os.getpid(), number)))
    assert checkpoint.load_latest(Path(recipe["out"]))[0].step == 7
    assert_the_same(lw.resume(recipe["out"]), whole)


def test_a_second_process_is_refused_and_disturbs_nothing(recipe, whole):
    def another():
        said = subprocess.run([*COMMAND, "train", "--resume", recipe["out"]], capture_output=True, text=True)
        answers.append((said.returncode, said.stderr))

    answers = []
    run = lw.train(recipe, observer=At(5, another))
    ((code, message),) = answers
    assert code == 2 and "is in use by another process: wait for it" in message
    assert_the_same(run, whole)


# ---- the clock


def test_a_clock_that_jumps_changes_nothing(recipe, whole, monkeypatch):
    # Years to and fro at each look. Durations are from clocks that only go forward.
    draw = random.Random(1)
    for name in ("time", "time_ns"):
        monkeypatch.setattr(time, name, lambda scale=1e9 if name == "time_ns" else 1: int(draw.uniform(0, 4e9) * scale))
    recipe["training"]["sample_prompts"] = ["The "]
    run = lw.train(recipe)
    assert_the_same(run, whole)
    seconds = [line["elapsed_s"] for line in run.history]
    assert seconds == sorted(seconds) and 0 <= seconds[-1] <= run.summary["training_s"] <= run.summary["wall_s"] < 1e6


def test_a_budget_of_minutes_does_not_listen_to_the_clock_on_the_wall(recipe, monkeypatch):
    recipe["training"] |= {"max_steps": None, "minutes": 0.02, "eval_interval": 0, "save_interval": None}
    jumps = iter(range(0, 10**12, 10**6))  # a clock that runs ahead would end this at its first step
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    assert lw.train(recipe).summary["steps"] > 1
