"""A run on many ranks without any of them: what each would hold, and send in a step.

The model is built as a run builds it, by sharding.py and FSDP2, but of tensors without memory and in a process group
that only says that it has so many ranks; sizes are those of what comes out. What is sent follows from how it is built.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from leftward.config import Config
from leftward.data.order import share
from leftward.errors import UserError
from leftward.formats.tensors import DTYPES
from leftward.planner import count_activations, count_parameters, head_portions
from leftward.training.optim import Optimizer
from leftward.training.parallel import Grid, World
from leftward.training.recipe import Recipe
from leftward.training.sharding import Sharding


@dataclass(frozen=True)
class Collective:
    """What all ranks do together in a step, of one kind and for one purpose."""

    kind: str
    """all_gather, reduce_scatter, all_reduce or all_to_all."""
    purpose: str
    ranks: int
    """That take part in each."""
    count: int
    """A step."""
    bytes: int
    """That the first rank sends in a step: of n ranks (n − 1) / n of what is gathered or scattered, twice that of what
    is reduced for all, and what it hands out itself."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank, of the first, which has no fewer than others. Not counted: temporaries inside an operation, what
    an allocator wastes, buffers of the communication library."""

    weights: int
    """fp32, this rank's part."""
    gradients: int
    """The same."""
    optimizer: int
    """What the update rules remember, the same."""
    gathered: int
    """Weights that are there whole for computing, and gradients before they are summed: what isn't in a block, and two
    blocks, since the next is gathered while one computes."""
    activations: int
    """About what the forward pass of a micro-batch keeps."""
    logits: int
    """At most."""

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Rehearsal:
    """What a run takes."""

    grid: Grid
    parameters: int
    dtype: str
    tokens: int
    """A step, of all ranks."""
    rows: int
    """Of the batch, for a rank and those that share its rows with it."""
    micro_batches: int
    shapes: dict[str, tuple[int, ...]]
    """What the first rank has of each weight: of one block for all."""
    memory: Memory
    collectives: tuple[Collective, ...]

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return {**values, "grid": self.grid._asdict(), "memory": {**values["memory"], "total": self.memory.total}}


def rehearse(recipe: Recipe, ranks: int) -> Rehearsal:
    """What `recipe` takes on so many ranks.

    Raises:
        UserError: they can't share it out, or the recipe leaves the vocabulary to the text.
    """
    if recipe.tokenizer.vocab_size is None:
        raise UserError("without the text the vocabulary isn't known: set tokenizer.vocab_size")
    if recipe.lora.rank is not None:
        raise UserError("LoRA trains in one process: leave --ranks or lora.rank out")
    if dist.is_initialized():
        raise UserError("--dry-run is for one process: start it without torchrun")
    config = recipe.config(recipe.tokenizer.vocab_size)
    world = World(0, ranks)
    world.arrange(recipe)
    grid = world.grid
    training = recipe.training
    rows = share(0, training.batch_size, 0, ranks // grid.tensor)[1]
    micro = min(training.micro_batch_size or rows, rows)
    dtype = "bf16" if training.dtype == "auto" else training.dtype
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which registers the back end, too

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        sharding = Sharding(config, torch.device("cpu"), world)
        whole = {name: torch.empty(cut.shape, device="meta") for name, cut in sharding.cuts.items()}
        decoder = sharding.build(DTYPES[dtype], value=whole.__getitem__)
        optimizer = Optimizer(decoder, recipe.optimizer, DTYPES[dtype], sharding)
        layout = _Layout(
            recipe, sharding, {name: p for name, p in decoder.named_parameters() if isinstance(p, DTensor)}
        )
    finally:
        dist.destroy_process_group()
    held = optimizer.weights()
    of_head = micro * recipe.seq_len // grid.tensor  # rows whose logits a rank takes
    memory = Memory(
        weights=_bytes(held),
        gradients=_bytes(held),
        optimizer=_bytes(optimizer.state()),
        gathered=layout.gathered(),
        activations=_activations(config, recipe.seq_len, micro, dtype, grid, recipe.parallel.recompute == "blocks"),
        logits=-(-of_head // head_portions(of_head, config.padded_vocab_size))
        * config.padded_vocab_size
        * (8 if dtype == "fp32" else 10),
    )
    shown = {name.replace("blocks.0.", "blocks.N."): tuple(t.shape) for name, t in held.items() if _is_shown(name)}
    return Rehearsal(
        grid=grid,
        parameters=count_parameters(config).total,
        dtype=dtype,
        tokens=training.batch_size * recipe.seq_len,
        rows=rows,
        micro_batches=-(-rows // micro),
        shapes=shown,
        memory=memory,
        collectives=tuple(layout.collectives(-(-rows // micro), micro)),
    )


class _Layout:
    """What follows from how the weights are spread."""

    def __init__(self, recipe: Recipe, sharding: Sharding, weights: dict[str, DTensor]) -> None:
        self._recipe, self._sharding, self._grid, self._config = recipe, sharding, sharding.grid, sharding.config
        self._size = 4 if recipe.training.dtype == "fp32" else 2
        self._uncut = [weight for name, weight in weights.items() if sharding.cuts[name].dim is None]
        self._matrices = {n: w for n, w in weights.items() if n.startswith("blocks.") and w.ndim >= 2}
        # FSDP2's groups; each weight is padded so that all ranks have as many rows.
        grouped: dict[str, list[DTensor]] = {}
        for name, weight in weights.items():
            grouped.setdefault(name.split(".")[1] if name.startswith("blocks.") else "", []).append(weight)
        self._groups = {key: sum(map(self._padded, group)) for key, group in grouped.items()}

    def _padded(self, weight: DTensor) -> int:
        rows, *rest = weight.shape
        return -(-rows // self._grid.shard) * self._grid.shard * math.prod(rest)

    def gathered(self) -> int:
        """Bytes of Memory.gathered."""
        blocks = sorted((n for key, n in self._groups.items() if key), reverse=True)
        there = self._groups[""] + sum(blocks[:2])
        return self._size * there + self._size * (self._groups[""] + blocks[0])

    def collectives(self, micro_batches: int, micro: int) -> Iterator[Collective]:
        grid, size, config = self._grid, self._size, self._config
        blocks = [n for key, n in self._groups.items() if key]
        outer, all_of_it = self._groups[""], sum(self._groups.values())
        if grid.shard > 1:
            part = (grid.shard - 1) / grid.shard
            yield Collective(
                "all_gather",
                "weights, block by block, forward and backward",
                grid.shard,
                micro_batches * (2 * len(blocks) + 1),
                round(micro_batches * size * (2 * sum(blocks) + outer) * part),
            )
            yield Collective(
                "reduce_scatter",
                "gradients, in fp32",
                grid.shard,
                micro_batches * len(self._groups),
                round(micro_batches * 4 * all_of_it * part),
            )
        if grid.replicate > 1:
            own = 4 * all_of_it // grid.shard
            yield _reduced(
                "gradients over replicas", grid.replicate, micro_batches * len(self._groups), own * micro_batches
            )
        if grid.tensor > 1:
            # In a block two of each kind forward and two backward; computing it again ends before its last sum.
            recomputes = self._recipe.parallel.recompute == "blocks"
            gathers, sums = (6, 5) if recomputes else (4, 4)
            passes = config.n_layers * micro_batches
            tokens = micro * self._recipe.seq_len * config.d_model * size * (grid.tensor - 1) // grid.tensor
            for kind, purpose, count in (
                ("all_gather", "tokens before attention and feed-forward", gathers * passes),
                ("reduce_scatter", "their sums behind", sums * passes),
            ):
                yield Collective(kind, purpose, grid.tensor, count, count * tokens)
            uncut = sum(4 * weight.to_local().numel() for weight in self._uncut)
            yield _reduced("gradients of what isn't cut", grid.tensor, len(self._uncut), uncut)
        together = grid.shard * grid.tensor
        if self._recipe.optimizer.name == "muon" and together > 1:
            rounds = self._sharding.rounds(self._matrices)
            parts = sum(weight.to_local().numel() for weight in self._matrices.values())
            wholes = sum(math.prod(self._sharding.cuts[first].shape) for first, *_ in rounds)
            purpose = "matrices to who orthogonalises them, and back"
            yield Collective("all_to_all", purpose, together, 2 * len(rounds), size * (parts + wholes))


def _reduced(purpose: str, ranks: int, count: int, held: int) -> Collective:
    return Collective("all_reduce", purpose, ranks, count, round(2 * held * (ranks - 1) / ranks))


def _activations(config: Config, seq_len: int, micro: int, dtype: str, grid: Grid, recomputes: bool) -> int:
    """What planner.py counts; a tensor rank has its share of it, but for what goes into attention and feed-forward,
    which it has of all tokens."""
    one = dataclasses.replace(config, n_layers=1)
    none_kept = count_activations(config, seq_len, micro, dtype) - config.n_layers * _of_block(
        config, seq_len, micro, dtype
    )
    inputs = 2 * micro * seq_len * config.d_model * (4 if dtype == "fp32" else 2)
    block = _of_block(one, seq_len, micro, dtype) // grid.tensor + inputs * (grid.tensor - 1) // grid.tensor
    if recomputes:
        return none_kept // grid.tensor + config.n_layers * inputs // 2 // grid.tensor + block
    return none_kept // grid.tensor + config.n_layers * block


def _of_block(config: Config, seq_len: int, micro: int, dtype: str) -> int:
    one, two = (dataclasses.replace(config, n_layers=n) for n in (1, 2))
    return count_activations(two, seq_len, micro, dtype) - count_activations(one, seq_len, micro, dtype)


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _is_shown(name: str) -> bool:
    return not name.startswith("blocks.") or name.startswith("blocks.0.")
