"""The residual block: attention mixes positions, the feed-forward works on each, and both add to the stream."""

from __future__ import annotations

from torch import Tensor, nn

from leftward.config import Config
from leftward.model.attention import Attention
from leftward.model.cache import KVCache
from leftward.model.experts import Experts
from leftward.model.feedforward import FeedForward
from leftward.model.masks import Mask
from leftward.model.norms import make_norm
from leftward.model.positions import Angles

# Which norms a block has. Before the sublayers, behind them, and after their sum.
_BEFORE = ("pre", "sandwich", "parallel", "parallel_shared")
_BEHIND = ("sandwich", "output")
_AFTER = ("post",)


class Block(nn.Module):
    """x ← x + attention(…), then x ← x + feed_forward(…), or both at once; the norms are where `Config.block` says."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.kind = config.block

        def norm_if(kinds: tuple[str, ...]) -> nn.Module | None:
            return make_norm(config) if config.block in kinds else None

        self.attn_norm = norm_if((*_BEFORE, *_AFTER))
        self.attn = Attention(config, layer)
        self.attn_out_norm = norm_if(_BEHIND)
        self.ff_norm = None if config.block == "parallel_shared" else norm_if((*_BEFORE, *_AFTER))
        self.ff = Experts(config) if config.n_experts else FeedForward(config, config.d_ff)
        self.ff_out_norm = norm_if(_BEHIND)
        self.dropout = nn.Dropout(config.dropout)
        self.scale = config.residual_scale

    def forward(
        self, x: Tensor, mask: Mask, angles: Angles | None = None, cache: KVCache | None = None
    ) -> Tensor:  # [B, T, D] → [B, T, D]
        if self.kind in ("parallel", "parallel_shared"):
            normed = _apply(self.attn_norm, x)
            mixed = self.attn(normed, mask, angles, cache)
            worked = self.ff(normed if self.ff_norm is None else self.ff_norm(x))
            return x + self._scaled(mixed) + self._scaled(worked)
        if self.kind == "post":
            x = _apply(self.attn_norm, x + self._scaled(self.attn(x, mask, angles, cache)))
            return _apply(self.ff_norm, x + self._scaled(self.ff(x)))
        mixed = self.attn(_apply(self.attn_norm, x), mask, angles, cache)
        x = x + self._scaled(_apply(self.attn_out_norm, mixed))
        worked = self.ff(_apply(self.ff_norm, x))
        return x + self._scaled(_apply(self.ff_out_norm, worked))

    def _scaled(self, output: Tensor) -> Tensor:
        output = self.dropout(output)
        return output if self.scale == 1.0 else output * self.scale


def _apply(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
