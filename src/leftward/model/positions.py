"""How a model knows the order of its tokens: vectors added to the embedding, a rotation of queries and keys, or scores
that fall with distance.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leftward.config import Config, RopeScaling

# ---- added to the embedding


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """[B or 1, T] → [B or 1, T, width]: sin(p / 10000^(2i / width)) in even places, the cosines in odd ones.

    Vaswani et al. 2017, arXiv 1706.03762, section 3.5.
    """
    index = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    turn = positions[..., None].float() * 10_000.0 ** (-index / width)
    return torch.stack((turn.sin(), turn.cos()), dim=-1).flatten(-2)[..., :width]


# ---- scores that fall with distance


def alibi_slopes(n_heads: int, mpt_order: bool = False) -> list[float]:
    """A slope a head (Press et al. 2021, arXiv 2108.12409, section 3, and the authors' code for other than powers of
    two; MPT's code takes every second slope of the next power of two first)."""
    powers_of_two = 1 << (n_heads.bit_length() - 1)
    if powers_of_two == n_heads:
        return _geometric(n_heads)
    double = _geometric(2 * powers_of_two)
    if mpt_order:
        return [*double[1::2], *double[0::2]][:n_heads]
    return [*_geometric(powers_of_two), *double[0::2][: n_heads - powers_of_two]]


def head_slopes(config: Config) -> Tensor | None:
    """[n_heads]: by how much the scores of each head fall a place of distance; None where positions are not ALiBi."""
    if config.positions not in ("alibi", "alibi_mpt"):
        return None
    return torch.tensor(alibi_slopes(config.n_heads, config.positions == "alibi_mpt")) * config.alibi_scale


def _geometric(n: int) -> list[float]:
    return [2.0 ** (-8.0 * k / n) for k in range(1, n + 1)]


# ---- rotation


class Angles(NamedTuple):
    """cos and sin of the angle by which each pair of a head turns at each position: [B or 1, T, 1, rope_dim], in the
    order of the rotated numbers, the sine negated for the first of a pair. The third axis stands for the heads."""

    cos: Tensor
    sin: Tensor
    adjacent: bool


def rotary_angles(config: Config, positions: Tensor, dtype: torch.dtype, local: bool = False) -> Angles:
    """The angles at integer `positions` [B or 1, T].

    Su et al. 2021, arXiv 2104.09864, section 3.4.2. Computed in fp32 and only then cast: at position 100,000 an angle
    in bf16 would be off by whole turns.
    """
    values, factor = frequencies(config, local)
    adjacent = config.rope_pairing == "adjacent"
    inv_freq = torch.tensor(values, device=positions.device)
    turn = (positions[..., None].float() * inv_freq).unsqueeze(2)  # [B or 1, T, 1, rope_dim / 2]
    cos, sin = turn.cos(), turn.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    if adjacent:
        both = (torch.stack((cos, cos), dim=-1).flatten(-2), torch.stack((-sin, sin), dim=-1).flatten(-2))
    else:
        both = (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
    return Angles(both[0].to(dtype), both[1].to(dtype), adjacent)


@functools.lru_cache(maxsize=64)
def frequencies(config: Config, local: bool = False) -> tuple[tuple[float, ...], float]:
    """Radians a position of each pair, base^(−2i / rope_dim) unless scaled, and what queries and keys are multiplied
    by. Local layers with a base of their own are not scaled."""
    base = config.rope_local_base if local else config.rope_base
    dim, scaling = config.rope_dim, config.rope_scaling
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if scaling is None or (local and base != config.rope_base):
        return tuple(plain), 1.0
    scale = {"linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
    return tuple(scale[scaling.kind](plain, config, scaling, base)), _attention_factor(config, scaling)


def _linear(plain: list[float], config: Config, scaling: RopeScaling, base: float) -> list[float]:
    return [frequency / scaling.factor for frequency in plain]


def _dynamic(plain: list[float], config: Config, scaling: RopeScaling, base: float) -> list[float]:
    """base · (factor · length / original − (factor − 1))^(dim / (dim − 2)), the length being max_seq_len."""
    dim = config.rope_dim
    if config.max_seq_len <= scaling.original_max_seq_len or dim == 2:
        return plain
    stretch = scaling.factor * config.max_seq_len / scaling.original_max_seq_len - (scaling.factor - 1)
    return [(base * stretch ** (dim / (dim - 2))) ** (-2 * i / dim) for i in range(dim // 2)]


def _llama3(plain: list[float], config: Config, scaling: RopeScaling, base: float) -> list[float]:
    """Pairs that turn often within the original context stay, those that turn seldom are divided, between the two a
    linear passage (Llama 3.1's reference code)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    scaled = []
    for frequency in plain:
        turns = scaling.original_max_seq_len * frequency / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        scaled.append(kept * frequency + (1 - kept) * frequency / scaling.factor)
    return scaled


def _yarn(plain: list[float], config: Config, scaling: RopeScaling, base: float) -> list[float]:
    """Peng et al. 2023, arXiv 2309.00071, section 3.2: a linear passage between the pairs that turn beta_fast and
    beta_slow times within the original context."""
    dim = config.rope_dim

    def pair_of(turns: float) -> float:
        return dim * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = (last - first) or 0.001  # transformers' way out of a division by zero
    scaled = []
    for i, frequency in enumerate(plain):
        divided = min(1.0, max(0.0, (i - first) / width))
        scaled.append((1 - divided) * frequency + divided * frequency / scaling.factor)
    return scaled


def _longrope(plain: list[float], config: Config, scaling: RopeScaling, base: float) -> list[float]:
    """Ding et al. 2024, arXiv 2402.13753: each pair has its own divisor, found by search."""
    is_long = config.max_seq_len > scaling.original_max_seq_len
    factors = scaling.long_factors if is_long else scaling.short_factors
    return [frequency / factor for frequency, factor in zip(plain, factors, strict=True)]


def _attention_factor(config: Config, scaling: RopeScaling) -> float:
    """YaRN, section 3.4: 0.1 ln(factor) + 1. LongRoPE: √(1 + ln(factor) / ln(original)), the factor being
    max_seq_len / original where none is given."""
    if scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "yarn":
        return 0.1 * math.log(scaling.factor) + 1.0
    original = scaling.original_max_seq_len
    factor = scaling.factor if scaling.factor > 1 else config.max_seq_len / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turn the pairs of the first rope_dim numbers of each head of `x` [B, T, H, head_dim] by their angles."""
    rope_dim = angles.cos.shape[-1]
    if rope_dim == x.shape[-1]:
        return _Rotate.apply(x, *angles)
    return torch.cat((_Rotate.apply(x[..., :rope_dim], *angles), x[..., rope_dim:]), dim=-1)


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back; written out because autograd would keep four intermediates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.adjacent = adjacent
        return torch.addcmul(x * cos, _partners(x, adjacent), sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return torch.addcmul(grad * cos, _partners(grad, ctx.adjacent), sin, value=-1), None, None, None


def _partners(x: Tensor, adjacent: bool) -> Tensor:
    """Each number's other one of the pair."""
    if adjacent:
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)
