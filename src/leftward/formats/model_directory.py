"""A model directory, as transformers has it: config.json, model.safetensors or pytorch_model.bin, a tokenizer's files.

A run directory is one, with the training's own files beside. What is read here may come from anywhere, so everything
about it that can be wrong is one line that names the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leftward import files
from leftward.config import Config
from leftward.errors import UserError, printable
from leftward.formats.directory import check_model_directory
from leftward.formats.hf import config_from_hf, from_hf, to_hf
from leftward.formats.pickled import read_pickled
from leftward.formats.tensors import read_tensors, write_tensors
from leftward.kernels.packed import Packed, PackedEmbedding, PackedLinear
from leftward.model.decoder import Decoder
from leftward.text import directory as tokenizer_files
from leftward.text.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
PICKLED = "pytorch_model.bin"
"""What directories of older versions of transformers have. Read where there is no model.safetensors, never written."""
_READERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {WEIGHTS: read_tensors, PICKLED: read_pickled}
_INDEX = ".index.json"  # behind the name: which of several files has which tensor
# A plain file beside the index: no path, so that an index can't reach out of its directory. Whoever may put a symbolic
# link there may; the hub's own cache is made of them.
_SHARD = re.compile(r"[\w-][\w.-]{0,200}")
_LONGEST_MESSAGE = 1000
_COMPILED = "_orig_mod."  # what torch.compile puts into the names of the weights


def save_model(
    directory: Path,
    config: Config,
    state: Mapping[str, Tensor],
    tokenizer: Tokenizer | None = None,
    generation: Mapping[str, Any] | None = None,
    model_type: str | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a model directory. The weights come last, so that a directory that has them has the rest.

    Args:
        state: a Decoder's state dict; its dtype is the file's.
        generation: what generation_config.json says beside the tokenizer's special ids; what is None or [] is left out.
        model_type: the Hugging Face class to prefer, where several can say all of `config`.
        max_shard_bytes: weights beyond it go into several files and an index, as transformers has them. None: one file.

    Raises:
        UserError: the disk refuses; the files that were there are as they were.
    """
    state = {name.replace(_COMPILED, ""): tensor for name, tensor in state.items()}
    config_json, tensors = to_hf(config, state, model_type)
    ids = {} if tokenizer is None else {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    with files.writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(directory, model_max_length=config.max_seq_len)
    said = {key: value for key, value in (generation or {}).items() if value not in (None, [])}
    named = {key: value for key, value in ids.items() if value is not None}
    files.write_json(directory / "generation_config.json", named | said)
    files.write_json(directory / "config.json", config_json | ids)
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_tensors(directory / WEIGHTS, tensors)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(directory / name, shard)
        places |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    files.write_json(directory / f"{WEIGHTS}{_INDEX}", {"metadata": {"total_size": total}, "weight_map": places})


def _shards(tensors: Mapping[str, Tensor], most: int | None) -> list[dict[str, Tensor]]:
    """`tensors` in their order, in parts of at most that many bytes; a tensor that is larger has its own."""
    shards: list[dict[str, Tensor]] = [{}]
    room = float("inf") if most is None else float(most)
    left = room
    for name, tensor in tensors.items():
        if tensor.nbytes > left and shards[-1]:
            shards.append({})
            left = room
        shards[-1][name] = tensor
        left -= tensor.nbytes
    return shards


def save_weights(directory: Path, config: Config, state: Mapping[str, Tensor], model_type: str | None = None) -> None:
    """Write only the weights of a model directory that has the rest; else as `save_model`. Raises: UserError."""
    write_tensors(directory / WEIGHTS, to_hf(config, state, model_type)[1])


def load_model(
    directory: Path | str, dtype: torch.dtype | None = torch.float32
) -> tuple[Decoder, Tokenizer | None, dict[str, Any]]:
    """Read a model directory: the Decoder in evaluation mode, its tokenizer if it has one, and generation_config.json.

    Whether its weights are numbers is not looked at: to read all that is only mapped here would take a tenth to a third
    of the time again. Generation refuses what comes of a NaN, and `leftward check` names the tensor.

    Raises:
        UserError: a file is missing, damaged or does not fit the others, or the model is of a kind not supported yet.
    """
    directory = Path(directory)
    check_model_directory(directory)
    config_json = _read_object(directory / "config.json")
    path, tensors = _read_weights(directory)
    try:
        config, state = from_hf(config_json, tensors)
    except UserError as error:
        where = path if str(error).startswith("tensor ") else directory / "config.json"
        raise UserError(f"{where}: {printable(str(error), _LONGEST_MESSAGE)}") from None
    decoder = build_decoder(config, {name: tensor.to(dtype or _as_stored(tensor)) for name, tensor in state.items()})
    tokenizer = Tokenizer.load(directory) if tokenizer_files.find(directory) else None
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{directory / 'tokenizer.json'} has {tokenizer.vocab_size} tokens, but the model's vocabulary holds "
            f"{config.vocab_size}: it is another model's tokenizer"
        )
    return decoder, tokenizer, _read_generation(directory, config_json)


def load_config(directory: Path) -> Config:
    """The Config of a model directory. Raises: UserError."""
    check_model_directory(directory)
    try:
        return config_from_hf(_read_object(directory / "config.json"))
    except UserError as error:
        where = directory / "config.json"
        message = printable(str(error), _LONGEST_MESSAGE)
        raise UserError(message if message.startswith(str(where)) else f"{where}: {message}") from None


def _as_stored(tensor: Tensor) -> torch.dtype:
    """The tensor's own dtype, where a model can compute in it: not in 8 bits."""
    return tensor.dtype if tensor.element_size() > 1 else torch.float32


def build_decoder(
    config: Config, state: Mapping[str, Tensor], packed: Mapping[str, list[Packed]] | None = None
) -> Decoder:
    """A Decoder in evaluation mode around the tensors of `state`, which it keeps: nothing is drawn or copied. Matrices
    that are `packed` are not in `state`, and are no parameters."""
    with torch.device("meta"):
        decoder = Decoder(config)
    put = dict(packed or {})
    if config.tie_embeddings and "embed.weight" in put:
        put["head.weight"] = put["embed.weight"]
    for name, parts in put.items():
        path = name.removesuffix(".weight")
        if path in ("embed", "position_embed"):
            decoder.set_submodule(path, PackedEmbedding(parts))
        else:
            decoder.set_submodule(path, PackedLinear(parts, state.get(f"{path}.bias")))
    tied = {"head.weight": state["embed.weight"]} if config.tie_embeddings and "embed.weight" in state else {}
    decoder.load_state_dict({**state, **tied}, assign=True)
    if config.tie_embeddings and "embed.weight" in state:  # assigning has put two parameters where one was
        decoder.head.weight = decoder.embed.weight
    return decoder.eval()


def _read_weights(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """All tensors of the one file, or of the several that an index names, with the file to blame for what they are."""
    for name, read in _READERS.items():
        path, index = directory / name, directory / f"{name}{_INDEX}"
        if path.exists():
            return path, read(path)
        if index.exists():
            return index, _read_shards(index, read)
    path = directory / WEIGHTS
    if (directory / "checkpoints").is_dir():
        raise UserError(f"{path} is missing: the training has not got that far; leftward train --resume {directory}")
    raise UserError(f"{path} is missing")


def _read_shards(index: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    places = _read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise UserError(f"{index} is damaged: it has no weight_map of tensors to files")
    tensors: dict[str, Tensor] = {}
    found_in: dict[str, str] = {}
    for shard in sorted(set(places.values())):
        if not _SHARD.fullmatch(shard):
            raise UserError(f"{index} names {shard[:100]!r}, which is not a file beside it")
        held = read(index.parent / shard)
        if twice := held.keys() & tensors.keys():
            name = min(twice)
            raise UserError(f"{index}: tensor {printable(name)} is in {found_in[name]} and in {shard}")
        tensors |= held
        found_in |= dict.fromkeys(held, shard)
    for name, shard in places.items():
        if found_in.get(name) != shard:
            where = f"is in {found_in[name]}" if name in found_in else "is missing"
            raise UserError(f"{index}: tensor {printable(name)} {where}; expected in {shard}")
    return tensors


def _read_object(path: Path) -> dict[str, Any]:
    content = files.read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it must hold an object")
    return content


def _read_generation(directory: Path, config_json: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json, or what config.json says where there is none. eos_token_id is always a list."""
    path = directory / "generation_config.json"
    if path.exists():
        values = _read_object(path)
    else:
        path = directory / "config.json"
        values = {key: config_json.get(key) for key in ("bos_token_id", "eos_token_id")}
    bos, eos = values.get("bos_token_id"), values.get("eos_token_id")
    eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token_id) is int for token_id in ([] if bos is None else [bos]) + eos):
        given = printable(f"bos_token_id {bos!r} and eos_token_id {eos!r}", 300)
        raise UserError(f"{path}: {given} must be integers")
    return {**values, "bos_token_id": bos, "eos_token_id": eos}
