"""The residual block: attention mixes positions, the feed-forward works on each, and both add to the stream."""

from __future__ import annotations

from torch import Tensor, nn

from leftward.config import Config
from leftward.model.attention import Attention
from leftward.model.cache import KVCache
from leftward.model.feedforward import FeedForward
from leftward.model.masks import Mask
from leftward.model.norms import make_norm
from leftward.model.positions import Angles


class Block(nn.Module):
    """x ← x + attention(norm(x)), then x ← x + feed_forward(norm(x)): pre-norm (Xiong et al. 2020,
    arXiv 2002.04745).
    """

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.attn_norm = make_norm(config)
        self.attn = Attention(config, layer)
        self.ff_norm = make_norm(config)
        self.ff = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, mask: Mask, angles: Angles | None = None, cache: KVCache | None = None
    ) -> Tensor:  # [B, T, D] → [B, T, D]
        x = x + self.dropout(self.attn(self.attn_norm(x), mask, angles, cache))
        return x + self.dropout(self.ff(self.ff_norm(x)))
