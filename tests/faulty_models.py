"""Models with one fault each, of the kinds that people get silently wrong, and their healthy originals.

Faults go into our own Decoder (a changed mask, cache or class) and into plain modules as people write them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leftward import Config
from leftward.model.decoder import Decoder
from leftward.model.masks import Mask
from random_models import random_decoder

CONFIG = Config(vocab_size=50, max_seq_len=40, n_layers=3, d_model=32, n_heads=4, n_kv_heads=2)
LOCAL = Config(**{**CONFIG.to_dict(), "window": 6, "attention_pattern": "LLG"})


def healthy(config: Config = CONFIG, cls: type[Decoder] = Decoder) -> Decoder:
    decoder = random_decoder(config, std=0.3)
    decoder.__class__ = cls
    return decoder


# ---- masks of our Decoder


class _Whole(Mask):
    """A mask that is a tensor over all keys, so that any rule can stand in `visible`."""

    def columns(self, start: int, stop: int) -> slice:
        return slice(0, self.keys.shape[1])


class UpsideDown(_Whole):
    def visible(self, rows: slice, columns: slice) -> Tensor:
        return (self.keys[:, None, columns] >= self.queries[:, rows, None]).unsqueeze(1)


class OffByOne(_Whole):
    def visible(self, rows: slice, columns: slice) -> Tensor:
        return (self.keys[:, None, columns] <= self.queries[:, rows, None] + 1).unsqueeze(1)


class Dropped(_Whole):
    def visible(self, rows: slice, columns: slice) -> Tensor:
        seen = torch.ones_like(self.keys[:, None, columns], dtype=torch.bool)
        return seen.expand(-1, self.queries[:, rows].shape[1], -1).unsqueeze(1)


def changed(mask: Mask, cls: type[Mask], **changes: Any) -> Mask:
    fields = {field.name: getattr(mask, field.name) for field in dataclasses.fields(Mask) if field.init}
    return cls(**{**fields, "shortcut": None, **changes})


def masked(cls: type[Mask], *layers: int, config: Config = CONFIG, **changes: Any) -> Decoder:
    """A Decoder in which `layers` have a mask of that class, with changes to its fields."""
    decoder = healthy(config)

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, masks, *rest = args
        return (x, [changed(mask, cls, **changes) for mask in masks], *rest)

    for layer in layers:
        decoder.blocks[layer].register_forward_pre_hook(before)
    return decoder


def windowed(window: int) -> Decoder:
    """Local layers see `window` positions, whatever the Config says."""
    return masked(Mask, 0, 1, config=LOCAL, window=window)


# ---- other parts of it


class LeakingDocuments(Decoder):
    def hidden(self, ids: Tensor, *args: Any, documents: Tensor | None = None, **options: Any) -> Tensor:
        return super().hidden(ids, *args, **options)


class PadsLeft(Decoder):
    """Rows of unequal length are moved to the right end, where nobody expects them."""

    def hidden(self, ids: Tensor, cache: Any = None, lengths: list[int] | None = None, **options: Any) -> Tensor:
        for row, length in enumerate(lengths or []):
            ids = ids.clone()
            ids[row] = ids[row].roll(ids.shape[1] - length)
        return super().hidden(ids, cache, lengths, **options)


class Coupled(Decoder):
    """What a BatchNorm does: each row is measured against the batch."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden - 0.1 * hidden.mean(dim=0))


class GrowsWithLength(Decoder):
    """Scores, angles or statistics that follow from the length of the text so far."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden * (1 + 0.01 * hidden.shape[1]))


class Dropping(Decoder):
    """Dropout that forgets to ask whether this is training."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(F.dropout(hidden, 0.1, training=True))


class Boundless(Decoder):
    """Positions beyond the context start again, and nobody is told."""

    def hidden(self, ids: Tensor, *args: Any, **options: Any) -> Tensor:
        return super().hidden(ids[:, : self.config.max_seq_len], *args, **options)


def untied() -> Decoder:
    decoder = healthy()
    decoder.head.weight = nn.Parameter(decoder.embed.weight.detach().clone())
    return decoder


def frozen(name: str) -> Decoder:
    decoder = healthy()
    decoder.get_parameter(name).requires_grad_(False)
    return decoder


def detached() -> Decoder:
    """One layer's feed-forward learns nothing."""
    decoder = healthy()
    decoder.blocks[1].ff.register_forward_hook(lambda module, args, output: output.detach())
    return decoder


def poisoned() -> Decoder:
    decoder = healthy()
    decoder.blocks[1].ff.down.weight.data[3, 4] = torch.nan
    return decoder


# ---- plain modules


class GPT(nn.Module):
    """A GPT from PyTorch's own encoder layers, as an introduction to decoder-only models writes it."""

    def __init__(self, mask: Callable[[int], Tensor] | None = None, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pos = nn.Embedding(40, 32)  # before the tokens' on purpose: the first embedding isn't always theirs
        self.tok = nn.Embedding(50, 32)
        block = nn.TransformerEncoderLayer(
            32, 4, dim_feedforward=64, dropout=dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.tok.weight
        self.mask = mask or nn.Transformer.generate_square_subsequent_mask

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.tok(ids) + self.pos(torch.arange(length))
        return self.head(self.blocks(x, mask=self.mask(length)))


def blocking(seen: Callable[[Tensor, Tensor], Tensor]) -> Callable[[int], Tensor]:
    """A mask in PyTorch's form, −inf where `seen(query, key)` is false."""

    def mask(length: int) -> Tensor:
        places = torch.arange(length)
        return torch.where(seen(places[:, None], places[None]), 0.0, -torch.inf)

    return mask


def one_layer_leaks() -> GPT:
    model = GPT(layers=3)
    leaky = copy.deepcopy(model.blocks.layers[1])
    plain = leaky.forward
    leaky.forward = lambda x, *args, **options: plain(x)
    model.blocks.layers[1] = leaky
    return model


class Captions(nn.Module):
    """A single post-norm block of another introduction, for nine tokens: it returns its keys and values too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embed = nn.Embedding(12, 32, padding_idx=0)
        self.pos_embed = nn.Embedding(9, 32)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(32, 32) for _ in range(4))
        self.ff = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.ln1, self.ln2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 12)

    def forward(self, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = self.tok_embed(tokens) + self.pos_embed(torch.arange(tokens.shape[1]))[None]
        q, k, v = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = self.ln1(x + self.out_proj(mixed))
        return self.lm_head(self.ln2(x + self.ff(x))), (k, v)


class Recurrent(nn.Module):
    """No attention at all, no list of layers, and leftward all the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok, self.rnn, self.head = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.tok(ids))[0])


class BatchNormed(Recurrent):
    """A norm over the batch, that stays in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def train(self, mode: bool = True) -> BatchNormed:
        super().train(mode)
        self.norm.train()
        return self

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.rnn(self.tok(ids))[0]  # [B, T, D]
        return self.head(hidden if len(ids) == 1 else self.norm(hidden.transpose(1, 2)).transpose(1, 2))


# ---- losses: (model, ids) → loss


def next_token_loss(model: Any, ids: Tensor, pad_id: int = -100) -> Tensor:
    logits = _logits(model, ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=pad_id)


def present_token_loss(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(_logits(model, ids).flatten(0, 1), ids.flatten())


def twice_shifted_loss(model: Any, ids: Tensor) -> Tensor:
    """Targets that are shifted already, given to a model that shifts them again."""
    logits = _logits(model, ids[:, :-1])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 2:].flatten())


def rolled_loss(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(_logits(model, ids).flatten(0, 1), ids.roll(-1, dims=1).flatten())


def summed_loss(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(_logits(model, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def mean_of_means_loss(model: Any, ids: Tensor) -> Tensor:
    rows = [next_token_loss(model, row[None], pad_id=0) for row in ids]
    return torch.stack(rows).mean()


def _logits(model: Any, ids: Tensor) -> Tensor:
    output = model(ids)
    return getattr(output, "logits", output)
