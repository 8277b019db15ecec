"""The kernels as functions with gradients. Each takes what `native.serves`, and says what it is a faster form of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leftward.kernels import native

WIDEST_HEAD = 512


def rms_norm(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    """`model.norms.rms_norm` of `x` [..., width] with a `factor` [width]; rounded once."""
    return _RMSNorm.apply(x, factor, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, eps: float) -> Tensor:
        x, w = x.contiguous(), factor.float().contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        y, rstd = torch.empty_like(x), torch.empty(rows)
        native.call("rms_norm", x.dtype, x, w, y, rstd, rows, width, eps)
        ctx.save_for_backward(x, w, rstd)
        ctx.factor_dtype = factor.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w, rstd = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.zeros_like(w)
        native.call("rms_norm_back", x.dtype, grad.contiguous(), x, w, rstd, dx, dw, len(rstd), len(w))
        return dx, dw.to(ctx.factor_dtype), None


def split_heads(
    qkv: Tensor,
    n_heads: int,
    n_kv_heads: int,
    factors: tuple[Tensor, Tensor] | None,
    eps: float,
    angles: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, n_heads, T, head_dim], k and v [B, n_kv_heads, T, head_dim] out of the rows of one product, q and k
    normalised over each head and rotated.

    Args:
        qkv: [B, T, (n_heads + 2 n_kv_heads) · head_dim]
        factors: of q's norm and of k's, [head_dim]; None: no norm.
        angles: cos and sin [B or 1, T, 1, rope_dim] of pairs (i, i + rope_dim / 2), the sine negated for the first of
            a pair; None: no rotation.
    """
    wq, wk = factors or (None, None)
    cos, sin = angles or (None, None)
    return _SplitHeads.apply(qkv, wq, wk, cos, sin, n_heads, n_kv_heads, eps)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        wq: Tensor | None,
        wk: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        n_heads: int,
        n_kv_heads: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.contiguous()
        batch, length, width = qkv.shape
        head_dim = width // (n_heads + 2 * n_kv_heads)
        q = qkv.new_empty(batch, n_heads, length, head_dim)
        k, v = qkv.new_empty(2, batch, n_kv_heads, length, head_dim)
        ctx.factor_dtype = None if wq is None else wq.dtype
        wq, wk, cos, sin = (None if t is None else t.float().contiguous() for t in (wq, wk, cos, sin))
        rope_dim = 0 if cos is None else cos.shape[-1]
        ctx.angle_stride = 0 if cos is None or len(cos) == 1 else length * rope_dim
        rstd = None if wq is None else torch.empty(batch, length, n_heads + n_kv_heads)
        ctx.shape = (batch, length, n_heads, n_kv_heads, head_dim, rope_dim)
        native.call("split_heads", qkv.dtype, qkv, wq, wk, cos, sin, ctx.angle_stride, q, k, v, rstd, *ctx.shape, eps)
        # What is normalised has the gradient of its length; otherwise a gradient needs nothing of the input.
        ctx.save_for_backward(None if wq is None else qkv, wq, wk, cos, sin, rstd)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, wq, wk, cos, sin, rstd = ctx.saved_tensors
        batch, length, n_heads, n_kv_heads, head_dim, _ = ctx.shape
        dqkv = dq.new_empty(batch, length, (n_heads + 2 * n_kv_heads) * head_dim)
        dw = torch.zeros(2, head_dim)
        grads = (grad.contiguous() for grad in (dq, dk, dv))
        native.call(
            *("split_heads_back", dq.dtype, *grads, qkv, wq, wk, cos, sin, ctx.angle_stride, rstd, dqkv, dw),
            *ctx.shape,
        )
        of_q, of_k = (None, None) if wq is None else dw.to(ctx.factor_dtype)
        return dqkv, of_q, of_k, None, None, None, None, None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale · q kᵀ + causal mask) v, with the T × T weights kept for the gradient.

    Args:
        q: [B, n_heads, T, head_dim]
        k, v: [B, n_kv_heads, T, head_dim]
    """
    return _CausalAttention.apply(q, k, v, scale)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        batch, n_kv_heads, length, head_dim = k.shape
        # The queries that share a key are rows of one product.
        ctx.shape, groups = q.shape, batch * n_kv_heads
        q = q.reshape(groups, -1, head_dim)
        k, v = (t.reshape(groups, length, head_dim) for t in (k, v))
        weights = q @ k.mT  # [groups, n_heads / n_kv_heads · T, T]
        native.call("causal_softmax", q.dtype, weights, weights.numel() // length, length, scale)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale = scale
        return (weights @ v).view(ctx.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, weights = ctx.saved_tensors
        grad = grad.reshape(q.shape)
        length = k.shape[1]
        dv = weights.mT @ grad
        scores = grad @ v.mT
        native.call("causal_softmax_back", q.dtype, scores, weights, scores.numel() // length, length, ctx.scale)
        dq, dk = scores @ k, scores.mT @ q
        batch = ctx.shape[0]
        like_k = (batch, len(k) // batch, *k.shape[1:])
        return dq.view(ctx.shape), dk.view(like_k), dv.view(like_k), None


def swiglu(x: Tensor) -> Tensor:
    """`model.feedforward.swiglu`: silu(gate) · up of the halves of `x` [..., 2 · width]."""
    return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1] // 2
        y = x.new_empty(*x.shape[:-1], width)
        native.call("swiglu", x.dtype, x, y, y.numel() // width, width)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx, width = torch.empty_like(x), grad.shape[-1]
        native.call("swiglu_back", x.dtype, grad.contiguous(), x, dx, grad.numel() // width, width)
        return dx


def norm(tensors: Sequence[Tensor]) -> float:
    """The 2-norm of all numbers in `tensors`."""
    sums = torch.empty(len(tensors), dtype=torch.float64)
    for index, tensor in enumerate(tensors):
        native.call("sum_of_squares", tensor.dtype, tensor.contiguous(), sums[index], tensor.numel())
    return math.sqrt(sums.sum().item())


def cross_entropy_and_gradient(logits: Tensor, targets: Tensor, factor: float) -> Tensor:
    """The cross-entropy of each row of `logits` [N, V] in fp32 [N], 0 where the target is negative; `logits` becomes
    its gradient times `factor`."""
    losses = torch.empty(len(logits))
    native.call("cross_entropy", logits.dtype, logits, targets.contiguous(), losses, *logits.shape, factor)
    return losses
