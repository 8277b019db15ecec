"""From logits to the next token: each setting of `Sampling` as a pure function on logits.

The order is the field's (transformers, vLLM): repetition penalty, temperature, top_k, top_p, min_p, then a draw. Every
sequence draws from random numbers of its own, so its neighbours in a batch never change what it says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leftward.errors import UserError
from leftward.generation.settings import Sampling

# Each of the following takes logits [B, V] in fp32 and gives new ones, −inf for a token that is out.


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """`seen` [B, V] is True for tokens of the prompt and the output."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide, after moving the largest logit to 0: the same distribution, and no temperature overflows."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted / max(temperature, torch.finfo(torch.float32).tiny)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Tokens as likely as the k-th stay too."""
    smallest = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    ascending, order = logits.sort(dim=-1)
    out = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    out[..., -1] = False  # the most likely token always stays
    return logits.masked_fill(out.scatter(-1, order, out), -torch.inf)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)


def choose(logits: Tensor, sampling: Sampling, draws: list[float], seen: Tensor | None = None) -> list[int]:
    """The next token of each row.

    Args:
        logits: [B, V]
        draws: a random number in [0, 1) for each row.
        seen: [B, V], where there is a repetition penalty.

    Raises:
        UserError: the logits are not numbers.
    """
    logits = logits.float()
    # A NaN anywhere makes the maximum NaN.
    if not logits.amax(dim=-1).isfinite().all():
        raise UserError("the model's logits are not finite numbers: its weights are damaged or its training diverged")
    if seen is not None:
        logits = penalise_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits.argmax(dim=-1).tolist()
    logits = apply_temperature(logits, sampling.temperature)
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p:
        logits = keep_min_p(logits, sampling.min_p)
    return _draw(logits, draws)


def _draw(logits: Tensor, draws: list[float]) -> list[int]:
    """Where each draw falls on the row's cumulative probability: one random number a token, the same on any device."""
    # In fp64: an fp32 sum over 100,000 tokens would forget the unlikely ones.
    # On the CPU: not every device has fp64, and the token goes there anyway.
    cumulative = logits.cpu().double().softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    at = torch.tensor(draws, dtype=torch.float64)[:, None] * total
    # Below the total, so that the token found has a probability above 0.
    at = torch.minimum(at, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, at, right=True)[:, 0].tolist()
