"""Steps that leap are left out where the recipe asks for it: which, that nothing moves, and that a resume agrees."""

import json
import os
import signal

import numpy as np
import pytest
import torch

import leftward as lw
from leftward.errors import UserError
from leftward.training import checkpoint, loop
from leftward.training.progress import Interrupted, Observer
from leftward.training.spikes import Spikes


def spikes_by_numpy(losses, norms, sigmas):
    """OLMo-core's rule, from the whole history at once."""
    found = []
    for step in range(64, len(losses)):
        before = [np.array(values[max(0, step - 128) : step]) for values in (losses, norms)]
        now = (losses[step], norms[step])
        if any(v - b.mean() > sigmas * b.std(ddof=1) for v, b in zip(now, before, strict=True)):
            found.append(step)
    return found


@pytest.mark.parametrize("sigmas", [1.5, 2.5, 4.0])
def test_a_spike_is_what_its_definition_says(sigmas):
    random = np.random.default_rng(7)
    losses = (3 + 0.1 * random.standard_normal(400) + (random.random(400) < 0.02)).tolist()
    norms = (1 + 0.2 * random.standard_normal(400) ** 2).tolist()
    memory, found = Spikes(), []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        memory, reason = memory.judge(loss, norm, sigmas)
        found += [step] if reason else []
    assert found == spikes_by_numpy(losses, norms, sigmas) and found
    assert memory.skipped == len(found)
    assert memory.losses == losses[-128:] and memory.grad_norms == norms[-128:]


def test_a_new_level_is_no_spike_for_long():
    memory, reasons = Spikes(), []
    for loss in [1.0, 1.1] * 64 + [3.0] * 30:
        memory, reason = memory.judge(loss, 1.0, 6.0)
        reasons.append(reason)
    assert reasons[128] and "its loss of 3 is above 1.3" in reasons[128]  # 1.05 + 6 · 0.05
    assert not any(reasons[135:])


@pytest.fixture
def leaping(recipe, monkeypatch):
    """A recipe whose loss leaps at step 70, as often as that is computed; and what step 69, 70 … left, by step."""
    real, left = loop._Training._step, {}

    def step(self):
        head_loss = loop.head_loss
        if self.state.step == 69:
            monkeypatch.setattr(loop, "head_loss", lambda *arguments: head_loss(*arguments) * 20)
        real(self)
        monkeypatch.setattr(loop, "head_loss", head_loss)
        if self.state.step >= 69:
            tensors = self.optimizer.weights() | self.optimizer.state()
            left[self.state.step] = {name: tensor.clone() for name, tensor in tensors.items()}

    monkeypatch.setattr(loop._Training, "_step", step)
    recipe["training"] |= {"max_steps": 76, "eval_interval": 0, "save_interval": 1000, "skip_spikes": 6.0}
    return recipe, left


def comparable(run):
    return [{k: v for k, v in line.items() if k != "elapsed_s"} for line in run.history]


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_that_leaps_moves_nothing_and_is_counted(leaping):
    recipe, left = leaping
    notes = []
    observer = Observer()
    observer.note = notes.append
    run = lw.train(recipe, observer=observer)
    assert equal(left[69], left[70]) and not equal(left[70], left[71])
    counts = {line["step"]: line["skipped_steps"] for line in run.history if "loss" in line}
    assert counts == {step: int(step >= 70) for step in range(1, 77)}
    assert run.summary["skipped_steps"] == 1 and run.summary["steps"] == 76
    assert run.summary["tokens"] == 76 * 8 * 32  # its rows are spent
    (note,) = [note for note in notes if "left out" in note]
    assert note.startswith("step 70 is left out (training.skip_spikes): its loss of ")


def test_it_is_off_by_default(leaping):
    recipe, left = leaping
    recipe["training"] |= {"skip_spikes": None, "max_steps": 70}
    run = lw.train(recipe)
    assert not equal(left[69], left[70])
    assert run.summary["skipped_steps"] == 0 and "skipped_steps" not in run.history[-2]
    assert checkpoint.load_latest(run.directory)[0].spikes == Spikes()


def test_what_is_remembered_goes_on_with_the_run(leaping, tmp_path):
    recipe, _ = leaping
    whole = lw.train({**recipe, "out": str(tmp_path / "whole")})

    class Press(Observer):
        def stepped(self, progress):
            if progress.step in (66, 70, 74):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        lw.train(recipe, observer=Press())
    for _ in range(2):
        with pytest.raises(Interrupted):
            lw.resume(recipe["out"], observer=Press())
    resumed = lw.resume(recipe["out"])
    assert comparable(resumed) == comparable(whole)
    states, weights = zip(*(checkpoint.load_latest(run.directory)[:2] for run in (whole, resumed)), strict=True)
    assert states[0].spikes == states[1].spikes
    assert len(states[0].spikes.losses) == 76 and states[0].spikes.skipped == 1
    assert equal(*weights)


@pytest.mark.parametrize(
    "damage", [{"losses": [1.0, "x"]}, {"losses": 3}, {"skipped": -1}, {"other": 1}, {"losses": [-1.0]}]
)
def test_a_damaged_memory_is_named_and_an_absent_one_is_empty(recipe, damage):
    run = lw.train({**recipe, "training": {**recipe["training"], "max_steps": 2}})
    (path,) = run.directory.glob("checkpoints/*/state.json")
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "spikes": {**state["spikes"], **damage}}))
    with pytest.raises(UserError, match="state.json is damaged"):
        checkpoint.load_latest(run.directory)
    del state["spikes"]
    path.write_text(json.dumps(state))
    assert checkpoint.load_latest(run.directory)[0].spikes == Spikes()
