"""The Decoder: token ids in, next-token logits out, and the output at position t depends on nothing to its right.

This file is the place to start reading. Each part has a file of its own beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from leftward.config import Config
from leftward.kernels.packed import packed_of
from leftward.model.block import Block
from leftward.model.cache import KVCache, Rows
from leftward.model.experts import Experts
from leftward.model.masks import Layout, Mask, document_positions, make_mask
from leftward.model.norms import make_norm
from leftward.model.positions import Angles, head_slopes, rotary_angles, sinusoids
from leftward.model.slots import Slots


class Decoder(nn.Module):
    """embed → blocks → norm → head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = _table(config.padded_vocab_size, config.d_model)
        rows = config.max_seq_len + config.position_offset
        self.position_embed = _table(rows, config.d_model) if config.positions == "learned" else None
        self.embed_norm = make_norm(config) if config.embed_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = None if config.block == "post" else make_norm(config)
        self.head = nn.Linear(config.d_model, config.padded_vocab_size, bias=config.head_bias)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        if not self.embed.weight.is_meta:  # where the first random number costs a second or two, and is none
            initialise(config, dict(self.named_parameters()))

    def forward(
        self,
        ids: Tensor,
        cache: KVCache | Rows | Slots | None = None,
        lengths: list[int] | None = None,
        *,
        documents: Tensor | None = None,
        prefix_lengths: list[int] | None = None,
        prefix_embeddings: Tensor | None = None,
    ) -> Tensor:
        """Logits of the token that follows each position.

        Args:
            ids: [B, T] integers.
            cache: continue behind the tokens that it holds, and add these. `Rows` know no documents and no prefixes;
                `Slots` take one token of each row and none of the arguments below; nothing then waits for the device.
            lengths: how many of each row's positions are real; the rest, at the right end, is padding.
            documents: [B, T], a number for the document of each token: tokens see their own document only, and
                positions begin anew in each. Behind a cache that has documents, None goes on with each row's last.
            prefix_lengths: how many positions at the beginning of each row see each other, whatever their order
                (prefix-LM). They must be read in one pass; later ones need not say it again.
            prefix_embeddings: [B, P, d_model], put in front of the tokens as they are.

        Returns:
            logits [B, P + T, vocab_size]

        Raises:
            ValueError: a position beyond max_seq_len, more tokens than the cache can hold, or arguments that don't fit
                each other.
        """
        return self.logits(
            self.hidden(
                ids,
                cache,
                lengths,
                documents=documents,
                prefix_lengths=prefix_lengths,
                prefix_embeddings=prefix_embeddings,
            )
        )

    def hidden(
        self,
        ids: Tensor,
        cache: KVCache | Rows | Slots | None = None,
        lengths: list[int] | None = None,
        *,
        documents: Tensor | None = None,
        prefix_lengths: list[int] | None = None,
        prefix_embeddings: Tensor | None = None,
    ) -> Tensor:
        """What the head reads: the residual stream after the last norm, [B, P + T, D]. Arguments as in `forward`."""
        config = self.config
        _check_arguments(config, ids, cache, lengths, documents, prefix_lengths, prefix_embeddings)
        x = self.embed(ids)  # [B, T, D]
        if config.embed_scale != 1.0:
            x = x * config.embed_scale
        if prefix_embeddings is not None:
            x = torch.cat((prefix_embeddings.to(x.dtype), x), dim=1)
        at = cache if isinstance(cache, Slots) else _Pass(x, config, cache, lengths, documents, prefix_lengths)
        positions = at.positions  # [B or 1, T]

        if self.position_embed is not None:
            rows = positions.clamp(max=config.max_seq_len - 1) + config.position_offset  # padding may reach further
            x = x + self.position_embed(rows)
        elif config.positions == "sinusoidal":
            x = x + sinusoids(positions, config.d_model).to(x.dtype)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        x = self.dropout(x)

        masks: dict[tuple[bool, bool], list[Mask]] = {}
        angles: dict[tuple[bool, bool], Angles | None] = {}
        for layer, block in enumerate(self.blocks):
            kind = local, knows_positions = config.is_local(layer), config.knows_positions(layer)
            if kind not in masks:
                masks[kind] = at.masks(local, knows_positions)
                rotates = knows_positions and config.positions == "rotary"
                angles[kind] = at.angles(local, x.dtype) if rotates else None
            x = block(x, masks[kind], angles[kind], cache)
        if isinstance(at, _Pass):
            at.end()
        return x if self.norm is None else self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: [..., D] → [..., vocab_size]. The rows that pad the vocabulary have none."""
        return self.scaled(self.head(hidden))

    def scaled(self, products: Tensor) -> Tensor:
        """What the head's products [..., padded_vocab_size] become: logits [..., vocab_size]."""
        config = self.config
        logits = products if products.shape[-1] == config.vocab_size else products[..., : config.vocab_size]
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = config.logit_softcap * (logits / config.logit_softcap).tanh()
        return logits

    def balance_loss(self) -> Tensor:
        """How unevenly the last forward pass in training used its experts, a mean over layers: 1 where evenly,
        n_experts where one expert has all. To be added to the loss, times a small coefficient."""
        losses = [block.ff.balance_loss for block in self.blocks if isinstance(block.ff, Experts)]
        if not losses or any(loss is None for loss in losses):
            raise ValueError("no balance loss: the model has no experts, or has not run in training mode yet")
        return torch.stack([loss for loss in losses if loss is not None]).mean()

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next((weight.device for weight in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream. Packed weights (kernels/packed.py) compute in fp32."""
        return self.embed.weight.dtype if isinstance(self.embed, nn.Embedding) else torch.float32

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values, where nothing else is asked for: `dtype`, or bf16 beside packed weights."""
        return torch.bfloat16 if packed_of(self) else self.dtype

    @property
    def n_parameters(self) -> int:
        """Weights, each counted once (a tied head is the embedding)."""
        packed = {id(part.data): part.rows * part.columns for parts in packed_of(self).values() for part in parts}
        return sum(parameter.numel() for parameter in self.parameters()) + sum(packed.values())


class _Pass:
    """Where the new tokens `x` [B, T, D] of a pass stand, and whom they see. `Slots` say the same of themselves, by
    tensors alone.

    Raises: ValueError, as `Decoder.forward`.
    """

    def __init__(
        self,
        x: Tensor,
        config: Config,
        cache: KVCache | Rows | None,
        lengths: list[int] | None,
        documents: Tensor | None,
        prefix_lengths: list[int] | None,
    ) -> None:
        self._config, self._cache, self._prefix_lengths = config, cache, prefix_lengths
        self._batch, n_new, _ = x.shape
        starts = self._starts = cache.lengths if cache is not None else [0] * self._batch
        counts = self._counts = [n_new] * self._batch if lengths is None else lengths
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        if longest > config.max_seq_len:
            raise ValueError(f"a sequence of {longest} tokens is longer than max_seq_len {config.max_seq_len}")
        if cache is not None:
            cache.begin(n_new, counts)
        first = starts[:1] if len(set(starts)) == 1 else starts
        places = torch.tensor(first, device=x.device)[:, None] + torch.arange(n_new, device=x.device)
        if isinstance(cache, KVCache):
            documents = cache.documents_up_to(max(starts) + n_new, documents)
        self._places, self._documents = places, documents
        self.positions = places
        """[B or 1, T]: places in the sequence, or in the document."""
        if documents is not None:
            self.positions = document_positions(documents).gather(1, places.expand(self._batch, -1))
        slopes = head_slopes(config)
        self._slopes = None if slopes is None else slopes.to(x.device)

    def masks(self, local: bool, knows_positions: bool) -> list[Mask]:
        """Who sees whom in layers of a kind: one for all rows, or with `Rows` one for each."""
        config, cache, places = self._config, self._cache, self._places
        slopes = self._slopes if knows_positions else None
        if isinstance(cache, Rows):
            rows = zip(cache.caches, places.expand(self._batch, -1)[:, None], self._starts, self._counts, strict=True)
            return [
                make_mask(config, local, at[:, :count], own.layout(local), [start], [count], None, None, slopes)
                for own, at, start, count in rows
            ]
        layout = Layout(places, offset=0) if cache is None else cache.layout(local)
        of_rows = (self._starts, self._counts, self._documents, self._prefix_lengths)
        return [make_mask(config, local, places, layout, *of_rows, slopes)]

    def angles(self, local: bool, dtype: torch.dtype) -> Angles:
        return rotary_angles(self._config, self.positions, dtype, local)

    def end(self) -> None:
        """Count what was read."""
        if self._cache is not None:
            self._cache.advance()
        if isinstance(self._cache, KVCache) and self._prefix_lengths is not None:
            self._cache.prefix_lengths = list(map(max, self._cache.prefix_lengths, self._prefix_lengths))


def _table(rows: int, width: int) -> nn.Embedding:
    """An embedding whose values `initialise` will draw."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def _check_arguments(
    config: Config,
    ids: Tensor,
    cache: KVCache | Rows | Slots | None,
    lengths: list[int] | None,
    documents: Tensor | None,
    prefix_lengths: list[int] | None,
    prefix_embeddings: Tensor | None,
) -> None:
    """What would be a wrong result in silence is an error."""
    if ids.ndim != 2 or ids.is_floating_point():
        raise ValueError(f"ids are {ids.dtype} {list(ids.shape)}: they must be integers [B, T]")
    if isinstance(cache, Slots):  # what ids are is not asked: the answer would have to come from the device
        if ids.shape != (cache.n_rows, 1):
            raise ValueError(f"ids are {list(ids.shape)}: slots take one token a row, [{cache.n_rows}, 1]")
        if any(given is not None for given in (lengths, documents, prefix_lengths, prefix_embeddings)):
            raise ValueError("slots are read without lengths, documents, prefix_lengths and prefix_embeddings")
        return
    batch = len(ids)
    n_new = ids.shape[1] + (0 if prefix_embeddings is None else prefix_embeddings.shape[-2])
    if not batch or not n_new:
        raise ValueError(f"ids {list(ids.shape)} hold nothing to read")
    if config.padded_vocab_size > config.vocab_size and not (ids < config.vocab_size).all():
        raise ValueError(f"id {int(ids.max())} is not in the vocabulary of {config.vocab_size}")
    if cache is not None and cache.config != config:
        raise ValueError("the cache is for another Config")
    if cache is not None and len(cache.lengths) != batch:
        raise ValueError(f"the cache has {len(cache.lengths)} rows, and ids {batch}")
    if isinstance(cache, Rows) and not (documents is None and prefix_lengths is None):
        raise ValueError("rows of caches of their own are read without documents and prefix_lengths")
    if prefix_embeddings is not None and (prefix_embeddings.ndim, len(prefix_embeddings)) != (3, batch):
        raise ValueError(f"prefix_embeddings are {list(prefix_embeddings.shape)}: they must be [{batch}, P, d_model]")
    if documents is not None and (documents.is_floating_point() or documents.shape != (batch, n_new)):
        raise ValueError(
            f"documents are {documents.dtype} {list(documents.shape)}: they must be [{batch}, {n_new}] integers"
        )
    for name, counts, most in (("lengths", lengths, n_new), ("prefix_lengths", prefix_lengths, config.max_seq_len)):
        if counts is not None and (
            len(counts) != batch or any(type(n) is not int or not 0 <= n <= most for n in counts)
        ):
            raise ValueError(f"{name} are {counts}: they must be {batch} whole numbers from 0 to {most}")
    if prefix_lengths is None:
        return
    starts = [0] * batch if cache is None else cache.lengths
    counts = [n_new] * batch if lengths is None else lengths
    for start, count, prefix in zip(starts, counts, prefix_lengths, strict=True):
        if prefix > start and (start > 0 or prefix > count):
            raise ValueError(
                f"a prefix of {prefix} must be read in one pass; this one reads {count} tokens behind {start}"
            )


@torch.no_grad()
def initialise(config: Config, weights: Mapping[str, Tensor]) -> None:
    """Every weight of a Decoder drawn in one place, in the order of `weights`.

    Matrices and embeddings: N(0, 0.02²) as in GPT-2. The two matrices of a block that write to the residual stream
    start at zero, so that a fresh block adds nothing (Zhang et al. 2019, arXiv 1901.09321; measured in docs/log.md),
    but for blocks that put a norm behind them: the norm of nothing has no gradient worth the name. Norms multiply by 1
    and add 0. Rows that pad the vocabulary are zero.
    """
    zeroed: tuple[str, ...] = (".bias", ".sinks")
    if config.block not in ("sandwich", "output"):
        zeroed += (".o.weight", ".down.weight")
    for name, parameter in weights.items():
        if name.endswith(zeroed) or ("norm" in name and config.norm_weight == "one_plus"):
            nn.init.zeros_(parameter)
        elif "norm" in name:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02)
        if name in ("embed.weight", "head.weight"):
            parameter[config.vocab_size :] = 0
