"""SIGKILL at any moment, again and again: the run that was killed fifty times is, to the bit, the one that never was.

A process needs seconds to import torch, so one that has it (this file, run as a script) forks the processes that train.
Two of three kill themselves a random number of calls after they came to a kind of moment, each kind in turn, however
short it is and however slow the machine; the others are killed from outside after a random time, in the middle of
whatever they do. Some whole processes, as a user starts them, are killed too. (test_resume.py kills at chosen lines.)
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

KILLS = 52
MOST_STEPS = 5  # in a life
MOST_CALLS = 2000  # in a moment
MOMENTS = {
    "P": "preparing the data",
    "L": "loading",
    "S": "a step",
    "E": "an evaluation",
    "C": "a checkpoint",
    "R": "the removal of an old checkpoint",
    "W": "the publication of the best weights",
    "M": "a line of metrics.jsonl",
}
CLOCKS = ("elapsed_s", "wall_s", "training_s", "elapsed", "evaluated_at")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks a process that has loaded torch")


def without_clocks(values):
    return {name: value for name, value in values.items() if name not in CLOCKS}


def contents(run):
    """All that a run is, but for its clocks."""
    found = {"summary": without_clocks(json.loads((run / "summary.json").read_text()))}
    found["metrics"] = [without_clocks(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for path in sorted(run.rglob("*.safetensors")):
        found[str(path.relative_to(run))] = path.read_bytes()
    for path in run.glob("checkpoints/*/state.json"):
        found[str(path.relative_to(run))] = without_clocks(json.loads(path.read_text()))
    return found


def assert_the_same(run, whole):
    ours, theirs = contents(run), contents(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if ours[name] != theirs[name]] == []
    assert not list(run.rglob("*.tmp"))


@pytest.fixture
def long(recipe):
    """A recipe with everything that has a state of its own: dropout, accumulation, epochs, spikes, kept checkpoints."""
    recipe["model"] |= {"dropout": 0.1, "n_layers": 1}
    recipe["training"] |= {"max_steps": 100, "micro_batch_size": 4, "log_interval": 3, "eval_interval": 4}
    recipe["training"] |= {"save_interval": 2, "keep": 2, "keep_every": 40, "skip_spikes": 6.0}
    return recipe


def test_a_run_killed_fifty_times_is_the_one_that_never_was(long, tmp_path):
    long["out"] = str(tmp_path / "killed")
    done = subprocess.run([sys.executable, __file__, json.dumps(long), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert sum(found["kills"].values()) >= 50 and set(found["kills"]) >= set(MOMENTS), found
    assert found["by_clock"] > 5, found


def test_whole_processes_that_are_killed(long, tmp_path):
    import leftward as lw

    draw, run = random.Random(3), Path(long["out"])
    long["training"] |= {"max_steps": 60, "skip_spikes": None}
    whole = lw.train({**long, "out": str(tmp_path / "whole")})
    (tmp_path / "recipe.yaml").write_text(json.dumps(long))  # which is YAML
    for life in range(3):
        how = ["--resume", str(run)] if life else [str(tmp_path / "recipe.yaml")]
        process = subprocess.Popen(
            [sys.executable, "-m", "leftward.cli.main", "train", *how], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        metrics = run / "metrics.jsonl"
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_mtime_ns > before):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        process.kill()
        output = process.communicate()[0]
        assert process.returncode in (-signal.SIGKILL, 0), output.decode()  # 0: it was faster
    assert_the_same(lw.resume(run).directory, whole.directory)


# ---- the process that forks and kills


class Life:
    """A forked process that trains, and says over a pipe which moment it is in: a letter whenever that changes.

    Args:
        ends_in: the kind of moment in which it kills itself when it comes to it the nth time.
        calls: after so many, or with the moment's end.
    """

    def __init__(self, recipe, log, ends_in=None, nth=1, calls=1):
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                follow(writing, ends_in, nth, calls)
                train(recipe)
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        self._pipe = os.fdopen(reading, "rb")

    def end(self, killed_after=None):
        """The moment in which it died; None where it came to its own end."""
        if killed_after is not None:
            time.sleep(killed_after)
            os.kill(self.pid, signal.SIGKILL)
        moments = self._pipe.read().decode()  # until nobody can write any more
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._pipe.close()
        assert code in (0, -signal.SIGKILL), f"it ended with {code}"
        return None if code == 0 else moments[-1:] or "L"


def follow(pipe, ends_in, nth, calls):
    """Let this process say where it is, and die where it is to."""
    from leftward import files
    from leftward.training import checkpoint, loop

    within, came, left = [], Counter(), calls

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def count(frame, event, argument):
        nonlocal left
        left -= event in ("call", "c_call")
        if left <= 0:
            die()

    def enter(moment):
        within.append(moment)
        os.write(pipe, moment.encode())
        came[moment] += 1
        if ends_in and came["S"] > MOST_STEPS:
            die()
        if moment == ends_in and came[moment] == nth:
            sys.setprofile(count)

    def leave(moment):
        if moment == ends_in and came[moment] == nth:
            die()
        within.pop()
        os.write(pipe, (within or ["-"])[-1].encode())

    def during(moment, owner, name):
        real = getattr(owner, name)

        def wrapped(*arguments, **options):
            if moment == "S" and within == ["L"]:  # loading ends with the first step
                leave("L")
            enter(moment)
            try:
                return real(*arguments, **options)
            finally:
                leave(moment)

        setattr(owner, name, wrapped)

    enter("L")
    during("P", loop, "prepare")
    during("S", loop._Training, "_step")
    during("E", loop._Training, "_evaluate")
    during("C", checkpoint, "save")
    during("R", files, "remove_directory")
    during("W", loop, "save_weights")
    during("M", loop._Lines, "write")


def train(recipe):
    import leftward as lw

    if (Path(recipe["out"]) / "recipe.yaml").exists():
        lw.resume(recipe["out"])
    else:  # what is there was killed before it was a run
        shutil.rmtree(recipe["out"], ignore_errors=True)
        lw.train(recipe)


def check_what_a_kill_left(run, least):
    """Every checkpoint under its final name is whole, the newest is not older than `least`, and so is the model.

    Returns:
        The newest one's step.
    """
    from leftward.formats.tensors import read_tensors
    from leftward.training import checkpoint

    names = [path for path in run.glob("checkpoints/*") if re.fullmatch(r"step-\d+", path.name)]
    for path in [*(name / f"{part}.safetensors" for name in names for part in ("model", "optimizer"))]:
        read_tensors(path)
    newest = checkpoint.load_latest(run)
    step = -1 if newest is None else newest[0].step
    assert step >= least, f"the newest checkpoint was that of step {least} and is that of {step}"
    if newest is not None:
        read_tensors(run / "model.safetensors")
        json.loads((run / "config.json").read_text())
    return step


def main(recipe, directory):
    import leftward.runs  # noqa: F401 - so that those that are forked have it, and torch

    draw, log, whole = random.Random(5), directory / "log", directory / "whole"
    began = time.perf_counter()
    assert Life({**recipe, "out": str(whole)}, log).end() is None
    a_step = (time.perf_counter() - began) / recipe["training"]["max_steps"]
    kills, number, step, by_clock = Counter(), 0, -1, 0
    run = directory / "killed"
    while kills.total() < KILLS or not set(kills) >= set(MOMENTS):
        recipe["out"] = str(run)
        if kills.total() % 3 == 2:
            moment = Life(recipe, log).end(draw.uniform(0, 3 * MOST_STEPS * a_step))
            by_clock += moment is not None
        else:
            possible = [m for m in MOMENTS if m != "P" or not (run / "tokens").exists()]
            aim = min(possible, key=lambda m: (kills[m], m != "P", draw.random()))
            calls = round(MOST_CALLS ** draw.random())
            moment = Life(recipe, log, aim, draw.randint(1, 3) if aim in "SM" else 1, calls).end()
        if moment is None:  # it was too fast: another one takes the other kills
            assert_the_same(run, whole)
            number, step = number + 1, -1
            run = directory / f"killed-{number}"
            continue
        kills[moment] += 1
        step = check_what_a_kill_left(run, step)
    assert Life(recipe, log).end() is None
    assert_the_same(run, whole)
    print(json.dumps({"kills": kills, "by_clock": by_clock, "runs": number + 1}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
