"""The residual block: attention mixes positions, the feed-forward works on each, and both add to the stream."""

from __future__ import annotations

from torch import Tensor, nn

from leftward.config import Config
from leftward.model.attention import Attention
from leftward.model.cache import KVCache, Rows
from leftward.model.experts import Experts
from leftward.model.feedforward import FeedForward
from leftward.model.masks import Mask
from leftward.model.norms import make_norm
from leftward.model.positions import Angles
from leftward.model.slots import Slots


class Block(nn.Module):
    """x ← x + attention(…), then x ← x + feed_forward(…), or both at once; the norms are where `Config.block` says."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.kind, self.scale = config.block, config.residual_scale
        before, behind = config.block != "output", config.block in ("sandwich", "output")
        self.attn_norm = make_norm(config) if before else nn.Identity()
        self.attn = Attention(config, layer)
        self.attn_out_norm = make_norm(config) if behind else nn.Identity()
        self.ff_norm = make_norm(config) if before and config.block != "parallel_shared" else nn.Identity()
        self.ff = Experts(config) if config.n_experts else FeedForward(config, config.d_ff)
        self.ff_out_norm = make_norm(config) if behind else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, masks: list[Mask], angles: Angles | None = None, cache: KVCache | Rows | Slots | None = None
    ) -> Tensor:  # [B, T, D] → [B, T, D]
        if self.kind == "post":
            x = self.attn_norm(x + self._scaled(self.attn(x, masks, angles, cache)))
            return self.ff_norm(x + self._scaled(self.ff(x)))
        normed = self.attn_norm(x)
        mixed = self._scaled(self.attn_out_norm(self.attn(normed, masks, angles, cache)))
        if self.kind == "parallel_shared":
            return x + mixed + self._scaled(self.ff(normed))
        if self.kind == "parallel":
            return x + mixed + self._scaled(self.ff(self.ff_norm(x)))
        x = x + mixed
        return x + self._scaled(self.ff_out_norm(self.ff(self.ff_norm(x))))

    def _scaled(self, output: Tensor) -> Tensor:
        output = self.dropout(output)
        return output if self.scale == 1.0 else output * self.scale
