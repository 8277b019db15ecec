"""The learning rate, step by step, against arithmetic by hand."""

import math

import pytest

from leftward.training.recipe import Recipe
from leftward.training.schedule import Plan, lr_fraction


def fractions(max_steps=20, **schedule):
    recipe = Recipe.from_dict({"data": {"path": "x"}, "training": {"max_steps": max_steps}, "schedule": schedule})
    plan = Plan.of(recipe, epoch_rows=10**6)
    return [lr_fraction(step, plan, recipe) for step in range(max_steps)]


def test_trapezoid_reaches_its_peak_holds_it_and_falls():
    got = fractions(20, warmup_steps=4, decay_fraction=0.5)
    assert got[:4] == [0.25, 0.5, 0.75, 1.0]  # the last warm-up step is at the peak
    assert got[4:10] == [1.0] * 6
    assert got[10:] == pytest.approx([1 - k / 11 for k in range(1, 11)])  # never a step at zero


def test_cosine_is_half_way_down_in_the_middle():
    got = fractions(21, warmup_steps=1, decay="cosine", final_fraction=0.1)
    # from step 1 on, 20 steps fall along (1 + cos) / 2 between 1 and 0.1
    assert got[0] == 1.0
    assert got[10] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 10 / 21)) / 2)


@pytest.mark.parametrize("max_steps", [1, 2, 3])
@pytest.mark.parametrize("decay", ["trapezoid", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_short_runs_divide_by_nothing(max_steps, decay, warmup):
    got = fractions(max_steps, warmup_steps=warmup, decay=decay, decay_fraction=1.0)
    assert all(0 < value <= 1 for value in got)


def test_no_decay_holds_the_peak():
    assert fractions(5, warmup_steps=0, decay_fraction=0.0) == [1.0] * 5
    assert fractions(5, warmup_steps=5, decay="trapezoid", decay_fraction=1.0) == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_a_budget_never_settles_on_no_steps():
    recipe = Recipe.from_dict(
        {"data": {"path": "x"}, "training": {"minutes": 1}, "schedule": {"decay_fraction": 1.0, "warmup_steps": 0}}
    )
    plan = Plan.of(recipe, epoch_rows=10**6)
    assert plan.settle(0, 0.1, 60, recipe) == plan
    assert plan.settle(1, 0.1, 60, recipe).max_steps == 600


def test_a_budget_settles_once_when_the_fall_must_begin():
    recipe = Recipe.from_dict(
        {"data": {"path": "x"}, "training": {"minutes": 1}, "schedule": {"decay_fraction": 0.5, "warmup_steps": 2}}
    )
    plan = Plan.of(recipe, epoch_rows=10**6)
    assert plan.max_steps is None and lr_fraction(1000, plan, recipe) == 1.0
    assert plan.settle(100, 29.9, 60, recipe) == plan
    assert plan.settle(1, 40.0, 60, recipe) == Plan(1, 1, 1)  # a step of 40 s leaves no room for the warm-up
    settled = plan.settle(100, 30.0, 60, recipe)
    assert settled == Plan(2, 100, 200)  # 100 steps in 30 s leave 100 for the other 30 s
    assert settled.settle(150, 59.0, 60, recipe) == settled
