"""What happens between steps: an early end, samples, epochs; none of it changes the training."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import leftward as lw
from leftward.errors import UserError
from leftward.training import checkpoint, loop
from leftward.training.progress import Interrupted, Observer


def comparable(run):
    return [{k: v for k, v in line.items() if k != "elapsed_s"} for line in run.history]


def weights(directory):
    return checkpoint.load_latest(Path(directory))[1]


def samples(directory):
    return [json.loads(line) for line in (Path(directory) / "samples.jsonl").read_text().splitlines()]


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations that give the losses of a list, one after the other."""

    def script(losses):
        values, real = iter(losses), loop.evaluate

        def fake(*arguments):
            evaluation = real(*arguments)
            return type(evaluation)(next(values) * evaluation.tokens, evaluation.tokens, evaluation.bytes)

        monkeypatch.setattr(loop, "evaluate", fake)

    return script


# ---- early stop


def test_patience_ends_a_run_after_so_many_evaluations_without_a_better_one(recipe, scripted):
    scripted([3.0, 2.0, 2.5, 2.1, 1.0])
    recipe["training"] |= {"max_steps": 40, "patience": 2}
    summary = lw.train(recipe).summary
    assert summary["steps"] == 16 and summary["stopped_early"] is True
    assert summary["best_step"] == 8 and summary["val_loss"] == 2.0 and summary["final_val_loss"] == 2.1


def test_a_better_one_gives_new_patience(recipe, scripted):
    scripted([3.0, 3.1, 2.9, 3.0, 2.8, 2.9, 2.7])
    recipe["training"] |= {"max_steps": 28, "patience": 2}
    summary = lw.train(recipe).summary
    assert summary["steps"] == 28 and summary["stopped_early"] is False


def test_patience_is_remembered_through_a_resume(recipe, scripted):
    class Press(Observer):
        def stepped(self, progress):
            if progress.step == 13:
                os.kill(os.getpid(), signal.SIGINT)

    scripted([2.0, 2.5, 2.5, 2.5, 1.0])
    recipe["training"] |= {"max_steps": 40, "patience": 3}
    with pytest.raises(Interrupted):
        lw.train(recipe, observer=Press())
    summary = lw.resume(recipe["out"]).summary
    assert summary["steps"] == 16 and summary["stopped_early"] is True


def test_a_checkpoint_from_before_there_was_patience_is_read(recipe):
    class Press(Observer):
        def stepped(self, progress):
            if progress.step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        lw.train(recipe, observer=Press())
    (path,) = Path(recipe["out"]).glob("checkpoints/*/state.json")
    state = json.loads(path.read_text())
    del state["stale"]
    path.write_text(json.dumps(state))
    assert lw.resume(recipe["out"]).summary["steps"] == 12


def test_patience_needs_evaluations(recipe):
    recipe["training"] |= {"patience": 1, "eval_interval": 0}
    with pytest.raises(UserError, match=r"training\.patience counts evaluations"):
        lw.train(recipe)


# ---- samples


def test_samples_are_written_after_each_evaluation_and_change_nothing(recipe, tmp_path):
    recipe["model"]["dropout"] = 0.1
    plain = lw.train({**recipe, "out": str(tmp_path / "plain")})
    seen = []

    class Listener(Observer):
        def sampled(self, step, prompt, text):
            seen.append((step, prompt, text))

    recipe["training"]["sample_prompts"] = ["The ", ""]
    run = lw.train(recipe, observer=Listener())
    assert comparable(run) == comparable(plain)
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights(run.directory).values(), weights(plain.directory).values(), strict=True)
    )
    lines = samples(run.directory)
    assert [(line["step"], line["prompt"]) for line in lines] == [(s, p) for s in (4, 8, 12) for p in ("The ", "")]
    assert seen == [(line["step"], line["prompt"], line["text"]) for line in lines]
    assert not (plain.directory / "samples.jsonl").exists()
    # The last is what the model says that was saved there.
    if run.summary["best_step"] == 12:
        assert lines[-2]["text"] == run.model.generate("The ", max_tokens=60, seed=1)


def test_samples_are_not_doubled_by_a_kill(recipe, tmp_path):
    script = (
        "import json, os, signal, sys\nimport leftward as lw\nfrom leftward.training import loop\n"
        "real, n = loop._Lines.write, [0]\n"
        "def write(self, **values):\n"
        "    real(self, **values)\n"
        "    n[0] += 'prompt' in values\n"
        "    if n[0] == 2: os.kill(os.getpid(), signal.SIGKILL)\n"  # before the state knows of the evaluation
        "loop._Lines.write = write\n"
        "lw.train(json.loads(sys.argv[1]))\n"
    )
    recipe["training"]["sample_prompts"] = ["The "]
    whole = lw.train({**recipe, "out": str(tmp_path / "whole")})
    killed = subprocess.run([sys.executable, "-c", script, json.dumps(recipe)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(samples(recipe["out"])) == 2
    resumed = lw.resume(recipe["out"])
    assert comparable(resumed) == comparable(whole) and samples(recipe["out"]) == samples(whole.directory)


@pytest.mark.parametrize(
    "prompt, expected", [("☃", "☃"), ("The " * 50, "has .* tokens; .* fewer than the context of 32")]
)
def test_a_prompt_that_cannot_be_is_said_before_training(recipe, prompt, expected):
    recipe["training"]["sample_prompts"] = [prompt]
    with pytest.raises(UserError, match=f"training.sample_prompts: .*{expected}"):
        lw.train(recipe)
    assert not os.path.exists(recipe["out"])


# ---- epochs


def test_max_epochs_ends_a_run(recipe):
    notes = []
    observer = Observer()
    observer.note = notes.append
    recipe["training"] |= {"max_steps": 1000, "max_epochs": 0.5}
    run = lw.train(recipe, observer=observer)
    tokens = next(int(note.split()[1].replace(",", "")) for note in notes if note.startswith("data: "))
    assert run.summary["steps"] == round(0.5 * (tokens // 32 - 1) / 8) and run.summary["stopped_early"] is False
    assert any("where max_epochs ends it; max_steps is 1,000" in note for note in notes)
    assert run.history[-2]["lr_fraction"] < 0.1  # the schedule knew where it ends


def test_max_epochs_alone_is_an_end_and_minutes_are_another(recipe):
    recipe["training"] |= {"max_steps": None, "max_epochs": 0.2, "eval_interval": None}
    run = lw.train(recipe)
    assert 0 < run.summary["steps"] < 20 and len([line for line in run.history if "val_loss" in line]) > 3
    with pytest.raises(UserError, match=r"training\.max_epochs and training\.minutes both say when to end"):
        lw.train({**recipe, "out": None}, "training.minutes=1")
