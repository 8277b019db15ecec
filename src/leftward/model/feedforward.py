"""The feed-forward sublayer: each position on its own, out to d_ff and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leftward.config import Config
from leftward.kernels import functions, native


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up of the two halves of `x` (Shazeer 2020, arXiv 2002.05202)."""
    if native.serves(x):
        return functions.swiglu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(x: Tensor) -> Tensor:
    """gelu(gate) · up (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def geglu_tanh(x: Tensor) -> Tensor:
    """The same with GELU's approximation, as Gemma has it."""
    gate, up = x.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def swiglu_clamped(x: Tensor) -> Tensor:
    """g · σ(1.702 g) · (up + 1), with g at most 7 and up between −7 and 7 (gpt-oss, arXiv 2508.10925)."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU that GPT-2 uses."""
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """max(0, x)² (So et al. 2021, arXiv 2109.08668)."""
    return F.relu(x).square()


# feed_forward → what stands between the two matrices
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": geglu_tanh,
    "swiglu_clamped": swiglu_clamped,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "relu2": relu2,
}


class FeedForward(nn.Module):
    """down(f(up(x))). Where f is gated, `up` is twice as wide: its first d_ff rows are the gate."""

    def __init__(self, config: Config, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, 2 * d_ff if config.is_gated else d_ff, bias=config.ff_bias)
        self.activation = ACTIVATIONS[config.feed_forward]
        self.down = nn.Linear(d_ff, config.d_model, bias=config.ff_bias)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D] → [B, T, D]
        return self.down(self.activation(self.up(x)))
