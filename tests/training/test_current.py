"""Weights of the moment for whoever looks: they are those of their step, and a run that gives them is the same run."""

from pathlib import Path

import pytest
import torch

import leftward as lw
from leftward.formats.tensors import read_tensors
from leftward.training import current, loop
from leftward.training.progress import Observer

NAMES = "generation_config.json"


class Looker(Observer):
    """Asks behind every step, and keeps what the answer to the last question is."""

    def __init__(self, run):
        self.run, self.found = Path(run), {}

    def stepped(self, progress):
        if (newest := current.newest(self.run)) is not None:
            directory, step = newest
            self.found[step] = lw.load(directory)
            assert (directory / NAMES).read_text() == (self.run / NAMES).read_text()
            assert step == progress.step - 1
        current.ask(self.run)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(current, "_SHARE", 1e9)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def comparable(run):
    return [{key: value for key, value in line.items() if key != "elapsed_s"} for line in run.history]


def test_every_answer_is_its_step_and_the_run_stays_the_same(recipe, tmp_path):
    recipe["training"] |= {"keep": 100, "save_interval": 1}
    plain = lw.train({**recipe, "out": str(tmp_path / "plain")}, observer=Observer())
    looker = Looker(recipe["out"])
    seen = lw.train(recipe, observer=looker)
    assert sorted(looker.found) == list(range(1, 12))
    for step, model in looker.found.items():
        saved = read_tensors(plain.directory / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
        found = model.decoder.state_dict()
        assert_equal({name: found[name] for name in saved}, saved)
        assert found.keys() - saved.keys() <= {"head.weight"}  # which is the embedding
        assert model.tokenizer.fingerprint() == plain.model.tokenizer.fingerprint()
    assert comparable(seen) == comparable(plain)
    assert_equal(seen.model.decoder.state_dict(), plain.model.decoder.state_dict())


def test_with_lora_answers_are_whole_models(recipe, tmp_path):
    published = {}

    class Comparing(Looker):
        def evaluated(self, step, evaluation, is_best):
            if is_best:
                published[step] = lw.load(self.run).decoder.state_dict()

    base = lw.train({**recipe, "out": str(tmp_path / "base")}, observer=Observer())
    (base.directory / NAMES).write_text('{"eos_token_id": [0, 3], "temperature": 0.6}')
    recipe |= {"init_from": str(base.directory), "lora": {"rank": 2}}
    recipe["training"] |= {"eval_interval": 1}
    del recipe["model"], recipe["tokenizer"]
    looker = Comparing(recipe["out"])
    lw.train(recipe, observer=looker)
    both = looker.found.keys() & published.keys()
    assert len(both) > 2
    for step in both:
        assert_equal(looker.found[step].decoder.state_dict(), published[step])


def test_nothing_is_written_where_nobody_asks_and_nothing_stays(recipe):
    seen = []

    class Watching(Observer):
        def stepped(self, progress):
            seen.append((Path(recipe["out"]) / "current").exists())

    run = lw.train(recipe, observer=Watching())
    assert seen == [False] * 12
    current.ask(run.directory)  # nobody trains there
    assert not (run.directory / "current").exists()


def test_a_run_clears_its_answers_away_however_it_ends(recipe):
    class Failing(Looker):
        def stepped(self, progress):
            super().stepped(progress)
            if progress.step == 5:
                raise RuntimeError("killed")

    looker = Failing(recipe["out"])
    with pytest.raises(RuntimeError):
        lw.train(recipe, observer=looker)
    directory = Path(recipe["out"]) / "current"
    assert looker.found and not directory.exists()
    (directory / "step-00000003").mkdir(parents=True)  # as a kill leaves it
    seen = []

    class Watching(Observer):
        def stepped(self, progress):
            seen.append(current.newest(looker.run))

    lw.resume(recipe["out"], observer=Watching())
    assert seen and set(seen) == {None} and not directory.exists()


@pytest.mark.parametrize("fault", ["a file in its place", "no room"])
def test_a_disk_that_refuses_ends_no_run(recipe, monkeypatch, fault):
    place, asked = Path(recipe["out"]) / "current", []

    save = loop._Training._save_model

    def full(training, directory, weights):
        if directory.parent == place:
            raise OSError(28, "No space left on device")
        save(training, directory, weights)

    class Asking(Observer):
        def stepped(self, progress):
            if fault == "a file in its place" and not asked:
                place.write_text("")
            current.ask(place.parent)
            asked.append((place / "asked").exists())

    if fault == "no room":
        monkeypatch.setattr(loop._Training, "_save_model", full)
    assert lw.train(recipe, observer=Asking()).summary["steps"] == 12
    assert asked == [fault == "no room"] * 12


def test_answers_take_a_share_of_the_time(recipe, monkeypatch):
    monkeypatch.setattr(current, "_SHARE", 1e-9)
    looker = Looker(recipe["out"])
    with pytest.raises(AssertionError):  # one answer, which is of an earlier and earlier step
        lw.train(recipe, observer=looker)
    assert list(looker.found) == [1]
