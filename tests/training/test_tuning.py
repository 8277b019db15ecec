"""Sweeps: every combination once, resumable, averaged right; and the range test on curves whose answer is known."""

import json
import os
import statistics
from pathlib import Path

import pytest

from leftward.data.batches import Dataset
from leftward.errors import UserError
from leftward.training import directory, loop, tuning
from leftward.training.progress import Interrupted, Observer
from leftward.training.recipe import Recipe


@pytest.fixture
def short(recipe):
    recipe["training"] |= {"max_steps": 3, "eval_interval": 0, "save_interval": 1}
    del recipe["out"]
    return recipe


def tune(recipe, *arguments, seeds=1, out, observer=None):
    return tuning.tune(recipe, tuning.parse_grid(arguments), seeds, out, observer or Observer())


# ---- a grid


def test_a_grid_is_read_as_yaml():
    grid = tuning.parse_grid(["a.b=1,0.5,x", "model.n_heads=2", "data.path=[a, b],c", "e=null,true"])
    assert grid == {"a.b": [1, 0.5, "x"], "model.n_heads": [2], "data.path": [["a", "b"], "c"], "e": [None, True]}
    assert tuning.parse_grid(["optimizer.lr=1e-3,2e-3"]) == {"optimizer.lr": [0.001, 0.002]}


@pytest.mark.parametrize("argument", ["a", "=1", "a=", "a=[1", "a=1]"])
def test_what_is_no_grid(argument):
    with pytest.raises(UserError, match="is no setting: write it as key.sub=value, or key.sub=a,b,c"):
        tuning.parse_grid([argument])


def test_every_combination_is_trained_with_every_seed(short, tmp_path):
    out = tmp_path / "sweep"
    outcomes = tune(short, "optimizer.lr=0.01,0.02", "model.n_layers=1,2", "model.n_heads=2", seeds=2, out=out)
    assert len(outcomes) == 4 and all(len(outcome.trials) == 2 for outcome in outcomes)
    assert {(o.settings["optimizer.lr"], o.settings["model.n_layers"]) for o in outcomes} == {
        (0.01, 1), (0.01, 2), (0.02, 1), (0.02, 2)
    }  # fmt: skip
    assert sorted(os.listdir(out)) == sorted(
        f"lr={lr},n_layers={n},seed={seed}" for lr in (0.01, 0.02) for n in (1, 2) for seed in (1, 2)
    )
    means = []
    for outcome in outcomes:
        values = []
        for trial in outcome.trials:
            recipe = directory.read(trial.directory)
            assert recipe.optimizer.lr == outcome.settings["optimizer.lr"] and recipe.seed == trial.seed
            assert recipe.model["n_layers"] == outcome.settings["model.n_layers"] and recipe.model["n_heads"] == 2
            assert json.loads((trial.directory / "summary.json").read_text()) == trial.summary
            values.append(trial.summary["val_loss"])
        assert outcome.mean("val_loss") == pytest.approx(sum(values) / 2)
        assert outcome.deviation("val_loss") == pytest.approx(statistics.stdev(values))
        means.append(outcome.mean("val_bits_per_byte"))
    assert means == sorted(means)


def test_a_seed_of_the_data_holds_the_split_while_seeds_vary(short, tmp_path):
    short["data"] |= {"document_separator": "\n"}

    def held_out(*settings, out):
        (outcome,) = tune(short, *settings, seeds=2, out=tmp_path / out)
        for trial in outcome.trials:
            dataset = Dataset.open(trial.directory / "tokens")
            yield dataset.val.slice(0, len(dataset.val)).tolist(), trial.summary["final_val_loss"]

    (one, loss), (other, other_loss) = held_out("data.seed=5", out="held")
    assert one == other and loss != other_loss
    files = [(tmp_path / "held" / f"seed={seed}" / "tokens" / "val-00000.npy").stat().st_ino for seed in (1, 2)]
    assert files[0] == files[1]  # prepared once
    (one, _), (other, _) = held_out(out="varied")
    assert one != other


def test_what_has_finished_is_not_repeated_and_more_seeds_are_added(short, tmp_path, monkeypatch):
    tune(short, seeds=2, out=tmp_path / "sweep")
    trained, real = [], loop.run
    monkeypatch.setattr(loop, "run", lambda recipe, *a, **k: (trained.append(recipe.seed), real(recipe, *a, **k))[1])
    (outcome,) = tune(short, seeds=3, out=tmp_path / "sweep")
    assert trained == [3] and [trial.seed for trial in outcome.trials] == [1, 2, 3] and outcome.settings == {}


def test_an_interrupted_sweep_goes_on_where_it_was(short, tmp_path):
    class Press(Observer):
        steps = 0

        def stepped(self, progress):
            Press.steps += 1
            if Press.steps == 5:  # the second step of the second run
                os.kill(os.getpid(), 2)

    out = tmp_path / "sweep"
    with pytest.raises(Interrupted):
        tune(short, "optimizer.lr=0.01,0.02,0.03", out=out, observer=Press())
    assert sorted(os.listdir(out)) == ["lr=0.01,seed=1", "lr=0.02,seed=1"]
    whole = tune(short, "optimizer.lr=0.01,0.02,0.03", out=tmp_path / "whole")
    gone_on = tune(short, "optimizer.lr=0.01,0.02,0.03", out=out)
    assert [(o.settings, o.mean("val_loss")) for o in gone_on] == [(o.settings, o.mean("val_loss")) for o in whole]


def test_runs_on_the_same_text_share_its_tokens(short, tmp_path):
    tune(short, "optimizer.lr=0.01,0.02", seeds=2, out=tmp_path / "sweep")
    inodes = {}
    for path in (tmp_path / "sweep").glob("*/tokens/train-00000.npy"):
        inodes.setdefault(path.stat().st_ino, []).append(path.parent.parent.name.split(",")[1])
    assert sorted(inodes.values()) == [["seed=1", "seed=1"], ["seed=2", "seed=2"]]  # a seed splits in its own way


def test_a_run_that_diverges_is_last_and_does_not_stop_the_others(short, tmp_path):
    notes = []
    observer = Observer()
    observer.note = notes.append
    short["optimizer"] = {"name": "adamw"}
    outcomes = tune(short, "optimizer.adamw_lr=1e38,0.01", out=tmp_path / "sweep", observer=observer)
    assert [o.settings["optimizer.adamw_lr"] for o in outcomes] == [0.01, 1e38]
    assert outcomes[1].mean("val_loss") == float("inf") and outcomes[1].deviation("val_loss") is None
    assert any("diverged" in note for note in notes)


@pytest.mark.parametrize(
    "arguments, seeds, expected",
    [
        (["optimizer.lr=0.1,fast"], 1, "optimizer.lr is 'fast'"),
        (["optimiser.lr=0.1,0.2"], 1, "unknown key optimiser"),
        (["optimizer.lr=0.1,0.1"], 1, "two combinations would be in"),
        ([], 0, "seeds is 0"),
    ],
)
def test_a_mistake_is_said_before_anything_is_trained(short, tmp_path, arguments, seeds, expected):
    with pytest.raises(UserError, match=expected):
        tune(short, *arguments, seeds=seeds, out=tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_what_was_killed_before_it_had_a_recipe_is_begun_anew(short, tmp_path):
    directory = tmp_path / "sweep" / "seed=1"
    directory.mkdir(parents=True)
    (directory / ".lock").touch()
    (directory / "recipe.yaml.tmp").write_text("seed: ")
    (outcome,) = tune(short, out=tmp_path / "sweep")
    assert outcome.trials[0].summary["steps"] == 3


def test_a_directory_of_another_recipe_is_left_alone(short, tmp_path):
    tune(short, out=tmp_path / "sweep")
    before = (tmp_path / "sweep" / "seed=1" / "summary.json").read_bytes()
    short["training"]["max_steps"] = 4
    with pytest.raises(UserError, match="is a run of another recipe: choose another --out"):
        tune(short, out=tmp_path / "sweep")
    assert (tmp_path / "sweep" / "seed=1" / "summary.json").read_bytes() == before


def test_a_sweep_is_called_after_its_data(short, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tune(short, out=None)
    assert Path("runs/tune-farm/seed=1/summary.json").exists()


# ---- the range of rates


def test_the_lowest_before_the_rise_is_found():
    falling = [5.0 - 0.1 * n for n in range(30)]  # to 2.1
    assert tuning._lowest_before_the_rise([*falling, 2.2, 2.5, 3.0, 4.0]) == 29
    # after the break there is a lower valley, which is not it
    assert tuning._lowest_before_the_rise([*falling, 2.2, 2.5, 3.0, 2.5, 1.5, 1.0]) == 29
    # noise is no rise
    assert tuning._lowest_before_the_rise([5.0, 5.03, 4.0, 4.05, 3.0, 6.0]) == 4


def test_the_fastest_fall_is_the_middle_of_its_steps():
    assert tuning._fastest_fall([5.0, 5.0, 4.7, 4.0, 3.0, 2.0, 1.9, 1.8, 1.7], 4) == 3  # from 5.0 to 2.0
    assert tuning._fastest_fall([5.0, 4.9, 3.0, 2.9], 1) == 1
    assert tuning._fastest_fall([5.0, 1.0], 10) == 0


@pytest.mark.parametrize(
    "optimizer, rates", [("muon", {"optimizer.lr", "optimizer.adamw_lr"}), ("adamw", {"optimizer.adamw_lr"})]
)
def test_the_range_test_leaves_nothing_and_suggests_about_the_same_from_wherever_it_starts(
    recipe, tmp_path, optimizer, rates
):
    recipe["optimizer"] = {"name": optimizer}
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    suggested = []
    for rate in (0.002, 0.02):
        recipe["optimizer"]["adamw_lr"] = rate
        if optimizer == "muon":
            recipe["optimizer"]["lr"] = rate
        found = tuning.find_rates(recipe, Observer(), steps=60)
        assert set(found.rates) == rates
        assert found.rates["optimizer.adamw_lr"] == pytest.approx(rate * found.suggested, rel=0.05)
        assert found.suggested in [pytest.approx(factor * found.multiple) for factor in found.factors]
        assert found.factors[0] == pytest.approx(1e-3) and list(found.factors) == sorted(found.factors)
        suggested.append(found.rates["optimizer.adamw_lr"])
    assert 1 / 4 < suggested[0] / suggested[1] < 4
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_the_range_test_takes_every_step_and_saves_none_for_good(recipe, monkeypatch):
    saved = []
    monkeypatch.setattr(loop.checkpoint, "save", lambda *_, **kwargs: saved.append(kwargs["keep_every"]))
    expected = tuning.find_rates(recipe, Observer(), steps=100)
    recipe["training"] |= {"skip_spikes": 0.01, "save_interval": 1, "keep_every": 1}
    assert tuning.find_rates(recipe, Observer(), steps=100) == expected
    assert set(saved) <= {None} and len(saved) < 10


def test_a_range_that_teaches_nothing_is_said(recipe):
    recipe["optimizer"] = {"lr": 1e-12, "adamw_lr": 1e-12}
    with pytest.raises(UserError, match="no rate from 0.001 to 100 times the recipe's lowered the loss"):
        tuning.find_rates(recipe, Observer(), steps=20)


def test_the_range_test_takes_a_recipe_of_minutes_and_a_size(recipe):
    recipe["training"] = {"minutes": 1.0}
    del recipe["model"]
    recipe["size"] = "100K"
    found = tuning.find_rates(recipe, Observer(), steps=30)
    assert found.rates["optimizer.lr"] == pytest.approx(
        Recipe.from_dict(recipe).optimizer.lr * found.suggested, rel=0.05
    )
