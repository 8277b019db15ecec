"""The tensors of a checkpoint that several ranks write, each what it has, and that any number of ranks reads again.

    shard-00001-model-00001-of-00001.safetensors …   written by torch.distributed.checkpoint, a file a rank; no pickle
    tensors.json                                     the shape of everything, to know that nothing is missing

Tensors are kept in the order of a Decoder's own weights: what sharding.py cuts by itself, such as q, k and v of the one
matrix qkv, is a tensor by itself, NAME:0, NAME:1 …, of which each rank has one block at most.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from leftward import files
from leftward.errors import UserError, printable
from leftward.training.sharding import OTHER_TENSORS, Cut, Sharding

INDEX = "tensors.json"
_ONE = Cut((1,))  # of a number that all ranks have


def write(directory: Path, tensors: Mapping[str, Tensor], sharding: Sharding) -> None:
    """Write what this rank has. Every rank calls it with the same names, and a directory that all of them see.

    Args:
        tensors: under the name of a weight, behind anything that ends in a dot; and numbers.

    Raises:
        OSError: the disk refuses, here or on another rank.
    """
    blocks: dict[str, _Block] = {}
    index: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        cut = _cut_of(name, sharding)
        index |= {key: cut.part_shape(part) for part, key in enumerate(_keys(name, cut))}
        blocks |= _blocks(name, cut, tensor.reshape(tensor.shape or (1,)), sharding)
    if sharding.world.is_first:
        files.write_json(directory / INDEX, index)
    with _failures():
        save(
            blocks,
            storage_writer=HuggingFaceStorageWriter(str(directory), save_distributed=True),
            planner=_Save(False, False),
        )


def read(directory: Path, sharding: Sharding | None) -> dict[str, Tensor]:
    """What this rank is to have of each tensor; without a `sharding`, all of it.

    Raises:
        UserError: something is missing or damaged, or the tensors are those of another model.
    """
    reader, index = HuggingFaceStorageReader(str(directory)), files.read_json(directory / INDEX)
    with _damaged(directory):
        shapes = {key: tuple(shape) for key, shape in index.items()}
        stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
        for key, shape in shapes.items():
            if sum(math.prod(chunk.sizes) for chunk in stored[key].chunks) != math.prod(shape):
                raise ValueError(f"a part of {key} is missing")
        names: dict[str, list[str]] = {}
        for key in shapes:
            names.setdefault(key.partition(":")[0], []).append(key)
        if sharding is None:
            whole = {key: torch.empty(shape, dtype=stored[key].properties.dtype) for key, shape in shapes.items()}
            blocks = {key: _Block(shapes[key], (0,) * len(shapes[key]), tensor) for key, tensor in whole.items()}
            _load(blocks, reader)
            joined = {name: torch.cat([whole.pop(key) for key in keys]) for name, keys in names.items()}
            return {name: _unboxed(name, tensor) for name, tensor in joined.items()}
        blocks, result = {}, {}
        for name, keys in names.items():
            cut = _cut_of(name, sharding)
            if keys != _keys(name, cut) or any(shapes[key] != cut.part_shape(part) for part, key in enumerate(keys)):
                raise UserError(OTHER_TENSORS)
            shape = cut.shape if cut is _ONE else cut.local_shape(sharding.grid, sharding.place)
            local = torch.empty(shape, dtype=stored[keys[0]].properties.dtype)
            result[name] = _unboxed(name, local)
            blocks |= _blocks(name, cut, local, sharding)
        _load(blocks, reader)
        return result


def _load(blocks: dict[str, _Block], reader: HuggingFaceStorageReader) -> None:
    """Fill the numbers of `blocks`, each rank by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant
        load(blocks, storage_reader=reader, planner=_Load(), no_dist=True)


def _cut_of(name: str, sharding: Sharding) -> Cut:
    """How the tensor of this name is cut: as the weight that it is, or is kept for."""
    return _ONE if _is_number(name) else sharding.cut_of(name)


def _is_number(name: str) -> bool:
    return ".step." in name


def _unboxed(name: str, tensor: Tensor) -> Tensor:
    return tensor.view(()) if _is_number(name) else tensor


def _keys(name: str, cut: Cut) -> list[str]:
    return [f"{name}:{part}" for part in range(len(cut.parts))] if len(cut.parts) > 1 else [name]


def _blocks(name: str, cut: Cut, local: Tensor, sharding: Sharding) -> dict[str, _Block]:
    grid, place = sharding.grid, sharding.place
    if cut is _ONE:
        return {name: _Block((1,), (0,), local)}
    keys = _keys(name, cut)
    return {
        keys[piece.part]: _Block(cut.part_shape(piece.part), piece.offset, local[piece.local])
        for piece in cut.pieces(grid, place)
    }


class _Block(NamedTuple):
    """A block of a tensor."""

    shape: tuple[int, ...]
    """Of the tensor."""
    offset: tuple[int, ...]
    numbers: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offset), self.numbers.shape)


class _Save(DefaultSavePlanner):
    """Writes blocks; of what several ranks have, one does. (False, False): there is nothing to flatten."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, block in self.state_dict.items():
            properties = TensorProperties.create_from_tensor(block.numbers)
            data = TensorWriteData(block.chunk, properties, torch.Size(block.shape))
            items.append(WriteItem(MetadataIndex(name, block.chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].numbers


class _Load(DefaultLoadPlanner):
    """Reads blocks, of whatever blocks they were written in."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored: dict[str, Any] = self.metadata.state_dict_metadata
        blocks = self.state_dict.items()
        return LoadPlan(
            [
                item
                for name, block in blocks
                for item in create_read_items_for_chunk_list(name, stored[name], [block.chunk])
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].numbers


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """A disk's refusal as it was raised, on whichever rank."""
    try:
        yield
    except CheckpointException as error:
        refusals = [failure for failure, _ in error.failures.values() if isinstance(failure, OSError)]
        if refusals:
            raise refusals[0] from None
        raise


@contextlib.contextmanager
def _damaged(directory: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (CheckpointException, SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
        reason = str(failures[0][0] if failures else error)
        raise UserError(f"{directory} is damaged ({printable(reason, 300)})") from None
