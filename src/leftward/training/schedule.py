"""The learning rate over a run, as a function of the step and of a plan that says where the run turns and ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from leftward.training.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """Where a run turns and ends, in steps. With a budget of minutes the last two are None until they are settled from
    the measured speed; a settled plan is saved with the run, so that resuming it gives the same steps."""

    warmup_steps: int
    decay_start: int | None
    max_steps: int | None

    @classmethod
    def of(cls, recipe: Recipe, epoch_rows: float) -> Plan:
        """Of a run on a training split of `epoch_rows` sequences."""
        training, schedule = recipe.training, recipe.schedule
        max_steps, warmup = training.max_steps, schedule.warmup_steps
        if training.max_epochs is not None:
            steps = max(1, round(training.max_epochs * epoch_rows / training.batch_size))
            max_steps = min(steps, max_steps or steps)
        if warmup is None:
            warmup = 10 if max_steps is None else min(10, -(-max_steps // 10))
        if max_steps is None:
            return cls(warmup, None, None)
        warmup = min(warmup, max_steps)
        falling = {"trapezoid": schedule.decay_fraction, "cosine": 1.0, "constant": 0.0}[schedule.decay]
        return cls(warmup, max(warmup, round(max_steps * (1 - falling))), max_steps)

    def settle(self, step: int, elapsed: float, budget: float, recipe: Recipe) -> Plan:
        """Where the run ends if it goes on at this speed; times in seconds. Stays unsettled while the peak holds."""
        falling = recipe.schedule.decay_fraction if recipe.schedule.decay == "trapezoid" else 0.0
        if self.max_steps is not None or elapsed < budget * (1 - falling) or step == 0:
            return self
        remaining = max(0.0, budget - elapsed) * step / elapsed
        # In a budget of a few steps the warm-up is cut short.
        return Plan(min(self.warmup_steps, step), step, step + round(remaining))


def lr_fraction(step: int, plan: Plan, recipe: Recipe) -> float:
    """The learning rate of step 0, 1, … as a fraction of its peak.

    Step warmup_steps − 1 is the first at the peak. The fall would end at `final_fraction` one step after the last, so
    that no step is spent at zero.
    """
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    if plan.decay_start is None or plan.max_steps is None or step < plan.decay_start:
        return 1.0
    fallen = (step + 1 - plan.decay_start) / (plan.max_steps + 1 - plan.decay_start)
    shape = (1 + math.cos(math.pi * fallen)) / 2 if recipe.schedule.decay == "cosine" else 1 - fallen
    final = recipe.schedule.final_fraction
    return final + (1 - final) * shape
