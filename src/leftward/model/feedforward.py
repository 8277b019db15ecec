"""The feed-forward sublayer: each position on its own, out to d_ff and back."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from leftward.config import Config


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up of the two halves of `x` (Shazeer 2020, arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU that GPT-2 uses."""
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """max(0, x)² (So et al. 2021, arXiv 2109.08668)."""
    return F.relu(x).square()


# feed_forward → what stands between the two matrices
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": swiglu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
}


class FeedForward(nn.Module):
    """down(f(up(x))). Where f is gated, `up` is twice as wide: its first d_ff rows are the gate."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = 2 * config.d_ff if config.is_gated else config.d_ff
        self.up = nn.Linear(config.d_model, width, bias=config.ff_bias)
        self.activation = ACTIVATIONS[config.feed_forward]
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.ff_bias)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D] → [B, T, D]
        return self.down(self.activation(self.up(x)))
