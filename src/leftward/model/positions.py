"""How a model knows the order of its tokens: a learned vector a position, or a rotation of queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from leftward.config import Config


class Angles(NamedTuple):
    """cos and sin of the angle by which each pair of a head turns at each position: [B or 1, T, 1, head_dim], the two
    halves of the last axis alike (the sines of the first half negated), the axis before it standing for the heads."""

    cos: Tensor
    sin: Tensor


def rotary_angles(config: Config, positions: Tensor, dtype: torch.dtype) -> Angles:
    """The angles at integer `positions` [B or 1, T]: position · base^(−2i / head_dim) for pair i.

    Su et al. 2021, arXiv 2104.09864, section 3.4.2. Computed in fp32 and only then cast: at position 100,000 an angle
    in bf16 would be off by whole turns.
    """
    index = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    inv_freq = config.rope_base ** (-index / config.head_dim)
    turn = (positions[..., None].float() * inv_freq).unsqueeze(2)  # [B or 1, T, 1, head_dim / 2]
    cos, sin = turn.cos(), turn.sin()
    return Angles(torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype))


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of `x` [B, T, H, head_dim] by their angles."""
    return _Rotate.apply(x, *angles)


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back; written out because autograd would keep four intermediates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, _swap_halves(x), sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return torch.addcmul(grad * cos, _swap_halves(grad), sin, value=-1), None, None


def _swap_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)
