"""Resume = never stopped: real SIGKILLs in the middle of steps and saves, then bit-identical weights and losses."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import leftward as lw
from leftward.data.batches import Dataset
from leftward.errors import UserError
from leftward.training import checkpoint
from leftward.training.loss import evaluate

# Runs a recipe in a process of its own that kills itself at the given moment.
KILLER = """
import json, os, signal, sys
from pathlib import Path
import leftward as lw
from leftward.training import checkpoint, loop, optim

recipe, moment = json.loads(sys.argv[1]), sys.argv[2]
def die(): os.kill(os.getpid(), signal.SIGKILL)

calls = {"n": 0}
def kill_in(owner, name, nth, half=None):
    real = getattr(owner, name)
    def wrapped(*args, **kwargs):
        calls["n"] += 1
        if calls["n"] == nth:
            if half: half(*args)
            die()
        return real(*args, **kwargs)
    setattr(owner, name, wrapped)

def half_a_file(path, tensors):
    Path(path).with_name(Path(path).name + ".tmp").write_bytes(b"\\x10\\x00\\x00\\x00\\x00\\x00\\x00\\x00{half")

{
    "step": lambda: kill_in(optim.Optimizer, "step", 6),
    "first step": lambda: kill_in(optim.Optimizer, "step", 1),
    "backward": lambda: kill_in(optim.Optimizer, "accumulate", 11),
    "save, weights": lambda: kill_in(checkpoint, "write_tensors", 5, half_a_file),
    "save, optimizer": lambda: kill_in(checkpoint, "write_tensors", 6, half_a_file),
    "evaluation": lambda: kill_in(loop, "evaluate", 2),
    "best weights": lambda: kill_in(loop, "save_weights", 4),
    "after an evaluation": lambda: kill_in(checkpoint.files, "write_json", 11),
    "rotation": lambda: kill_in(checkpoint.files.shutil, "rmtree", 2),
    "metrics": lambda: kill_in(loop._Lines, "write", 7),
    "evaluated, not saved": lambda: kill_in(loop._Training, "_save", 4),
    "summary": lambda: kill_in(loop._Training, "summary", 1),
}[moment]()
lw.train(recipe)
"""

MOMENTS = [
    "step",
    "first step",
    "backward",
    "save, weights",
    "save, optimizer",
    "evaluation",
    "best weights",
    "after an evaluation",
    "rotation",
    "metrics",
    "summary",
]


def comparable(run):
    """All of metrics.jsonl but the clock."""
    return [{k: v for k, v in line.items() if k != "elapsed_s"} for line in run.history]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_goes_on_to_the_bit(recipe, tmp_path, moment):
    recipe["model"]["dropout"] = 0.1
    recipe["training"]["micro_batch_size"] = 4
    whole = lw.train({**recipe, "out": str(tmp_path / "whole")})
    killed = subprocess.run([sys.executable, "-c", KILLER, json.dumps(recipe), moment], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = lw.resume(recipe["out"])
    assert comparable(resumed) == comparable(whole)
    assert not list(resumed.directory.rglob("*.tmp"))
    for kind in (0, 1):  # weights, then what the optimizers remember
        ours = checkpoint.load_latest(resumed.directory)[1 + kind]
        theirs = checkpoint.load_latest(whole.directory)[1 + kind]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    best = whole.model.decoder.state_dict()
    assert all(torch.equal(best[name], tensor) for name, tensor in resumed.model.decoder.state_dict().items())
    without = {"wall_s", "training_s"}
    assert {k: v for k, v in resumed.summary.items() if k not in without} == {
        k: v for k, v in whole.summary.items() if k not in without
    }


@pytest.mark.parametrize("moment", ["step", "save, optimizer"])
def test_a_killed_bf16_run_goes_on_to_the_bit(recipe, tmp_path, moment):
    recipe["training"]["dtype"] = "bf16"
    whole = lw.train({**recipe, "out": str(tmp_path / "whole")})
    subprocess.run([sys.executable, "-c", KILLER, json.dumps(recipe), moment], capture_output=True)
    assert comparable(lw.resume(recipe["out"])) == comparable(whole)


@pytest.mark.parametrize("moment", ["evaluation", "after an evaluation", "best weights", "evaluated, not saved"])
def test_a_budget_of_minutes_keeps_its_best_model_through_a_kill(recipe, moment):
    # Evaluations fall where the clock says; what must hold is that none that was best is forgotten.
    recipe["training"] |= {"max_steps": None, "minutes": 0.05, "eval_interval": None, "save_interval": None}
    killed = subprocess.run([sys.executable, "-c", KILLER, json.dumps(recipe), moment], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    run = lw.resume(recipe["out"])
    evaluations = {line["step"]: line["val_loss"] for line in run.history if "val_loss" in line}
    assert len(evaluations) == len([line for line in run.history if "val_loss" in line])
    assert run.summary["val_loss"] == min(evaluations.values()) == evaluations[run.summary["best_step"]]
    tokens = Dataset.open(run.directory / "tokens").val
    loss = evaluate(run.model.decoder, tokens, 32, torch.device("cpu")).loss
    assert loss == pytest.approx(run.summary["val_loss"], rel=1e-5)


def test_resume_crosses_the_epoch_edge(recipe, tmp_path):
    # 400 lines of about 42 characters make some 470 windows of 32: 12 steps of 64 are an epoch and a half
    recipe["training"] |= {"batch_size": 64, "save_interval": 5}
    whole = lw.train({**recipe, "out": str(tmp_path / "whole")})
    subprocess.run([sys.executable, "-c", KILLER, json.dumps(recipe), "evaluation"], capture_output=True)
    assert comparable(lw.resume(recipe["out"])) == comparable(whole)


def test_resuming_a_finished_run_changes_nothing(recipe):
    run = lw.train(recipe)
    before = comparable(run), (run.directory / "model.safetensors").read_bytes()
    again = lw.resume(run.directory)
    assert (comparable(again), (run.directory / "model.safetensors").read_bytes()) == before


def test_a_run_killed_while_its_data_was_prepared_can_go_on(recipe):
    script = KILLER.replace("lw.train(recipe)", "").replace("[moment]()", ".get(moment, lambda: None)()") + (
        "from leftward.data import prepare\nkill_in(prepare, '_encode', 1)\nlw.train(recipe)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, json.dumps(recipe), "data"], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with pytest.raises(UserError, match="already used.*--resume"):
        lw.train(recipe)
    assert lw.resume(recipe["out"]).summary["steps"] == 12


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def damage_remove(path):
    path.unlink()


def damage_garbage(path):
    path.write_bytes(os.urandom(200))


@pytest.mark.parametrize("damage", [damage_truncate, damage_remove, damage_garbage])
@pytest.mark.parametrize(
    "name",
    [
        "recipe.yaml",
        "tokens/dataset.json",
        "tokens/train-00000.npy",
        "tokens/tokenizer.json",
        "checkpoints/step-00000012/model.safetensors",
        "checkpoints/step-00000012/optimizer.safetensors",
        "checkpoints/step-00000012/state.json",
    ],
)
def test_a_damaged_file_is_named(recipe, name, damage):
    run = lw.train(recipe)
    damage(run.directory / name)
    with pytest.raises(UserError) as caught:
        lw.resume(run.directory)
    assert name.split("/")[-1] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("step", [11, 13, 10**9, -1, "x", None])
def test_a_step_that_cannot_be_is_named(recipe, step):
    run = lw.train(recipe)
    path = run.directory / "checkpoints" / "step-00000012" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": step}))
    with pytest.raises(UserError, match="state.json is damaged: step is"):
        lw.resume(run.directory)


def test_other_data_under_a_run_is_noticed(recipe, tmp_path):
    run = lw.train(recipe)
    index = run.directory / "tokens" / "dataset.json"
    values = json.loads(index.read_text())
    index.write_text(json.dumps({**values, "fingerprint": "0" * len(values["fingerprint"])}))
    with pytest.raises(UserError, match="does not hold the tokens that this run was trained on"):
        lw.resume(run.directory)


def test_what_is_no_run_cannot_be_resumed(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="is not a run directory"):
            lw.resume(path)


def test_tokens_that_no_vocabulary_has_are_named(recipe):
    recipe["training"]["eval_interval"] = 0
    killed = subprocess.run([sys.executable, "-c", KILLER, json.dumps(recipe), "step"], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    for name in ("train-00000.npy", "val-00000.npy"):
        path = Path(recipe["out"]) / "tokens" / name
        tokens = np.load(path)
        np.save(path, np.full_like(tokens, 255))
    with pytest.raises(UserError, match="the train split holds token 255"):
        lw.resume(recipe["out"])
