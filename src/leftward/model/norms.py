"""Normalisation of the last axis. The statistics are computed in fp32 whatever the dtype of the input: a bf16 variance
keeps 8 bits, which is enough to change what a model says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from leftward.config import Config, NormWeight
from leftward.kernels import functions, native


class RMSNorm(nn.Module):
    """w · x / √(mean(x²) + ε) over the last axis (Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4)."""

    def __init__(self, width: int, eps: float, kind: NormWeight = "plain") -> None:
        super().__init__()
        self.eps, self.kind = eps, kind
        self.weight = None if kind == "none" else nn.Parameter(torch.ones(width))

    @property
    def factor(self) -> Tensor | None:
        return _factor(self.weight, self.kind)

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        return rms_norm(x, self.factor, self.eps)


class LayerNorm(nn.Module):
    """w · (x − μ) / √(σ² + ε) + b over the last axis (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, width: int, eps: float, kind: NormWeight = "plain", bias: bool = True) -> None:
        super().__init__()
        self.width, self.eps, self.kind = width, eps, kind
        self.weight = None if kind == "none" else nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    @property
    def factor(self) -> Tensor | None:
        return _factor(self.weight, self.kind)

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        # PyTorch's kernel holds its statistics in fp32 for a bf16 input too.
        factor = self.factor
        if factor is self.weight:
            return F.layer_norm(x, (self.width,), factor, self.bias, self.eps)
        bias = None if self.bias is None else self.bias.to(_statistics_dtype(x))
        return F.layer_norm(x.to(_statistics_dtype(x)), (self.width,), factor, bias, self.eps).to(x.dtype)


def make_norm(config: Config) -> nn.Module:
    """The norm of the residual stream that `config` asks for."""
    if config.norm == "layernorm":
        return LayerNorm(config.d_model, config.norm_eps, config.norm_weight, config.norm_bias)
    return RMSNorm(config.d_model, config.norm_eps, config.norm_weight)


def rms_norm(x: Tensor, factor: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of `x` [..., width], times `factor`, which may have any shape that broadcasts against x, such as one row
    a head."""
    if factor is None:
        return F.rms_norm(x.to(_statistics_dtype(x)), x.shape[-1:], eps=eps).to(x.dtype)
    if native.serves(x) and factor.ndim == 1:
        return functions.rms_norm(x, factor, eps)
    if torch.is_grad_enabled() and x.requires_grad:
        return _RMSNormWithGradient.apply(x, factor, eps)
    unit = F.rms_norm(x.to(_statistics_dtype(x)), x.shape[-1:], eps=eps)
    # A factor in fp32 is there for its precision; one in the input's dtype multiplies a rounded x, as everyone's does.
    return (unit.to(factor.dtype) * factor).to(x.dtype)


def _factor(weight: Tensor | None, kind: NormWeight) -> Tensor | None:
    """What a norm multiplies by. 1 + w is fp32: a bf16 sum would lose all but 8 bits of a small w."""
    if weight is None or kind == "plain":
        return weight
    return 1 + weight.to(_statistics_dtype(weight))


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _RMSNormWithGradient(torch.autograd.Function):
    """The same function with its gradient written out: half the memory traffic of PyTorch's composite on a CPU.

    With u = x / rms and g the incoming gradient: dw = Σ g · u, dx = (g w − u · mean(g w u)) / rms.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_statistics_dtype(x))
        scale = (norm.square() / x.shape[-1] + eps).rsqrt()
        unit = (x.to(scale.dtype) * scale).to(x.dtype)  # a product of two dtypes would take ten times as long on a CPU
        ctx.save_for_backward(unit, scale.to(x.dtype), factor)
        return (unit * factor).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, factor = ctx.saved_tensors
        grad_factor = (grad * unit).to(factor.dtype).sum_to_size(factor.shape)
        grad = (grad * factor).to(unit.dtype)
        total = (grad * unit).sum(dim=-1, keepdim=True)
        return torch.addcmul(grad, unit, total, value=-1 / grad.shape[-1]).mul_(scale), grad_factor, None
