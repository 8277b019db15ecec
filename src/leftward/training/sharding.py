"""One Decoder over many ranks: which numbers of each weight a rank has, and what it exchanges with the others.

The ranks are a grid, replicate × shard × tensor. The rows of the batch are shared out over the first two, and a step's
tokens over all three. A weight is cut twice:

- over the tensor ranks, so that each has whole attention heads and hidden units of its own (Shoeybi et al. 2019, arXiv
  1909.08053). q, k and v, or gate and up, are one matrix of several parts, each of which is cut; what isn't cut every
  tensor rank has. Between attention and feed-forward, where positions don't meet, a tensor rank works on its own part
  of the sequence (Korthikanti et al. 2022, arXiv 2205.05198). So what isn't cut has gradients to be summed over all.
- what a tensor rank has, by rows over the shard ranks: FSDP2 gathers it block by block when it is needed.

All that is in the order of `Decoder`'s own weights again wherever anybody else sees it: in checkpoints, in the update
of Muon, in what is published.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from leftward.config import Config
from leftward.errors import UserError
from leftward.model.block import Block
from leftward.model.decoder import Decoder, initialise
from leftward.model.feedforward import FeedForward
from leftward.training.parallel import Grid, World, recompute_blocks

OTHER_TENSORS = "the checkpoint holds other tensors than this recipe's model and optimizer have"
DIMENSIONS = ("replicate", "shard", "tensor")


# ---- which numbers are where


class Piece(NamedTuple):
    """Numbers of a weight that one rank has: a block of one of its parts."""

    part: int
    offset: tuple[int, ...]
    """In the part."""
    size: tuple[int, ...]
    whole: tuple[slice, ...]
    """Its place in the whole weight."""
    local: tuple[slice, ...]
    """Its place in what the rank has."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a weight is cut over tensor ranks."""

    shape: tuple[int, ...]
    dim: int | None = None
    """None: it isn't, every tensor rank has all of it."""
    parts: tuple[int, ...] = ()
    """Along `dim`, or along the first where there is none: sizes of what is cut by itself."""

    def pieces(self, grid: Grid, place: Grid) -> list[Piece]:
        """What the rank at `place` has."""
        n, index = (1, 0) if self.dim is None else (grid.tensor, place.tensor)
        dim = self.dim or 0
        rows = self.shape[0] // n if dim == 0 else self.shape[0]
        step = -(-rows // grid.shard)  # as torch.chunk and FSDP2 cut
        first, last = (min(edge * step, rows) for edge in (place.shard, place.shard + 1))
        pieces = []
        before = 0  # of the parts before this one: [whole, on a tensor rank]
        for part, size in enumerate(self.parts or self.shape[:1]):
            own = size // n
            start, stop = before // n, before // n + own  # in what the tensor rank has
            whole, local = [slice(0, length) for length in self.shape], [slice(0, length) for length in self.shape]
            offset = [0] * len(self.shape)
            if dim == 0:
                start, stop = max(start, first), min(stop, last)
                if start >= stop:
                    before += size
                    continue
                local[0] = slice(start - first, stop - first)
            else:
                whole[0], local[0], offset[0] = slice(first, last), slice(0, last - first), first
                local[dim] = slice(start, stop)
            offset[dim] = index * own + start - before // n
            whole[dim] = slice(before + offset[dim], before + offset[dim] + stop - start)
            before += size
            sizes = tuple(axis.stop - axis.start for axis in local)
            if math.prod(sizes):
                pieces.append(Piece(part, tuple(offset), sizes, tuple(whole), tuple(local)))
        return pieces

    def local_shape(self, grid: Grid, place: Grid) -> tuple[int, ...]:
        """Of what the rank at `place` has."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] //= grid.tensor
        step = -(-shape[0] // grid.shard)
        shape[0] = max(0, min(step, shape[0] - place.shard * step))
        return tuple(shape)

    def part_shape(self, part: int) -> tuple[int, ...]:
        """Of one of the parts, whole."""
        shape = list(self.shape)
        if self.parts:
            shape[self.dim or 0] = self.parts[part]
        return tuple(shape)

    def own(self, whole: Tensor, grid: Grid, place: Grid) -> Tensor:
        """What the rank at `place` has of `whole`."""
        local = whole.new_empty(self.local_shape(grid, place))
        for piece in self.pieces(grid, place):
            local[piece.local] = whole[piece.whole]
        return local


def cuts(config: Config) -> dict[str, Cut]:
    """Of every weight of `config`'s Decoder, a tied head left out."""
    with torch.device("meta"):
        decoder = Decoder(config)
    return {name: _cut(name, tuple(weight.shape), config) for name, weight in decoder.named_parameters()}


def _cut(name: str, shape: tuple[int, ...], config: Config) -> Cut:
    of_heads = tuple(n * config.head_dim for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads))
    of_hidden = (config.d_ff,) * (2 if config.is_gated else 1)
    by_rows = {"attn.qkv": of_heads, "ff.up": of_hidden, "attn": (config.n_heads,)}
    module, _, kind = name.rpartition(".")
    inside = module.split(".", 2)[-1] if name.startswith("blocks.") else ""
    if config.n_experts and inside.startswith("ff."):
        return Cut(shape)
    if inside in by_rows:  # of "attn" itself, its sinks
        return Cut(shape, 0, by_rows[inside])
    if inside in ("attn.o", "ff.down") and kind == "weight":
        return Cut(shape, 1, (shape[1],))
    return Cut(shape)


# ---- the Decoder of a rank


class Sharding:
    """A Decoder that is spread over a grid of ranks, seen from one of them."""

    def __init__(self, config: Config, device: torch.device, world: World) -> None:
        self.config, self.device, self.world = config, device, world
        grid = self.grid = world.grid
        self.place = world.place
        self.cuts = cuts(config)
        self.mesh = init_device_mesh(device.type, tuple(grid), mesh_dim_names=DIMENSIONS)
        # The ranks that have a whole model together.
        replicas = init_device_mesh(device.type, (grid.replicate, grid.shard * grid.tensor))
        self._replica = replicas.get_group(1)
        self._places = [Grid(0, *divmod(number, grid.tensor)) for number in range(grid.shard * grid.tensor)]

    # -- building

    def build(
        self,
        dtype: torch.dtype,
        *,
        recompute: bool = False,
        compiled: bool = False,
        value: Callable[[str], Tensor] | None = None,
    ) -> Decoder:
        """This rank's part of the Decoder, in fp32, computing in `dtype`. Never more than a block of it is there whole.

        Args:
            value: of each weight, whole, asked in the order of `Decoder`'s parameters. None: as a new Decoder has it.
        """
        config, grid = self.config, self.grid
        with torch.device("meta"):
            decoder = Decoder(config)
            if grid.tensor > 1:
                decoder.blocks = nn.ModuleList(self._block_of_tensor_rank(layer) for layer in range(config.n_layers))
        if grid.tensor > 1:
            decoder.blocks[0].register_forward_pre_hook(lambda block, args: (self.world.own_tokens(args[0]), *args[1:]))
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        dimensions = ("replicate", "shard") if grid.replicate > 1 else ("shard",)
        shard = functools.partial(fully_shard, mesh=self.mesh[dimensions], mp_policy=policy)
        if recompute:
            recompute_blocks(decoder)
        value = value or new_weights(config)
        blocks = dict(enumerate(decoder.blocks))
        # In the order of named_parameters, in which a new Decoder's weights are drawn.
        for name in [name for name, _ in decoder.named_parameters()]:
            layer = int(name.split(".")[1]) if name.startswith("blocks.") else None
            _put(decoder, name, self.cuts[name].own(value(name), grid._replace(shard=1), self.place._replace(shard=0)))
            if layer is not None and name == f"blocks.{layer}.{_last_of(blocks[layer])}":
                if compiled:
                    blocks[layer].compile()
                shard(blocks[layer])
        if config.tie_embeddings:
            decoder.head.weight = decoder.embed.weight
        shard(decoder)
        register_fsdp_forward_method(decoder, "hidden")
        for module in (*decoder.blocks, decoder):  # a loss over all tokens has a gradient that is a sum, no mean
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return decoder

    def _block_of_tensor_rank(self, layer: int) -> Block:
        """A block with this rank's heads and hidden units, which takes and gives this rank's tokens."""
        config, n = self.config, self.grid.tensor
        own = dataclasses.replace(
            config, n_heads=config.n_heads // n, n_kv_heads=config.n_kv_heads // n, d_ff=config.d_ff // n
        )
        block, mesh = Block(own, layer), self.mesh["tensor"]
        assert isinstance(block.ff, FeedForward)  # `check` has refused experts
        for sublayer in (block.attn, block.ff):
            sublayer.register_forward_pre_hook(lambda module, args: (_all_tokens(args[0], mesh), *args[1:]))
        block.attn.o = _Summed(block.attn.o, mesh)
        block.ff.down = _Summed(block.ff.down, mesh)
        return block

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank has of weights, or of what an optimizer keeps for them under names that end like theirs.

        Raises:
            UserError: they are another model's.
        """
        result = {}
        for name, tensor in tensors.items():
            cut = self.cut_of(name)
            if tensor.ndim and tuple(tensor.shape) != cut.shape:
                raise UserError(OTHER_TENSORS)
            result[name] = cut.own(tensor, self.grid, self.place) if tensor.ndim else tensor
        return result

    def cut_of(self, name: str) -> Cut:
        """How a tensor is cut: as the weight that it is or, behind a dot of its name, is kept for.

        Raises:
            UserError: it is of another model.
        """
        weight = name
        while weight not in self.cuts:
            if "." not in weight:
                raise UserError(OTHER_TENSORS)
            weight = weight.partition(".")[2]
        return self.cuts[weight]

    # -- a step

    def local(self, weight: Tensor) -> Tensor:
        """A weight's, or gradient's, numbers on this rank."""
        detached = weight.detach()
        return detached.to_local() if isinstance(detached, DTensor) else detached

    @torch.no_grad()
    def norm(self, grads: Mapping[str, Tensor]) -> float:
        """The norm of the whole gradient, which is completed before: of weights that aren't cut, each tensor rank has
        what comes from its own tokens and heads."""
        if self.grid.tensor > 1:
            group = self.mesh.get_group("tensor")
            for name, grad in grads.items():
                if self.cuts[name].dim is None:
                    dist.all_reduce(grad, group=group)
        # Each number once: of what several ranks have, the first counts.
        first = self.place.replicate == 0, self.place.tensor == 0
        counted = [grad for name, grad in grads.items() if first[0] and (first[1] or self.cuts[name].dim is not None)]
        norms = torch._foreach_norm(counted, 2, torch.float32) if counted else [torch.zeros(())]
        squares = torch.stack(list(norms)).double().square().sum().cpu()
        return math.sqrt(self.world.sum(squares.item())[0])

    @torch.no_grad()
    def transformed(self, tensors: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """`change` of whole weights, of which each rank has its part: each is put together on one rank, changed there
        and handed back.

        Args:
            tensors: of one dtype; what this rank has of each.
            change: whole → whole
        """
        ranks, me = len(self._places), self.place.shard * self.grid.tensor + self.place.tensor
        result: dict[str, Tensor] = {}
        for batch in self.rounds(tensors):
            mine = self.cuts[batch[me]] if me < len(batch) else None
            sent = [tensors[name].numel() for name in batch] + [0] * (ranks - len(batch))
            shapes = [mine.local_shape(self.grid, place) if mine else (0,) for place in self._places]
            came = [math.prod(shape) for shape in shapes]
            out = torch.cat([tensors[name].flatten() for name in batch])
            received = out.new_empty(sum(came))
            dist.all_to_all_single(received, out, came, sent, group=self._replica)
            if mine:
                parts = [part.view(shape) for part, shape in zip(received.split(came), shapes, strict=True)]
                changed = change(self._joined(mine, parts))
                received = torch.cat([mine.own(changed, self.grid, place).flatten() for place in self._places])
            dist.all_to_all_single(out, received.to(out.dtype), sent, came, group=self._replica)
            for name, part in zip(batch, out.split(sent[: len(batch)]), strict=True):
                result[name] = part.view_as(tensors[name])
        return result

    def rounds(self, names: Iterable[str]) -> list[list[str]]:
        """Weights in groups of as many as ranks have a whole model together: the i-th of a group is for the i-th rank,
        and those of a group are about as large."""
        ordered = sorted(names, key=lambda name: (-math.prod(self.cuts[name].shape), name))
        return [ordered[first : first + len(self._places)] for first in range(0, len(ordered), len(self._places))]

    # -- what others see

    def whole(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Each of the weights whole, in main memory, one after the other: on the first rank, which alone gets any."""
        for name, tensor in tensors.items():
            cut = self.cuts[name]
            shapes = [cut.local_shape(self.grid, place) for place in self._places]
            most = max(map(math.prod, shapes))
            gathered = list(tensor.new_empty(len(shapes), most))
            dist.all_gather(gathered, F.pad(tensor.flatten(), (0, most - tensor.numel())), group=self._replica)
            if self.world.is_first:
                parts = [row[: math.prod(shape)].view(shape) for row, shape in zip(gathered, shapes, strict=True)]
                yield name, self._joined(cut, parts).cpu()

    def _joined(self, cut: Cut, parts: Iterable[Tensor]) -> Tensor:
        """A whole weight of what each rank of a replica has."""
        parts = list(parts)
        whole = parts[0].new_empty(cut.shape)
        for place, part in zip(self._places, parts, strict=True):
            for piece in cut.pieces(self.grid, place):
                whole[piece.whole] = part[piece.local]
        return whole


def new_weights(config: Config) -> Callable[[str], Tensor]:
    """The weights of a new Decoder, drawn one at a time: asked in the order of its parameters they are the same."""
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in Decoder(config).named_parameters()}
    for layer in range(config.n_layers):  # what PyTorch's modules draw when they are made, in vain, comes first
        Block(config, layer)
    nn.Linear(config.d_model, config.padded_vocab_size, bias=config.head_bias)

    def value(name: str) -> Tensor:
        weight = torch.empty(shapes[name])
        initialise(config, {name: weight})
        return weight

    return value


def _last_of(block: nn.Module) -> str:
    return [name for name, _ in block.named_parameters()][-1]


def _put(decoder: nn.Module, name: str, value: Tensor) -> None:
    module, _, kind = name.rpartition(".")
    setattr(decoder.get_submodule(module), kind, nn.Parameter(value))


class _Summed(nn.Linear):
    """The last product of a sublayer, of which each tensor rank has a summand for all tokens: its own tokens' sums."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:  # [B, T, in / tensor] → [B, T / tensor, out]
        summand = DTensor.from_local(F.linear(x, self.weight), self.mesh, [Partial()], run_check=False)
        y = summand.redistribute(placements=[Shard(1)]).to_local()
        return y if self.bias is None else y + self.bias


def _all_tokens(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """[B, T / tensor, D] → [B, T, D]; each rank's gradient is a summand."""
    own = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
    return own.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
