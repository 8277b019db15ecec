"""Run directories as they are found: whole, half, damaged, in use; and what they say of themselves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import leftward as lw
from leftward.errors import UserError
from leftward.training import directory as directories
from leftward.training import history
from leftward.training.progress import Interrupted, Observer
from leftward.training.recipe import Recipe


class Press(Observer):
    def stepped(self, progress):
        if progress.step == 6:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def run(recipe):
    return lw.train(recipe, observer=Observer())


def test_a_finished_run_is_its_summary(run):
    entry, summary = history.entry(run.directory), run.summary
    assert (entry.state, entry.problem) == ("finished", None)
    assert (entry.parameters, entry.steps, entry.tokens) == (summary["params"], 12, summary["tokens"])
    assert (entry.val_loss, entry.bits_per_byte) == (summary["val_loss"], summary["val_bits_per_byte"])
    assert entry.minutes == summary["training_s"] / 60 and entry.seed == 1 and not entry.stopped_early


def test_an_interrupted_run_is_what_its_lines_say(recipe):
    with pytest.raises(Interrupted):
        lw.train(recipe, observer=Press())
    entry = history.entry(Path(recipe["out"]))
    assert (entry.state, entry.problem, entry.steps) == ("interrupted", None, 6)
    with open(f"{recipe['out']}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    assert entry.val_loss == next(line["val_loss"] for line in lines if "val_loss" in line)
    assert entry.parameters == lw.load(recipe["out"]).decoder.n_parameters and entry.tokens == 6 * 8 * 32


def test_a_run_in_use_is_running_and_looking_does_not_disturb_it(recipe):
    seen = []

    class Look(Observer):
        def stepped(self, progress):
            script = (
                "from pathlib import Path; from leftward.training import history; "
                f"print(history.entry(Path({recipe['out']!r})).state)"
            )
            if progress.step == 2:
                seen.append(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout)

    lw.train(recipe, observer=Look())
    assert seen == ["running\n"] and history.entry(Path(recipe["out"])).state == "finished"


def test_a_run_that_was_killed_is_not_running(recipe):
    script = (
        "import json, sys, time\nimport leftward as lw\n"
        "class Wait(lw.Observer):\n    def stepped(self, progress):\n        time.sleep(0.2)\n"
        "lw.train(json.loads(sys.argv[1]), observer=Wait())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, json.dumps(recipe)])
    metrics = Path(recipe["out"]) / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and metrics.stat().st_size:
            break
        time.sleep(0.1)
    assert history.entry(Path(recipe["out"])).state == "running"
    process.kill()
    process.wait()
    assert history.entry(Path(recipe["out"])).state == "interrupted"


def test_before_the_first_step(recipe):
    with directories.new(Recipe.from_dict(recipe)) as path:
        pass
    entry = history.entry(path)
    assert (entry.state, entry.problem, entry.val_loss) == ("interrupted", "before its first step", None)


DAMAGE = {
    "recipe.yaml": ["", "model: [", "data: {path: x}\n", "data: {path: x}\nnew_field: 3\n...\n", "\xff"],
    "summary.json": ["", "{", "[]", "3", "{}", '{"params": 3, "val_loss": null}'],
    "metrics.jsonl": [
        '{"step": 3}\n',
        '{"step": 1, "tokens": 2, "elapsed_s": "x"}\n',
        '{"step": 1, "tokens": 2, "elapsed_s": 3, "val_loss": "x"}\n',
    ],
    "tokens/dataset.json": ["", "{}", "[]", '{"vocab_size": "x"}', '{"vocab_size": -3}'],
}


@pytest.mark.parametrize("name, content", [(name, content) for name, all in DAMAGE.items() for content in all])
def test_what_is_damaged_is_named_and_the_rest_is_shown(run, name, content):
    (run.directory / name).write_text(content, encoding="latin-1")
    entry = history.entry(run.directory)
    assert entry.state == "damaged"
    named = {"recipe.yaml": "recipe", "tokens/dataset.json": "dataset.json|vocab_size"}.get(name, name)
    assert re.search(named, entry.problem), entry.problem
    assert "\n" not in entry.problem
    if name != "summary.json":
        assert entry.val_loss == run.summary["val_loss"]
    assert history.differences([run.directory]) == {}
    list(history.curve(run.directory, "tokens"))


def test_a_line_that_a_kill_cut_short_is_passed_over(run):
    path, lines = run.directory / "metrics.jsonl", run.history
    path.write_text(path.read_text() + '{"step": 13, "lo')
    assert history.entry(run.directory).state == "finished"
    assert list(history.metrics(run.directory)) == lines


def test_runs_are_found_at_any_depth_and_nothing_else(tmp_path, recipe):
    for name in ("a", "sweep/lr=1", "sweep/lr=2"):
        lw.train({**recipe, "out": str(tmp_path / "runs" / name)}, observer=Observer())
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "notes" / "a.txt").write_text("x")
    (tmp_path / "runs" / "half").mkdir()
    (tmp_path / "runs" / "half" / "metrics.jsonl").write_text("")
    found = history.find([tmp_path / "runs", tmp_path / "runs" / "a"])
    assert [str(path.relative_to(tmp_path / "runs")) for path in found] == ["a", "half", "sweep/lr=1", "sweep/lr=2"]
    assert "is not a run directory" in history.entry(tmp_path / "runs" / "half").problem
    with pytest.raises(UserError, match="none is not a directory"):
        history.find([tmp_path / "none"])


def test_curves_and_differences(recipe, tmp_path):
    a = lw.train(recipe, observer=Observer()).directory
    other = {**recipe, "out": str(tmp_path / "other"), "seed": 2, "logging": {"project": "x"}}
    b = lw.train(other, "optimizer.lr=0.01", "model.n_layers=1", observer=Observer()).directory
    lines = [line for line in lw.Run(a).history if "val_loss" in line]
    assert history.curve(a, "tokens") == [(line["tokens"], line["val_bits_per_byte"]) for line in lines]
    assert [x for x, _ in history.curve(a, "steps", "train")] == list(range(1, 13))
    assert history.curve(a, "minutes")[-1][0] == pytest.approx(lines[-1]["elapsed_s"] / 60)
    assert history.differences([a, b]) == {
        "seed": {a: 1, b: 2},
        "model.n_layers": {a: 2, b: 1},
        "optimizer.lr": {a: 0.02, b: 0.01},
    }


@pytest.mark.parametrize("suffix, magic", [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_picture_is_drawn(run, tmp_path, suffix, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"curves{suffix}"
    history.draw([("a run", run.directory)], path, "tokens")
    assert path.read_bytes().startswith(magic) and not list(tmp_path.glob("*.tmp"))


def test_what_cannot_be_drawn_is_said(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="is no picture: give a name that ends in .png, .svg, .pdf"):
        history.draw([("a", run.directory)], tmp_path / "curves.txt", "tokens")
    with pytest.raises(UserError, match="cannot write .*none"):
        history.draw([("a", run.directory)], tmp_path / "none" / "curves.png", "tokens")
    with pytest.raises(UserError, match="there is no curve to draw"):
        history.draw([("a", tmp_path)], tmp_path / "curves.png", "tokens")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="needs matplotlib: pip install matplotlib .leftward's extra `plot`."):
        history.draw([("a", run.directory)], tmp_path / "curves.png", "tokens")
