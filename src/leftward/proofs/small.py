"""The same architecture, small: what a Config says is tried on a Decoder of a second, not of a day. No torch."""

from __future__ import annotations

import dataclasses
import math

from leftward.config import Config, shortest_pattern

_LONGEST = 48  # tokens
_WINDOW = 6  # shorter than what the proofs read
_MOST_LAYERS = 8
_MOST_GROUPED = 8
_EXPERTS = 8


def scaled_down(config: Config) -> Config:
    """`config` with small numbers in it, and every choice, pattern and ratio as it was.

    Kept: whole periods of the layers' patterns, query heads a key/value head (up to 8), whether the number of heads is
    a power of two (ALiBi's slopes ask), whether heads are as wide as d_model / n_heads, windows with an outside, how
    far the context was stretched, the scales as shares of their usual values.
    """
    attention, position = _shortened(config.attention_pattern), _shortened(config.position_pattern)
    group = min(config.n_heads // config.n_kv_heads, _MOST_GROUPED)
    is_power = config.n_heads & (config.n_heads - 1) == 0
    n_kv_heads = 1 if config.n_kv_heads == 1 else 3 if not is_power else 4 if group == 1 else 2
    n_heads = n_kv_heads * group
    widths = (n for n in range(4, 130, 2) if n * n_heads >= 24 and _is_even(n * config.rope_fraction))
    head_dim = next(widths, config.head_dim)
    fits = config.head_dim * config.n_heads == config.d_model
    d_model = n_heads * head_dim if fits else n_heads * head_dim + 8
    max_seq_len = min(config.max_seq_len, _LONGEST)
    n_experts = min(config.n_experts, _EXPERTS)
    per_token = min(config.n_experts_per_token, max(1, n_experts - (config.n_experts_per_token < config.n_experts)))
    scaling = config.rope_scaling
    if scaling is not None:
        shrunk = max(1, round(scaling.original_max_seq_len * max_seq_len / config.max_seq_len))
        pairs = round(head_dim * config.rope_fraction) // 2
        scaling = dataclasses.replace(
            scaling,
            original_max_seq_len=shrunk,
            short_factors=_thinned(scaling.short_factors, pairs),
            long_factors=_thinned(scaling.long_factors, pairs),
        )
    is_usual = config.attn_scale == config.head_dim**-0.5
    is_root = math.isclose(config.embed_scale, math.sqrt(config.d_model), rel_tol=1e-3)
    return dataclasses.replace(
        config,
        vocab_size=min(config.vocab_size, 61),
        vocab_multiple=1 if config.vocab_multiple == 1 else 8,
        max_seq_len=max_seq_len,
        n_layers=min(config.n_layers, max(2, len(attention), len(position))),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        window=None if config.window is None else min(config.window, _WINDOW),
        attention_pattern=attention,
        position_pattern=position,
        attn_scale=head_dim**-0.5 if is_usual else config.attn_scale * math.sqrt(config.head_dim / head_dim),
        rope_scaling=scaling,
        d_ff=32 if n_experts else 2 * d_model,
        n_experts=n_experts,
        n_experts_per_token=per_token if n_experts else config.n_experts_per_token,
        d_shared=min(config.d_shared, 16),
        embed_scale=math.sqrt(d_model) if is_root else config.embed_scale,
    )


def _shortened(pattern: str) -> str:
    """The shortest pattern that repeats to the same; where that is long still, a short one with every letter."""
    pattern = shortest_pattern(pattern)
    if len(pattern) <= _MOST_LAYERS:
        return pattern
    short = pattern[:_MOST_LAYERS]
    return short if set(short) == set(pattern) else short[:-1] + next(iter(set(pattern) - set(short)))


def _thinned(numbers: tuple[float, ...], n: int) -> tuple[float, ...]:
    """`n` of the numbers, spread over all of them."""
    return tuple(numbers[i * len(numbers) // n] for i in range(n)) if numbers else ()


def _is_even(width: float) -> bool:
    return round(width) % 2 == 0 and round(width) > 0
