"""Which checkpoints stay, and that one which is there is whole."""

import re
from pathlib import Path

import pytest

import leftward as lw
from leftward import files
from leftward.errors import UserError
from leftward.training import checkpoint
from leftward.training.progress import Interrupted, Observer


def steps(run):
    return sorted(int(p.name.removeprefix("step-")) for p in (Path(run) / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"save_interval": 1}, [12]),
        ({"save_interval": 1, "keep": 3}, [10, 11, 12]),
        ({"save_interval": 1, "keep": 2, "keep_every": 5}, [5, 10, 11, 12]),
        ({"save_interval": 1, "keep_every": 4}, [4, 8, 12]),
        ({"save_interval": None, "keep_every": 5}, [5, 10, 12]),  # which are steps to save at by themselves
        ({"save_interval": 3, "keep": 100}, [3, 6, 9, 12]),
    ],
)
def test_the_newest_stay_and_those_of_every_so_many_steps(recipe, settings, expected):
    recipe["training"] |= {"eval_interval": 0, **settings}
    run = lw.train(recipe)
    assert steps(run.directory) == expected
    for directory in (run.directory / "checkpoints").iterdir():
        assert {p.name for p in directory.iterdir()} == {"model.safetensors", "optimizer.safetensors", "state.json"}


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_a_removal_that_is_cut_short_leaves_whole_checkpoints_only(recipe, monkeypatch, removed):
    class Killed(BaseException):
        """As SIGKILL in the middle of rmtree, which takes one file after the other."""

    real = files.shutil.rmtree

    def half(path, ignore_errors=False):
        if Path(path).parent.name != "checkpoints":
            return real(path, ignore_errors)
        for file in sorted(Path(path).iterdir())[:removed]:
            file.unlink()
        raise Killed

    recipe["training"] |= {"save_interval": 1, "keep": 2, "eval_interval": 0}
    whole = lw.train({**recipe, "out": recipe["out"] + "-whole"})
    with monkeypatch.context() as patched:
        patched.setattr(files.shutil, "rmtree", half)
        with pytest.raises(Killed):
            lw.train(recipe)
    names = [p.name for p in Path(recipe["out"], "checkpoints").iterdir()]
    assert sorted(name for name in names if re.fullmatch(r"step-\d+", name)) == ["step-00000002", "step-00000003"]
    resumed = lw.resume(recipe["out"])
    assert steps(resumed.directory) == [11, 12]
    assert resumed.summary["val_loss"] == whole.summary["val_loss"]


def test_how_many_stay_may_change_between_sessions_and_nothing_else_may(recipe, tmp_path):
    class Press(Observer):
        def stepped(self, progress):
            if progress.step == 5:
                raise Interrupted(Path(recipe["out"]))

    recipe["training"] |= {"save_interval": 1, "keep": 4, "eval_interval": 0}
    with pytest.raises(Interrupted):
        lw.train(recipe, observer=Press())
    assert steps(recipe["out"]) == [1, 2, 3, 4]
    path = Path(recipe["out"]) / "recipe.yaml"
    text = path.read_text()
    path.write_text(text.replace("  keep: 4\n", "  keep: 2\n").replace("save_interval: 1\n", "save_interval: 2\n"))
    with pytest.raises(UserError, match="is not the recipe that this run was begun with"):
        lw.resume(recipe["out"])
    path.write_text(text.replace("  keep: 4\n", "  keep: 2\n").replace("  keep_every: null\n", "  keep_every: 6\n"))
    lw.resume(recipe["out"])
    assert steps(recipe["out"]) == [6, 11, 12]


def test_a_state_that_cannot_be_is_no_state(recipe):
    state = checkpoint.load_latest(lw.train(recipe).directory)[0]
    for damage in ({"plan": {}}, {"step": "1"}, {"native": 3}, {"tokens": 1e300}, {"spikes": None}):
        with pytest.raises(UserError, match="damaged"):
            checkpoint.State.from_dict({**state.to_dict(), **damage}, Path("state.json"))
