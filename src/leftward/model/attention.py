"""Self-attention with grouped heads, and the one place that calls an attention kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leftward.config import Config
from leftward.kernels import functions, native
from leftward.model.cache import KVCache, Rows
from leftward.model.masks import Mask
from leftward.model.norms import RMSNorm, rms_norm
from leftward.model.positions import Angles, rotate
from leftward.model.slots import Slots

_SCORES_AT_ONCE = 1 << 24  # where the kernel can't do without a mask as a tensor: queries × keys × heads × rows


class Attended(NamedTuple):
    """What a kernel has made of queries, and of the keys and values that they may see, those of the cache among them.
    Hooks on `Attention.attended` see it (inspection/)."""

    mixed: Tensor
    """[B, n_heads, T, head_dim]"""
    q: Tensor
    """[B, n_heads, T, head_dim]"""
    k: Tensor
    """[B, n_kv_heads, S, head_dim], and v too."""
    v: Tensor
    mask: Mask
    weights: Tensor | None = None
    """Where a hook has put others in the place of those that follow from q and k: [B, n_heads, T, S]."""


class Attention(nn.Module):
    """softmax(scale · q kᵀ + mask) v; each key and value serves n_heads / n_kv_heads queries."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.scale, self.softcap, self.dropout = config.attn_scale, config.attn_softcap, config.dropout
        heads = config.n_heads + 2 * config.n_kv_heads  # the rows of `qkv`: all queries, then all keys, then all values
        self.qkv = nn.Linear(config.d_model, heads * config.head_dim, bias=config.qkv_bias)
        self.eps, self.norms_whole = config.norm_eps, config.qk_norm == "whole"
        has_norm, eps, kind = config.qk_norm != "none", config.norm_eps, config.norm_weight
        q_width, k_width = (config.n_heads, config.n_kv_heads) if self.norms_whole else (1, 1)
        self.q_norm = RMSNorm(q_width * config.head_dim, eps, kind) if has_norm else None
        self.k_norm = RMSNorm(k_width * config.head_dim, eps, kind) if has_norm else None
        self.sinks = nn.Parameter(torch.zeros(config.n_heads)) if config.attn_sinks else None
        # Places for hooks, before the kernel and behind it, that are nothing else.
        self.attending, self.attended = nn.Identity(), nn.Identity()
        self.o = nn.Linear(config.n_heads * config.head_dim, config.d_model, bias=config.attn_out_bias)

    def forward(
        self, x: Tensor, masks: list[Mask], angles: Angles | None = None, cache: KVCache | Rows | Slots | None = None
    ) -> Tensor:  # [B, T, D] → [B, T, D]
        """`masks` is one for all rows, or with `Rows` one for each."""
        q, k, v = self._heads(self.qkv(x), angles)  # [B, heads, T, head_dim]
        if isinstance(cache, Rows):
            mixed = torch.zeros_like(q)
            for row, (own, mask) in enumerate(zip(cache.caches, masks, strict=True)):
                one, real = slice(row, row + 1), slice(0, mask.queries.shape[1])
                mixed[one, :, real] = self._attend(q[one, :, real], k[one, :, real], v[one, :, real], mask, own)
        else:
            mixed = self._attend(q, k, v, masks[0], cache)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, cache: KVCache | Slots | None) -> Tensor:
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        q, k, v, mask = self.attending((q, k, v, mask))
        dropout = self.dropout if self.training else 0.0
        mixed = attend(q, k, v, mask, scale=self.scale, softcap=self.softcap, sinks=self.sinks, dropout=dropout)
        attended: Attended = self.attended(Attended(mixed, q, k, v, mask))
        return attended.mixed

    def _heads(self, qkv: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        if native.serves(qkv) and self._has_plain_heads(angles):
            of_q, of_k = (None if norm is None else norm.factor for norm in (self.q_norm, self.k_norm))
            factors = None if of_q is None or of_k is None else (of_q, of_k)
            turns = None if angles is None else (angles.cos, angles.sin)
            return functions.split_heads(qkv, self.n_heads, self.n_kv_heads, factors, self.eps, turns)
        # Queries and keys get the same norm and rotation, so they go through both as one tensor.
        n_qk = self.n_heads + self.n_kv_heads
        qk, v = qkv.unflatten(-1, (-1, self.head_dim)).split((n_qk, self.n_kv_heads), dim=2)
        qk = self._normalised(qk)
        if angles is not None:
            qk = rotate(qk, angles)
        q, k = qk.transpose(1, 2).split((self.n_heads, self.n_kv_heads), dim=1)
        return q, k, v.transpose(1, 2)

    def _has_plain_heads(self, angles: Angles | None) -> bool:
        """Whether the kernel has this norm and rotation."""
        has_norm = self.q_norm is None or (self.q_norm.weight is not None and not self.norms_whole)
        return has_norm and self.head_dim <= functions.WIDEST_HEAD and (angles is None or not angles.adjacent)

    def _normalised(self, qk: Tensor) -> Tensor:  # [B, T, n_heads + n_kv_heads, head_dim]
        if self.q_norm is None or self.k_norm is None:
            return qk
        if self.norms_whole:
            q, k = qk.split((self.n_heads, self.n_kv_heads), dim=2)
            normed = torch.cat((self.q_norm(q.flatten(2)), self.k_norm(k.flatten(2))), dim=2)
            return normed.unflatten(2, (-1, self.head_dim))
        of_q, of_k = self.q_norm.factor, self.k_norm.factor
        factor = None
        if of_q is not None and of_k is not None:
            factor = torch.cat((of_q.expand(self.n_heads, -1), of_k.expand(self.n_kv_heads, -1)))
        return rms_norm(qk, factor, self.q_norm.eps)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of queries [B, n_heads, T, head_dim] over keys and values [B, n_kv_heads, S, head_dim].

    Args:
        sinks: [n_heads] logits.
    """
    is_plain = mask.slopes is None and softcap is None and sinks is None
    if is_plain and mask.shortcut is not None:
        if _batched_products_are_faster(q, mask):
            if native.serves(q) and not dropout:
                return functions.causal_attention(q, k, v, scale)
            return _attend_by_batched_products(q, k, v, scale, dropout)
        is_causal = mask.shortcut == "causal"
        is_grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, dropout_p=dropout, scale=scale, enable_gqa=is_grouped
        )
    blocks = []
    for start, stop in _query_blocks(q, k, mask):
        rows, columns = slice(start, stop), mask.columns(start, stop)
        part = (q[:, :, rows], k[:, :, columns], v[:, :, columns])
        bias = None if mask.slopes is None else mask.bias(rows, columns)
        blocks.append(_attend_masked(*part, mask.visible(rows, columns), bias, scale, softcap, sinks, dropout))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _query_blocks(q: Tensor, k: Tensor, mask: Mask) -> list[tuple[int, int]]:
    """Queries that are worked on together, as (start, stop): never more scores than `_SCORES_AT_ONCE`, and where it
    pays few of keys that no query of the block can see."""
    batch, heads, n_queries, _ = q.shape
    n_keys, block = k.shape[2], n_queries
    if mask.offset is not None and n_queries > 512:
        block = max(256, mask.window or 0)
        n_keys = n_keys if mask.window is None else min(n_keys, block + 2 * mask.window)
    block = max(1, min(block, _SCORES_AT_ONCE // (batch * heads * n_keys)))
    return [(start, min(start + block, n_queries)) for start in range(0, n_queries, block)]


def _attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """With the mask as a tensor [B or 1, 1, t, s], and what PyTorch's kernel lacks written out."""
    if not is_written_out(q.dtype, bias is not None, softcap):
        allowed = visible if bias is None else bias.masked_fill(~visible, -torch.inf)
        if sinks is not None:  # a key and a value of zeros, whose score is the sink
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            if bias is None:
                allowed = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill(~visible, -torch.inf)
            allowed = torch.cat((allowed.expand(-1, q.shape[1], -1, -1), _column(sinks, allowed)), dim=-1)
        is_grouped = q.shape[1] != k.shape[1]
        if is_grouped and allowed.shape[1] == 1 and q.shape[2] == 1:
            # One query a head: those that share a head's keys are that head's queries. A GPU's kernels that take a mask
            # know no groups, for which the keys would be copied.
            q = q.unflatten(1, (k.shape[1], -1)).squeeze(3)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scale)
            return mixed.flatten(1, 2).unsqueeze(2)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scale, enable_gqa=is_grouped
        )
    k, v = for_each_head(q, k, v)
    weights = attention_weights(attention_scores(q, k, bias, scale, softcap), visible, sinks)
    return F.dropout(weights.to(v.dtype), dropout) @ v


def is_written_out(dtype: torch.dtype, has_bias: bool, softcap: float | None) -> bool:
    """Whether attention with a mask as a tensor is products and a softmax, and not PyTorch's kernel."""
    return softcap is not None or (has_bias and dtype != torch.float32)


def attention_scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """What the mask and the softmax work on, at least in fp32: [B, n_heads, t, s].

    Args:
        q, k: [B, n_heads, t or s, head_dim]; their products are rounded to their dtype.
        bias: ALiBi's.
    """
    products = q @ k.mT
    scores = products.to(torch.promote_types(products.dtype, torch.float32))
    # Nothing that is changed in place here is needed for a gradient.
    scores = scores * scale if softcap is None else scores.mul_(scale / softcap).tanh_() * softcap
    if bias is not None:
        scores += bias
    return scores


def attention_weights(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax over the keys that are visible, [B, n_heads, t, s]. Changes `scores`."""
    # The least number and not −∞: a padded query may see no key at all, and a NaN would find its way to the real ones.
    scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
    if sinks is None:
        return scores.softmax(dim=-1)
    return torch.cat((scores, _column(sinks, scores)), dim=-1).softmax(dim=-1)[..., :-1]


def _column(sinks: Tensor, scores: Tensor) -> Tensor:
    """[n_heads] as one more key's scores: [B or 1, n_heads, t, 1]."""
    return sinks.to(scores.dtype)[:, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)


def for_each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, n_heads, S, head_dim], those of a group repeated."""
    group = q.shape[1] // k.shape[1]
    return (k, v) if group == 1 else (k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def _batched_products_are_faster(q: Tensor, mask: Mask) -> bool:
    """In bf16 training on a CPU the gradient of PyTorch's fused kernel takes 7 times as long as two batched products
    at T = 64, twice at T = 256; beyond that the T × T scores would cost too much memory."""
    trains = torch.is_grad_enabled() and q.requires_grad and q.device.type == "cpu" and q.dtype == torch.bfloat16
    return trains and mask.shortcut == "causal" and q.shape[2] <= 512


def _attend_by_batched_products(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float) -> Tensor:
    batch, heads, length, head_dim = q.shape
    k, v = for_each_head(q, k, v)
    q, k, v = (t.reshape(batch * heads, length, head_dim) for t in (q, k, v))
    future = torch.full((length, length), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(future.expand(batch * heads, -1, -1), q, k.transpose(1, 2), alpha=scale)
    weights = F.dropout(scores.softmax(dim=-1), dropout)
    return torch.bmm(weights, v).view(batch, heads, length, head_dim)
