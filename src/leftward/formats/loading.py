"""What a path or a name stands for, opened: a model directory, a GGUF file, a file of llama2.c, a repository of the
Hugging Face hub. What is read comes from anywhere; the errors are those of the formats."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch

from leftward import files
from leftward.config import Config
from leftward.errors import UserError
from leftward.formats.directory import is_hub_id
from leftward.formats.model_directory import build_decoder, load_config, load_model
from leftward.kernels.packed import packed_of
from leftward.model.decoder import Decoder
from leftward.model.positions import frequencies
from leftward.text.tokenizer import Tokenizer

# What a repository has that a model is made of; never code. Pickles only where there is nothing better.
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "merges.txt", "*.jinja"]


class Loaded(NamedTuple):
    decoder: Decoder
    """In evaluation mode."""
    tokenizer: Tokenizer | None
    generation: dict[str, Any]
    """generation_config.json; eos_token_id is always a list."""
    model_type: str | None
    """The Hugging Face class that it came from, if it did."""


def open_model(what: Path | str, dtype: torch.dtype | None = torch.float32, packs: bool = False) -> Loaded:
    """Open a run or model directory, a .gguf file, a .bin file of llama2.c (with tok512.bin beside it), or "owner/name"
    on the hub. `dtype` None: floats as they are stored, quantised ones in fp32. `packs`: quantised matrices of a .gguf
    file stay quantised.

    Raises:
        UserError: it is not there, damaged, or of a kind that is not supported.
    """
    path = Path(what)
    if path.suffix == ".gguf":
        return _open_gguf(path, dtype, packs)
    if path.suffix == ".bin" and path.is_file():
        return _open_llama2c(path, dtype)
    if is_hub_id(what):
        path = _from_hub(str(what))
    decoder, tokenizer, generation = load_model(path, dtype)
    return Loaded(decoder, tokenizer, generation, files.read_json(path / "config.json").get("model_type"))


def open_config(what: Path | str) -> Config:
    """The Config alone of what `open_model` opens, before any memory is taken for weights. Raises: UserError."""
    path = Path(what)
    if path.suffix == ".gguf":
        from leftward.formats.gguf import GGUF  # as below
        from leftward.formats.gguf_models import config_of

        try:
            return config_of(GGUF.open(path))
        except UserError as error:
            raise UserError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None
    if path.suffix == ".bin" and path.is_file():
        from leftward.formats.llama2c import read_llama2c

        return read_llama2c(path)[0]
    return load_config(_from_hub(str(what)) if is_hub_id(what) else path)


def shortened(decoder: Decoder, max_seq_len: int) -> Decoder:
    """The same weights with a shorter context. Raises: UserError, where it is no length from 1 to the model's own."""
    config = decoder.config
    if type(max_seq_len) is not int or not 1 <= max_seq_len <= config.max_seq_len:
        raise UserError(f"max_seq_len is {max_seq_len!r}: it must be a whole number from 1 to {config.max_seq_len}")
    state = decoder.state_dict()
    if "position_embed.weight" in state:
        state["position_embed.weight"] = state["position_embed.weight"][: max_seq_len + config.position_offset]
    return build_decoder(with_context(config, max_seq_len), state, packed_of(decoder))


def with_context(config: Config, max_seq_len: int) -> Config:
    """The Config of a model's weights with a context that may be shorter."""
    if max_seq_len == config.max_seq_len:
        return config
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "longrope":  # the factor is the whole context's, the angles the text's
        scaling = dataclasses.replace(scaling, attention_factor=frequencies(config)[1])
    return dataclasses.replace(config, max_seq_len=max_seq_len, rope_scaling=scaling)


def _open_gguf(path: Path, dtype: torch.dtype | None, packs: bool) -> Loaded:
    from leftward.formats.gguf import GGUF  # its tables of quantised kinds are for those who need them
    from leftward.formats.gguf_models import from_gguf, from_gguf_packed

    gguf = GGUF.open(path)
    decoder = build_decoder(*(from_gguf_packed(gguf) if packs else from_gguf(gguf, dtype)))
    tokenizer = Tokenizer.from_gguf(gguf.metadata) if "tokenizer.ggml.model" in gguf.metadata else None
    ids = [gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos = [token_id for token_id in dict.fromkeys(ids) if isinstance(token_id, int)]
    return Loaded(decoder, tokenizer, {"eos_token_id": eos}, None)


def _open_llama2c(path: Path, dtype: torch.dtype | None) -> Loaded:
    from leftward.formats.llama2c import read_llama2c, read_tok512

    config, state = read_llama2c(path)
    vocabulary = path.parent / "tok512.bin"
    tokenizer = Tokenizer.from_pieces(read_tok512(vocabulary)) if vocabulary.exists() else None
    state = {name: tensor.to(dtype or torch.float32) for name, tensor in state.items()}
    return Loaded(build_decoder(config, state), tokenizer, {"eos_token_id": [1, 2]}, None)  # its run.c stops at bos too


def _from_hub(name: str) -> Path:
    """The local copy of a repository, downloaded where there is none. HF_HUB_OFFLINE and HF_TOKEN are honoured."""
    from huggingface_hub import snapshot_download  # takes half a second, and most models are paths

    try:
        path = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
        if not any(path.glob("*.safetensors")):
            path = Path(snapshot_download(name, allow_patterns=[*_HUB_FILES, "pytorch_model*.bin"]))
        return path
    except Exception as error:  # of its own kinds, of the network's and of the disk's
        reason = str(error).strip().splitlines()
        raise UserError(
            f"{name} is no path here, and the hub does not give it: {(reason or [type(error).__name__])[0]}"
        ) from None
