"""Scaling laws: what loss a size and an amount of text are expected to give, and the best of both for a FLOP budget.

Published fits, side by side, because they disagree. Not a promise: each holds for its own text, tokenizer and training,
and says nothing of a mixture of experts. Arithmetic only.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from leftward.errors import UserError

_PF_DAY = 8.64e19  # Kaplan et al. count compute in petaFLOP/s days
_FITTED_FLOPS = (1.4e18, 1.3e22)  # of the training runs that all three Chinchilla fits rest on (their figure 4)
_BAND = 0.8  # the share that Besiroglu et al. draw as a band
_DRAWS = 2000


@dataclass(frozen=True)
class ChinchillaFit:
    """L(N, D) = E + A / N^α + B / D^β, in nats a token, of N parameters trained on D tokens.

    With 6ND FLOPs to spend, the best N is G (FLOPs / 6)^(β / (α + β)) with G = (αA / βB)^(1 / (α + β)).
    """

    name: str
    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, n_parameters: float, n_tokens: float) -> float:
        return self.e + self.a / n_parameters**self.alpha + self.b / n_tokens**self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """Parameters and tokens of the lowest loss."""
        total = self.alpha + self.beta
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / total)
        n_parameters = g * (flops / 6) ** (self.beta / total)
        return n_parameters, flops / (6 * n_parameters)


# Hoffmann et al. 2022, arXiv 2203.15556, appendix D.3: as the paper prints it, and before that rounding (the values
# that Besiroglu et al. 2024 calculate with).
HOFFMANN_PRINTED = ChinchillaFit("Hoffmann 2022, printed", e=1.69, a=406.4, b=410.7, alpha=0.34, beta=0.28)
HOFFMANN_UNROUNDED = ChinchillaFit(
    "Hoffmann 2022, unrounded", e=1.6934, a=406.40, b=410.72, alpha=0.33917, beta=0.28491
)
# Besiroglu et al. 2024, arXiv 2404.10102: the same runs, fitted anew.
BESIROGLU = ChinchillaFit("Besiroglu 2024", e=1.8172, a=482.01, b=2085.43, alpha=0.3478, beta=0.3658)
CHINCHILLA_FITS = (HOFFMANN_PRINTED, HOFFMANN_UNROUNDED, BESIROGLU)

# The spread of (ln A, ln B, ln E, α, β) in that fit: the Cholesky factor of their covariance over 4,000 resamples of
# the 240 runs. From running the authors' bootstrap again (their data, objective, start and seed:
# github.com/epoch-research/analyzing-chinchilla), which gives the standard errors that they print, A 124.52, B 1293.28,
# E 0.0257, α 0.0154, β 0.0206. Those alone would not do: α and ln A are correlated at 0.999, and errors drawn apart
# would make the band far too wide.
_SPREAD = (
    (0.258176,),
    (-0.10776, 0.407133),
    (0.0082661, 0.0110374, 0.00295203),
    (0.0153901, -0.000168529, 0.000235602, 0.000488198),
    (-0.0053977, 0.0198771, 0.000251995, -0.00041238, 0.000150545),
)


def kaplan_loss_of_parameters(n_parameters: float) -> float:
    """Kaplan et al. 2020, arXiv 2001.08361, eq. 1.1: nats a token on WebText2 with N non-embedding parameters, were
    there text without end."""
    return (8.8e13 / n_parameters) ** 0.076


def kaplan_loss_of_tokens(n_tokens: float) -> float:
    """The same, eq. 1.2: with D tokens, were the model large without end and stopped in time."""
    return (5.4e13 / n_tokens) ** 0.095


def _kaplan_optimum(flops: float) -> tuple[float, float, float]:
    """Non-embedding parameters, tokens and loss of the best model (the same, table 6 and eq. 1.3).

    Their C_min, the compute at a small batch, is taken to be `flops`, and the tokens are what 6ND leaves.
    """
    n_parameters = 1.3e9 * (flops / _PF_DAY) ** 0.73
    return n_parameters, flops / (6 * n_parameters), (3.1e8 / (flops / _PF_DAY)) ** 0.050


@dataclass(frozen=True)
class Band:
    """The bounds between which 80 % of the draws of a parametric bootstrap lie."""

    parameters: tuple[float, float]
    tokens: tuple[float, float]
    tokens_per_parameter: tuple[float, float]
    loss: tuple[float, float]


@dataclass(frozen=True)
class Optimum:
    """The best use of a budget according to one law."""

    law: str
    parameters: float
    """Of the whole model; Kaplan's without embeddings."""
    tokens: float
    tokens_per_parameter: float
    loss: float
    """Nats a token of the text that the law was fitted to."""
    fitted_to: str
    band: Band | None = None


@dataclass(frozen=True)
class ComputeOptimal:
    """A budget and what each law would make of it."""

    flops: float
    optima: tuple[Optimum, ...]
    notes: tuple[str, ...]


def compute_optimal(flops: float) -> ComputeOptimal:
    """The size and the tokens that give the lowest loss for `flops` = 6ND, after Kaplan and three Chinchilla fits.

    Raises:
        UserError: `flops` is no amount that a law could speak of.
    """
    if not 1e12 <= flops <= 1e30:
        raise UserError(f"flops is {flops:g}: give what the whole training may cost, between 1e12 and 1e30")
    n, d, loss = _kaplan_optimum(flops)
    optima = [Optimum("Kaplan 2020", n, d, d / n, loss, "WebText2")]
    for fit in CHINCHILLA_FITS:
        n, d = fit.optimum(flops)
        band = _band(flops) if fit is BESIROGLU else None
        optima.append(Optimum(fit.name, n, d, d / n, fit.loss(n, d), "MassiveText", band))
    return ComputeOptimal(flops, tuple(optima), _notes(flops, optima))


def _band(flops: float) -> Band:
    """How far the runs leave Besiroglu's optimum open: fits drawn from a normal distribution around the published one.

    Assumed: the five parameters (A, B and E as logarithms) are normal with `_SPREAD`; that the law has this form, and
    still has it beyond the runs, is not in doubt here, so the band is the least that one has to allow for.
    """
    draw = random.Random(1)
    centre = (
        *(math.log(BESIROGLU.a), math.log(BESIROGLU.b), math.log(BESIROGLU.e)),
        *(BESIROGLU.alpha, BESIROGLU.beta),
    )
    columns: list[list[float]] = [[], [], [], []]
    for _ in range(_DRAWS):
        normal = [draw.gauss(0.0, 1.0) for _ in centre]
        ln_a, ln_b, ln_e, alpha, beta = (
            mean + sum(x * z for x, z in zip(row, normal, strict=False))
            for mean, row in zip(centre, _SPREAD, strict=True)
        )
        fit = ChinchillaFit("", math.exp(ln_e), math.exp(ln_a), math.exp(ln_b), alpha, beta)
        n, d = fit.optimum(flops)
        for column, value in zip(columns, (n, d, d / n, fit.loss(n, d)), strict=True):
            column.append(value)
    cut = round(_DRAWS * (1 - _BAND) / 2)
    parameters, tokens, ratio, loss = ((sorted(column)[cut], sorted(column)[-cut - 1]) for column in columns)
    return Band(parameters, tokens, ratio, loss)


def _notes(flops: float, optima: list[Optimum]) -> tuple[str, ...]:
    sizes = [optimum.parameters for optimum in optima]
    ratios = [optimum.tokens_per_parameter for optimum in optima]
    notes = [
        f"The laws disagree: {max(sizes) / min(sizes):.3g} times in size, from {min(ratios):.2g} to {max(ratios):.3g} "
        "tokens a parameter. At Chinchilla's own 5.76e23 FLOPs only Besiroglu's fit agrees with its rule of 20.",
        "Losses are of MassiveText and WebText2 in their own tokens: no promise for another text or tokenizer.",
    ]
    lowest, highest = _FITTED_FLOPS
    if not lowest <= flops <= highest:
        notes.append(
            f"{flops:.3g} FLOPs is {'below' if flops < lowest else 'above'} the runs that the Chinchilla fits rest on "
            f"({lowest:.2g} to {highest:.2g}): all three extrapolate."
        )
    return tuple(notes)
