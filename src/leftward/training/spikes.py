"""Steps that are left out because their loss or gradient leaps, as OLMo-core's SkipStepOptimizer leaves them out."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

WINDOW = 128
"""Steps that a step is held against; it is judged once there are half as many."""


@dataclass(frozen=True)
class Spikes:
    """What is remembered of the last steps, and how many were left out."""

    losses: list[float] = field(default_factory=list)
    """Of at most WINDOW steps, in nats a token."""
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0

    def judge(self, loss: float, grad_norm: float, sigmas: float) -> tuple[Spikes, str | None]:
        """What is remembered after a step; and if it is a spike, why: its loss or the norm of its gradient is more than
        `sigmas` standard deviations above the mean of the steps before it.

        A spike is remembered too, so that a level which stays is no spike for long.
        """
        reasons = []
        for name, value, before in (("loss", loss, self.losses), ("gradient norm", grad_norm, self.grad_norms)):
            if len(before) < WINDOW // 2:
                continue
            mean = statistics.fmean(before)
            limit = mean + sigmas * statistics.stdev(before, mean)
            if value > limit:
                reasons.append(f"its {name} of {value:.4g} is above {limit:.4g}, where {mean:.4g} is usual")
        return (
            Spikes(
                [*self.losses, loss][-WINDOW:], [*self.grad_norms, grad_norm][-WINDOW:], self.skipped + bool(reasons)
            ),
            "; ".join(reasons) or None,
        )
