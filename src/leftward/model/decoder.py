"""The Decoder: token ids in, next-token logits out, and the output at position t depends on nothing to its right.

This file is the place to start reading. Each part has a file of its own beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leftward.config import Config
from leftward.model.block import Block
from leftward.model.cache import KVCache
from leftward.model.masks import causal_mask
from leftward.model.norms import make_norm
from leftward.model.positions import rotary_angles


class Decoder(nn.Module):
    """embed → blocks → norm → head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        learned = config.positions == "learned"
        self.position_embed = nn.Embedding(config.max_seq_len, config.d_model) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        initialise(self)

    def forward(self, ids: Tensor, cache: KVCache | None = None, lengths: list[int] | None = None) -> Tensor:
        """Logits of the token that follows each position.

        Args:
            ids: [B, T] integers.
            cache: continue behind the tokens that it holds, and add these.
            lengths: with a cache, how many of the T ids of each row are real; the rest, at the right end, is padding.

        Returns:
            logits [B, T, vocab_size]

        Raises:
            ValueError: a position beyond max_seq_len, or more tokens than the cache can hold.
        """
        return self.head(self.hidden(ids, cache, lengths))

    def hidden(self, ids: Tensor, cache: KVCache | None = None, lengths: list[int] | None = None) -> Tensor:
        """What the head reads: the residual stream after the last norm, [B, T, D]. Arguments as in `forward`."""
        batch, n_new = ids.shape
        starts = cache.lengths if cache is not None else [0]
        longest = max(starts) + n_new
        if longest > self.config.max_seq_len:
            raise ValueError(f"a sequence of {longest} tokens is longer than max_seq_len {self.config.max_seq_len}")
        positions = torch.tensor(starts, device=ids.device)[:, None] + torch.arange(n_new, device=ids.device)
        x = self.embed(ids)  # [B, T, D]
        angles = None
        if self.position_embed is not None:
            x = x + self.position_embed(positions)
        else:
            angles = rotary_angles(self.config, positions, x.dtype)
        x = self.dropout(x)
        mask = causal_mask(starts, n_new, ids.device)
        for block in self.blocks:
            x = block(x, mask, angles, cache)
        if cache is not None:
            cache.advance(lengths or [n_new] * batch)
        return self.norm(x)

    @property
    def n_parameters(self) -> int:
        """Weights, each counted once (a tied head is the embedding)."""
        return sum(parameter.numel() for parameter in self.parameters())


def initialise(decoder: Decoder) -> None:
    """Every weight drawn in one place.

    Matrices and embeddings: N(0, 0.02²) as in GPT-2. The two matrices of a block that write to the residual stream
    start at zero, so that a fresh block is the identity (Zhang et al. 2019, arXiv 1901.09321; measured in
    docs/log.md). Norms: weight 1, bias 0.
    """
    for name, parameter in decoder.named_parameters():
        if name.endswith((".bias", ".o.weight", ".down.weight")):
            nn.init.zeros_(parameter)
        elif "norm" in name:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02)
