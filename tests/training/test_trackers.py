"""TensorBoard for real, Weights & Biases through a module that stands in for it."""

import importlib.machinery
import json
import os
import signal
import sys
import types
from pathlib import Path

import pytest

import leftward as lw
from leftward.errors import UserError
from leftward.training import trackers
from leftward.training.progress import Interrupted, Observer, Several
from leftward.training.recipe import Recipe


class Press(Observer):
    def stepped(self, progress):
        if progress.step == 6:
            os.kill(os.getpid(), signal.SIGINT)


def with_trackers(recipe, *names):
    return {**recipe, "logging": {"trackers": list(names), "project": "farm"}}


@pytest.fixture
def wandb(monkeypatch):
    """Keeps what it is told, as the service's own library would send it."""
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.sessions = []

    def init(**settings):
        session = types.SimpleNamespace(settings=settings, lines=[], finished=False)
        session.log = lambda values, step: session.lines.append((step, values))
        session.finish = lambda: setattr(session, "finished", True)
        module.sessions.append(session)
        return session

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_missing_extra_is_one_line_and_nothing_is_begun(recipe, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(UserError, match=f"needs {name}: pip install {name} .leftward's extra `{name}`."):
            lw.train(with_trackers(recipe, name))
        assert not os.path.exists(recipe["out"])


def test_wandb_is_told_of_steps_evaluations_and_samples(recipe, wandb):
    recipe["training"] |= {"log_interval": 5, "sample_prompts": ["The "]}
    run = lw.train(with_trackers(recipe, "wandb"))
    (session,) = wandb.sessions
    assert session.settings["project"] == "farm" and session.settings["name"] == "run" and session.finished
    assert session.settings["config"]["training"]["max_steps"] == 12
    steps = {step: values for step, values in session.lines if "train/loss" in values}
    history = {line["step"]: line["loss"] for line in run.history if "loss" in line}
    assert {step: values["train/loss"] for step, values in steps.items()} == history and list(steps) == [5, 10, 12]
    evaluations = {step: values["val/loss"] for step, values in session.lines if "val/loss" in values}
    assert evaluations == {line["step"]: line["val_loss"] for line in run.history if "val_loss" in line}
    assert [step for step, values in session.lines if "samples/The " in values] == [4, 8, 12]


def test_a_resumed_run_is_the_same_run_to_wandb(recipe, wandb):
    with pytest.raises(Interrupted):
        lw.train(with_trackers(recipe, "wandb"), observer=Press())
    lw.resume(recipe["out"])
    first, second = wandb.sessions
    assert first.settings["id"] == second.settings["id"] and second.settings["resume"] == "allow"
    assert first.finished and second.finished
    steps = [step for session in (first, second) for step, values in session.lines if "train/loss" in values]
    assert steps == list(range(1, 13))


def test_a_tracker_that_fails_on_the_way_does_not_end_the_run(recipe, wandb):
    notes = []
    observer = Observer()
    observer.note = notes.append

    def broken(values, step):
        raise ConnectionError("the network is gone")

    real = wandb.init
    wandb.init = lambda **settings: types.SimpleNamespace(**{**vars(real(**settings)), "log": broken})
    assert lw.train(with_trackers(recipe, "wandb"), observer=observer).summary["steps"] == 12
    assert [note for note in notes if "wandb" in note] == [
        "wandb failed (ConnectionError: the network is gone); going on without it"
    ]


def test_a_tracker_that_does_not_start_is_said_before_the_first_step(recipe, wandb):
    def refused(**settings):
        raise RuntimeError("api key not configured")

    wandb.init = refused
    with pytest.raises(UserError, match="wandb does not start .*api key not configured.*--resume"):
        lw.train(with_trackers(recipe, "wandb"))
    path = Path(recipe["out"]) / "recipe.yaml"
    path.write_text(path.read_text().replace("trackers: [wandb]", "trackers: []"))
    assert lw.resume(recipe["out"]).summary["steps"] == 12  # who is told of a run is not a part of it


def test_tensorboard_has_every_step_once_through_a_resume(recipe):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe["training"]["sample_prompts"] = ["The "]
    with pytest.raises(Interrupted):
        lw.train(with_trackers(recipe, "tensorboard"), observer=Press())
    run = lw.resume(recipe["out"])
    events = EventAccumulator(str(run.directory / "tensorboard"))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("train/loss")}
    assert list(logged) == list(range(1, 13)) == [event.step for event in events.Scalars("train/loss")]
    for line in run.history:
        if "loss" in line:
            assert logged[line["step"]] == pytest.approx(line["loss"], rel=1e-6)
    assert [event.step for event in events.Scalars("val/bits_per_byte")] == [4, 8, 12]
    assert len(events.Tensors("samples/The /text_summary")) == 3


def test_several_observers_are_each_told_everything():
    told = []

    def recorder(name):
        observer = Observer()
        for method in [m for m in vars(Observer) if not m.startswith("_")]:
            setattr(observer, method, lambda *a, method=method: told.append((name, method, a)))
        return observer

    several = Several([recorder("a"), recorder("b")])
    methods = {m: n.__code__.co_argcount - 1 for m, n in vars(Observer).items() if not m.startswith("_")}
    for method, count in methods.items():
        getattr(several, method)(*range(count))
    assert told == [(name, m, tuple(range(n))) for m, n in methods.items() for name in "ab"]


def test_an_unknown_tracker_is_answered_with_the_known(recipe):
    with pytest.raises(UserError, match=r"logging\.trackers\.0 is 'tensorbord'.*'tensorboard' or 'wandb'"):
        Recipe.from_dict(with_trackers(recipe, "tensorbord"))
    assert json.dumps(Recipe.from_dict(with_trackers(recipe)).logging.trackers) == "[]"
