"""A Decoder as a list of operations for kernels/forward.cpp: the same function as Decoder.hidden and Decoder.logits,
with the same cache, in one call a pass. What it can't say (experts, documents, prefixes) the Decoder does itself.

A token's numbers are the same, bit for bit, in whatever batch and portions it comes: no other token takes part in any
sum of its own.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere

from leftward.generation.graphs import Steps
from leftward.kernels import forward, native
from leftward.kernels.forward import Attention, Op, Rounded, Work
from leftward.kernels.large_pages import use_large_pages
from leftward.kernels.packed import Packed, PackedEmbedding, PackedLinear, packed_of
from leftward.model.attention import Attention as AttentionLayer
from leftward.model.block import Block
from leftward.model.cache import KVCache, Rows
from leftward.model.decoder import Decoder
from leftward.model.feedforward import FeedForward
from leftward.model.norms import LayerNorm, RMSNorm
from leftward.model.positions import head_slopes, rotary_angles, sinusoids

STREAM, NORMED, NORMED_TOO, WIDE, NARROW, OUTPUT = range(6)
"""Buffers: the residual stream; what a sublayer reads, twice for parallel ones; what the first matrix of a sublayer
gives; what its second one reads; what that gives, where a norm comes behind."""

_PASSES = 16  # after which weights are worth the time (0.2 s for 100 MB) to have them in large pages


def can_say(decoder: Decoder) -> bool:
    """Whether there is a program for this model on this machine: one that computes what the modules do, so that there
    must be no hooks on them, no functions of their own in the place of theirs, and no other kinds of them than a
    Decoder is built of."""
    config, modules = decoder.config, list(decoder.modules())
    weights = list(decoder.parameters())
    return (
        not config.n_experts
        and config.causal
        and all(type(weight) is nn.Parameter and weight.device.type == "cpu" for weight in weights)
        and all(weight.dtype in (torch.float32, torch.bfloat16) for weight in weights)
        and all(type(module) in _MODULES for module in modules)
        and not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
        and not any(_OVERRIDDEN & vars(module).keys() for module in modules)
        and not (everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)
        and native.available()
    )


_OVERRIDDEN = {"forward", "hidden", "logits", "scaled"}
_MODULES = (
    *(Decoder, Block, AttentionLayer, FeedForward, RMSNorm, LayerNorm),
    *(nn.Linear, nn.Embedding, nn.ModuleList, nn.Dropout, nn.Identity, PackedLinear, PackedEmbedding),
)


class Reader:
    """Reads tokens, by a program where there is one, and says how in `path`. The decoder's weights must stay as they
    are while it is in use.

    With `steps` all caches are rows of their pool, passes of one token a row are theirs, and others PyTorch's.
    """

    def __init__(self, decoder: Decoder, steps: Steps | None = None) -> None:
        self.decoder, self._steps = decoder, steps
        self._program = Program(decoder) if steps is None and can_say(decoder) else None
        is_bf16 = isinstance(decoder.head, nn.Linear) and decoder.dtype == torch.bfloat16
        self._divides = self._program is not None and is_bf16 and large_products_are_pytorchs()
        plain = f"PyTorch's operations in {str(decoder.dtype).removeprefix('torch.')} on {decoder.device.type}"
        self._path = plain
        if self._program is not None:
            kinds = dict.fromkeys(
                part.kind if isinstance(part, Packed) else str(part).removeprefix("torch.")
                for part, _ in weights_of(decoder)
            )
            self._path = f"native kernels for {' and '.join(kinds)} weights"
            if self._divides:
                self._path += f", {plain} from {_MANY} tokens a pass on"

    @property
    def path(self) -> str:
        return self._path if self._steps is None else f"{self._path}, {self._steps.path}"

    def hidden(self, new: Sequence[Sequence[int]], caches: Sequence[KVCache], **special: Any) -> Tensor:
        """`Decoder.hidden` of each row's new tokens behind what caches of one row, or one cache of all rows, hold: of
        all of them, row after row, [N, D]. It reads what is `special` itself: prefixes, and vectors in front of a
        prompt, which count as tokens."""
        if self._steps is not None and not special and max(map(len, new)) == 1:
            return self._steps.hidden([token_id for (token_id,) in new], caches)
        cache = caches[0] if len(caches) == 1 else Rows(caches)
        if self._program is None or special or (self._divides and sum(map(len, new)) >= _MANY):
            return self._decoders(new, cache, special)
        return self._program.hidden(new, cache)

    def _decoders(self, new: Sequence[Sequence[int]], cache: KVCache | Rows, special: Mapping[str, Any]) -> Tensor:
        longest = max(map(len, new))
        ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in new], device=self.decoder.device)
        vectors = special.get("prefix_embeddings")
        counts = [len(tokens) + (0 if vectors is None else vectors.shape[1]) for tokens in new]
        hidden = self.decoder.hidden(ids, cache, counts, **special)  # [B, T, D]
        return torch.cat([row[:count] for row, count in zip(hidden, counts, strict=True)])

    def logits(self, hidden: Tensor) -> Tensor:  # [N, D] → [N, vocab_size]
        if self._program is None:
            return self.decoder.logits(hidden)
        return self._program.logits(hidden)


_MANY = 64  # tokens whose products may be better off elsewhere


@functools.cache
def large_products_are_pytorchs() -> bool:
    """Whether bf16 products of many tokens are faster in PyTorch than in our kernel: where the processor has
    instructions for them. Measured once in a process; packed weights and fp32 always take ours, so that a token's
    numbers don't depend on its company."""
    width, n_tokens = 1024, 256
    weights, x = torch.ones(width, width, dtype=torch.bfloat16), torch.ones(n_tokens, width)
    out = torch.empty(n_tokens, width)
    op = Op(kind=forward.LINEAR, in_=0, out=1, width=width, rows=width, out_width=width, variant=forward.BF16)
    op.weights = forward.address(weights)
    ours, narrow = Work([op], [x, out]), x.bfloat16()

    def seconds(work: Callable[[], object]) -> float:
        work()
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    # Where bf16 is emulated, so few tokens tell as much and don't take a second.
    few = narrow[:8]
    if seconds(lambda: nn.functional.linear(few, weights)) > 0.02:
        return False
    return seconds(lambda: nn.functional.linear(narrow, weights)) < seconds(lambda: ours(n_tokens))


def weights_of(decoder: Decoder) -> list[tuple[Packed | torch.dtype, int]]:
    """What the matrices are made of whose products every token takes part in, and how many numbers that are: packed
    parts, or those of a dtype. Of experts it is those that a token is not sent to as well."""
    found: list[tuple[Packed | torch.dtype, int]] = []
    for module in decoder.modules():
        if isinstance(module, PackedLinear):
            found += [(part, part.rows * part.columns) for part in module.parts]
        elif isinstance(module, nn.Linear):
            found.append((module.weight.dtype, module.weight.numel()))
    return found


class Program:
    """The operations of one Decoder, whose weights are read where they are."""

    def __init__(self, decoder: Decoder) -> None:
        config = self.config = decoder.config
        self._decoder = decoder
        self._n_passes = 0
        self._kept: list[Any] = []  # what the operations hold addresses of
        qkv = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        up = config.d_ff * (2 if config.is_gated else 1)
        d_model, narrow = config.d_model, max(config.n_heads * config.head_dim, config.d_ff)
        self._widths = [d_model, d_model, d_model, max(qkv, up), narrow, d_model]
        self._n_rows = 0  # of the buffers
        self._angles: dict[bool, tuple[Tensor, Tensor]] = {}
        self._tables: WeakKeyDictionary[KVCache, tuple[tuple[int, int], Tensor]] = WeakKeyDictionary()
        self._together: tuple[list[Tensor], Tensor] = ([], torch.empty(0))  # tables of the last pass, and all in one
        local = [config.is_local(layer) for layer in range(config.n_layers)]
        self._local = local.index(True) if any(local) else None
        self._in_local = torch.tensor(local, dtype=torch.int64)
        self._never = torch.zeros_like(self._in_local)
        self._positions: Tensor | None = None
        if config.positions == "learned":
            assert decoder.position_embed is not None
            self._positions = decoder.position_embed.weight[config.position_offset :].float().contiguous()
        elif config.positions == "sinusoidal":
            self._positions = sinusoids(torch.arange(config.max_seq_len)[None], d_model)[0].contiguous()
        blocks = [block for block in decoder.blocks if isinstance(block, Block)]
        self._layers = [self._attention(block.attn, layer) for layer, block in enumerate(blocks)]
        ops = [*self._embedding(), *(op for layer, block in enumerate(blocks) for op in self._block(block, layer))]
        if decoder.norm is not None:
            ops.append(self._norm(decoder.norm, STREAM, STREAM))
        self._ops = ops, self._linear(decoder.head, 0, 1, config.padded_vocab_size)
        self._room(1)

    def hidden(self, new: Sequence[Sequence[int]], cache: KVCache | Rows) -> Tensor:
        """`Decoder.hidden` of each row's new tokens behind what `cache` holds: of all of them, row after row, fp32
        [N, D].

        Raises: ValueError, as there; IndexError: an id that the model has not.
        """
        if min(map(min, new)) < 0 or max(map(max, new)) >= self.config.vocab_size:  # which the kernels don't look at
            raise IndexError(f"ids are not all in the model's vocabulary of {self.config.vocab_size}")
        starts, counts = cache.lengths, [len(tokens) for tokens in new]
        ends = list(map(operator.add, starts, counts))
        if max(ends) > self.config.max_seq_len:
            raise ValueError(f"a sequence of {max(ends)} tokens is longer than max_seq_len {self.config.max_seq_len}")
        cache.begin(max(counts), counts)
        self._turn_to(cache.capacity)
        parts = cache.caches if isinstance(cache, Rows) else [cache]
        tables = [self._table(part) for part in parts]
        if len(tables) != len(self._together[0]) or not all(map(operator.is_, tables, self._together[0])):
            self._together = tables, tables[0] if len(tables) == 1 else torch.cat(tables, dim=1)
        caches, first = self._together[1], parts[0]
        self._n_passes += 1
        if self._n_passes == _PASSES:
            weights = (tensor for tensor in self._kept if isinstance(tensor, Tensor))
            parts_of_packed = (part.data for packed in packed_of(self._decoder).values() for part in packed)
            use_large_pages([*weights, *parts_of_packed])
        # No tensor: behind a pass, which leaves nothing in the processor's caches, PyTorch takes 0.1 ms for one.
        tokens = array("q", itertools.chain.from_iterable(new))
        n_tokens = len(tokens)
        tokens.extend(itertools.chain.from_iterable(map(repeat, range(len(new)), counts)))
        tokens.extend(itertools.chain.from_iterable(map(range, starts, ends)))
        self._room(n_tokens)
        kind = forward.kind_of(first.keys[0].dtype)
        self._body(n_tokens, tokens, caches, kind, self._overwrites(caches, ends, counts))
        cache.advance()
        return self._stream[:n_tokens].clone()

    def logits(self, hidden: Tensor) -> Tensor:
        """`Decoder.logits` of [N, D]: fp32 [N, vocab_size]."""
        hidden = hidden.float().contiguous()
        n = len(hidden)
        self._room(n)
        products = torch.empty(n, self.config.padded_vocab_size)
        self._head.addresses[:] = [hidden.data_ptr(), products.data_ptr()]
        self._head(n)
        return self._decoder.scaled(products)

    def _room(self, n_tokens: int) -> None:
        if self._n_rows < n_tokens:
            self._n_rows = n_tokens
            buffers = [torch.empty(n_tokens, width) for width in self._widths]
            rounded = Rounded.of(n_tokens, max(self._widths))
            body, head = self._ops
            self._stream = buffers[STREAM]
            self._body, self._head = Work(body, buffers, rounded), Work(head, buffers[:2], rounded)

    # ---- operations

    def _embedding(self) -> list[Op]:
        embed, config = self._decoder.embed, self.config
        op = Op(kind=forward.EMBED, out=STREAM, width=config.d_model, scale=config.embed_scale)
        if isinstance(embed, PackedEmbedding):
            op.variant, op.weights = embed.table.number, self._address(embed.table.data)
        else:
            op.variant, op.weights = forward.kind_of(embed.weight.dtype), self._address(embed.weight)
        ops = [op]
        if self._positions is not None:
            table = self._address(self._positions)
            ops.append(Op(kind=forward.POSITION, out=STREAM, width=config.d_model, weights=table))
        if self._decoder.embed_norm is not None:
            ops.append(self._norm(self._decoder.embed_norm, STREAM, STREAM))
        return ops

    def _block(self, block: Block, layer: int) -> list[Op]:
        """As Block.forward has it."""
        kind = block.kind
        if kind == "post":
            return [
                *self._attend(block, layer, STREAM, STREAM),
                self._norm(block.attn_norm, STREAM, STREAM),
                *self._feed_forward(block, STREAM, STREAM),
                self._norm(block.ff_norm, STREAM, STREAM),
            ]
        if kind == "output":
            return [
                *self._behind_norm(block.attn_out_norm, self._attend(block, layer, STREAM, OUTPUT)),
                *self._behind_norm(block.ff_out_norm, self._feed_forward(block, STREAM, OUTPUT)),
            ]
        first = self._norm(block.attn_norm, STREAM, NORMED)
        if kind == "parallel_shared":
            return [first, *self._attend(block, layer, NORMED, STREAM), *self._feed_forward(block, NORMED, STREAM)]
        second = self._norm(block.ff_norm, STREAM, NORMED_TOO)
        if kind == "parallel":
            attend = self._attend(block, layer, NORMED, STREAM)
            return [first, second, *attend, *self._feed_forward(block, NORMED_TOO, STREAM)]
        if kind == "sandwich":
            return [
                first,
                *self._behind_norm(block.attn_out_norm, self._attend(block, layer, NORMED, OUTPUT)),
                second,
                *self._behind_norm(block.ff_out_norm, self._feed_forward(block, NORMED_TOO, OUTPUT)),
            ]
        attend = self._attend(block, layer, NORMED, STREAM)
        return [first, *attend, second, *self._feed_forward(block, NORMED_TOO, STREAM)]

    def _behind_norm(self, norm: nn.Module, ops: list[Op]) -> list[Op]:
        add = Op(kind=forward.ADD, in_=OUTPUT, out=STREAM, width=self.config.d_model, scale=self.config.residual_scale)
        return [*ops, self._norm(norm, OUTPUT, OUTPUT), add]

    def _attend(self, block: Block, layer: int, source: int, target: int) -> list[Op]:
        attention, config = block.attn, self.config
        width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        op = Op(kind=forward.ATTEND, in_=WIDE, out=NARROW, width=width, out_width=config.n_heads * config.head_dim)
        op.weights = ctypes.addressof(self._layers[layer])
        return [*self._linear(attention.qkv, source, WIDE, width), op, *self._out(attention.o, target)]

    def _feed_forward(self, block: Block, source: int, target: int) -> list[Op]:
        config, ff = self.config, block.ff
        assert isinstance(ff, FeedForward)
        width = config.d_ff * (2 if config.is_gated else 1)
        variant = forward.ACTIVATIONS.index(config.feed_forward)
        op = Op(kind=forward.ACTIVATE, in_=WIDE, out=NARROW, width=width, rows=config.d_ff, variant=variant)
        op.out_width = config.d_ff
        return [*self._linear(ff.up, source, WIDE, width), op, *self._out(ff.down, target)]

    def _out(self, linear: nn.Module, target: int) -> list[Op]:
        """The second matrix of a sublayer: to the stream, or to where a norm comes behind it."""
        scale = self.config.residual_scale
        return self._linear(linear, NARROW, target, self.config.d_model, adds=target == STREAM, scale=scale)

    def _linear(
        self, linear: nn.Module, source: int, target: int, out_width: int, adds: bool = False, scale: float = 1.0
    ) -> list[Op]:
        if isinstance(linear, PackedLinear):
            self._kept.append(linear)
            return linear.ops(source, target, out_width, adds, scale)
        assert isinstance(linear, nn.Linear)
        op = Op(kind=forward.LINEAR, in_=source, out=target, width=linear.in_features, rows=linear.out_features)
        op.out_width, op.scale = out_width, scale
        op.variant = forward.kind_of(linear.weight.dtype) | (forward.ADDS if adds else 0)
        op.weights, op.bias = self._address(linear.weight), self._address(linear.bias, in_fp32=True)
        return [op]

    def _norm(self, norm: nn.Module, source: int, target: int) -> Op:
        assert isinstance(norm, (RMSNorm, LayerNorm))
        is_layer = isinstance(norm, LayerNorm)
        op = Op(kind=forward.LAYER_NORM if is_layer else forward.RMS_NORM, in_=source, out=target, eps=norm.eps)
        op.width = self.config.d_model
        op.weights = self._address(norm.factor, in_fp32=True)
        op.bias = self._address(norm.bias, in_fp32=True) if isinstance(norm, LayerNorm) else None
        return op

    def _attention(self, attention: AttentionLayer, layer: int) -> Attention:
        config = self.config
        local, knows_positions = config.is_local(layer), config.knows_positions(layer)
        this = Attention(layer=layer, n_heads=config.n_heads, n_kv_heads=config.n_kv_heads, head_dim=config.head_dim)
        this.window = (config.window or 0) if local else 0
        this.scale, this.softcap = config.attn_scale, config.attn_softcap or 0.0
        this.has_norm, this.norms_whole, this.eps = attention.q_norm is not None, attention.norms_whole, attention.eps
        if attention.q_norm is not None and attention.k_norm is not None:
            this.q_norm = self._address(attention.q_norm.factor, in_fp32=True)
            this.k_norm = self._address(attention.k_norm.factor, in_fp32=True)
        this.slopes = self._address(head_slopes(config) if knows_positions else None)
        this.sinks = self._address(attention.sinks, in_fp32=True)
        return this

    def _address(self, tensor: Tensor | None, in_fp32: bool = False) -> int | None:
        """Where a tensor's numbers are, which are kept there."""
        if tensor is None:
            return None
        tensor = tensor.detach().float() if in_fp32 else tensor.detach()
        self._kept.append(tensor := tensor.contiguous())
        return forward.address(tensor)

    # ---- what a pass works on

    def _turn_to(self, n: int) -> None:
        """Angles of `n` places, at least."""
        config = self.config
        if config.positions != "rotary" or (self._angles and len(self._angles[False][0]) >= n):
            return
        places = torch.arange(min(config.max_seq_len, max(2 * n, 256)))[None]
        for local in (False, True):
            cos, sin, adjacent = rotary_angles(config, places, torch.float32, local)
            self._angles[local] = (cos[0, :, 0].contiguous(), sin[0, :, 0].contiguous())
        for layer, this in enumerate(self._layers):
            if config.knows_positions(layer):
                cosines, sines = self._angles[config.is_local(layer)]
                this.cosines, this.sines = forward.address(cosines), forward.address(sines)
                this.rope_dim, this.adjacent = config.rope_dim, adjacent

    def _table(self, cache: KVCache) -> Tensor:
        """int64 [layers, rows, CACHE_FIELDS], kept as long as the cache stays where it is."""
        at = (cache.capacity, cache.keys[0].data_ptr())
        found = self._tables.get(cache)
        if found is not None and found[0] == at:
            return found[1]
        scales = zip(cache.key_scales, cache.value_scales, strict=True) if cache.key_scales else repeat((None, None))
        held = zip(cache.keys, cache.values, scales, strict=False)
        table = torch.zeros(self.config.n_layers, len(cache.lengths), forward.CACHE_FIELDS, dtype=torch.int64)
        for layer, (keys, values, of_both) in enumerate(held):
            for field, tensor in enumerate((keys, values, *of_both)):
                if tensor is not None:
                    assert tensor.is_contiguous()
                    begins = tensor.data_ptr() + torch.arange(len(tensor)) * (tensor.stride(0) * tensor.itemsize)
                    table[layer, :, field] = begins
            table[layer, :, 4] = keys.shape[2]
        self._tables[cache] = at, table
        return table

    def _overwrites(self, caches: Tensor, ends: list[int], counts: list[int]) -> Tensor:
        """int64 [layers]: whether a row's new tokens go once around a ring, into what the first of them still see."""
        if self._local is None or self.config.window is None:
            return self._never
        slots = caches[self._local, :, 4].tolist()  # the same in all local layers
        free = [n - self.config.window + 1 for n in slots]
        rows = zip(ends, slots, counts, free, strict=True)
        rolls = any(end > n and count > fits for end, n, count, fits in rows)
        return self._in_local if rolls else self._never
