"""Normalisation of the last axis. The statistics are computed in fp32 whatever the dtype of the input: a bf16 variance
keeps 8 bits, which is enough to change what a model says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from leftward.config import Config


class RMSNorm(nn.Module):
    """γ · x / √(mean(x²) + ε) over the last axis (Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """γ · (x − μ) / √(σ² + ε) + β over the last axis (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        # PyTorch's kernel holds its statistics in fp32 for a bf16 input too.
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(config: Config) -> nn.Module:
    """The norm of the residual stream that `config` asks for."""
    kind = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[config.norm]
    return kind(config.d_model, config.norm_eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `x` [..., width]; `weight` may be any shape that broadcasts against x, such as one row a head."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _RMSNormWithGradient.apply(x, weight, eps)
    return F.rms_norm(x.to(_statistics_dtype(x)), x.shape[-1:], eps=eps).to(x.dtype) * weight


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _RMSNormWithGradient(torch.autograd.Function):
    """The same function with its gradient written out: half the memory traffic of PyTorch's composite on a CPU.

    With u = x / rms and g the incoming gradient: dγ = Σ g · u, dx = (g γ − u · mean(g γ u)) / rms.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_statistics_dtype(x))
        scale = (norm.square() / x.shape[-1] + eps).rsqrt().to(x.dtype)
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        grad_weight = (grad * unit).sum_to_size(weight.shape)
        grad = grad * weight
        total = (grad * unit).sum(dim=-1, keepdim=True)
        return torch.addcmul(grad, unit, total, value=-1 / grad.shape[-1]).mul_(scale), grad_weight, None
