"""Causal self-attention with grouped heads, and the one place that calls an attention kernel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leftward.config import Config
from leftward.model.cache import KVCache
from leftward.model.masks import Mask
from leftward.model.norms import RMSNorm, rms_norm
from leftward.model.positions import Angles, rotate


class Attention(nn.Module):
    """softmax(q kᵀ / √head_dim + mask) v; each key and value serves n_heads / n_kv_heads queries."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.dropout = config.dropout
        heads = config.n_heads + 2 * config.n_kv_heads  # the rows of `qkv`: all queries, then all keys, then all values
        self.qkv = nn.Linear(config.d_model, heads * config.head_dim, bias=config.qkv_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.o = nn.Linear(config.n_heads * config.head_dim, config.d_model, bias=config.attn_out_bias)

    def forward(
        self, x: Tensor, mask: Mask, angles: Angles | None = None, cache: KVCache | None = None
    ) -> Tensor:  # [B, T, D] → [B, T, D]
        # Queries and keys get the same norm and rotation, so they go through both as one tensor.
        n_qk = self.n_heads + self.n_kv_heads
        qk, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split((n_qk, self.n_kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            weights = [self.q_norm.weight.expand(self.n_heads, -1), self.k_norm.weight.expand(self.n_kv_heads, -1)]
            qk = rms_norm(qk, torch.cat(weights), self.q_norm.eps)
        if angles is not None:
            qk = rotate(qk, angles)
        q, k = qk.transpose(1, 2).split((self.n_heads, self.n_kv_heads), dim=1)  # [B, heads, T, head_dim]
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        mixed = attend(q, k, v, mask, dropout=self.dropout if self.training else 0.0)
        return self.o(mixed.transpose(1, 2).flatten(2))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """Attention of queries [B, n_heads, T, head_dim] over keys and values [B, n_kv_heads, S, head_dim]."""
    if _explicit_is_faster(q, mask):
        return _attend_explicitly(q, k, v, dropout)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask.dense, is_causal=mask.is_causal, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
    )


def _explicit_is_faster(q: Tensor, mask: Mask) -> bool:
    """In bf16 training on a CPU the gradient of PyTorch's fused kernel takes 7 times as long as two batched products
    at T = 64, twice at T = 256; beyond that the T × T scores would cost too much memory."""
    trains = torch.is_grad_enabled() and q.requires_grad and q.device.type == "cpu" and q.dtype == torch.bfloat16
    return trains and mask.is_causal and q.shape[2] <= 512


def _attend_explicitly(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    batch, heads, length, head_dim = q.shape
    if k.shape[1] != heads:
        k = k.repeat_interleave(heads // k.shape[1], dim=1)
        v = v.repeat_interleave(heads // v.shape[1], dim=1)
    q, k, v = (t.reshape(batch * heads, length, head_dim) for t in (q, k, v))
    future = torch.full((length, length), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(future.expand(batch * heads, -1, -1), q, k.transpose(1, 2), alpha=head_dim**-0.5)
    weights = F.dropout(scores.softmax(dim=-1), dropout)
    return torch.bmm(weights, v).view(batch, heads, length, head_dim)
