"""An opened model to the files of others: a Hugging Face directory, or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leftward.errors import UserError
from leftward.formats.gguf import write_gguf
from leftward.formats.gguf_models import to_gguf
from leftward.formats.loading import Loaded
from leftward.formats.model_directory import save_model
from leftward.formats.quants import WRITABLE
from leftward.text.chat import ChatTemplate
from leftward.text.tokenizer import Tokenizer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def write_hf_model(directory: Path, loaded: Loaded, dtype: str | None, max_shard_bytes: int) -> None:
    """Raises: UserError, where the disk refuses. A model that no class can express is written as our own."""
    save_model(
        directory,
        loaded.decoder.config,
        _weights(loaded, dtype),
        loaded.tokenizer,
        loaded.generation,
        model_type=loaded.model_type,
        max_shard_bytes=max_shard_bytes,
    )


def write_gguf_model(path: Path, loaded: Loaded, dtype: str | None, quantize: str | None, name: str) -> None:
    """Raises: UserError: llama.cpp has no such architecture or tokenizer, the kind is none, or the disk refuses."""
    kind = None if quantize is None else quantize.upper()
    if kind is not None and kind not in WRITABLE:
        raise UserError(f"quantize is {quantize!r}: {', '.join(WRITABLE).lower()} are possible")
    metadata = {"general.name": name}
    if loaded.tokenizer is not None:
        metadata |= loaded.tokenizer.to_gguf(eot_id=_eot_id(loaded.tokenizer, loaded.generation))
    write_gguf(path, *to_gguf(loaded.decoder.config, _weights(loaded, dtype), kind=kind, metadata=metadata))


def _eot_id(tokenizer: Tokenizer, generation: Mapping[str, Any]) -> int | None:
    """The token that ends a turn, which llama.cpp stops at beside the one that ends a text: what the chat template
    ends an answer with, or else one more that the model stops at."""
    of_template = ChatTemplate.of(tokenizer).end_ids if tokenizer.chat_template else ()
    others = (token_id for token_id in generation["eos_token_id"] if token_id != tokenizer.eos_id)
    return next(iter((*of_template, *others)), None)


def _weights(loaded: Loaded, dtype: str | None) -> dict[str, Tensor]:
    state = loaded.decoder.state_dict()
    return state if dtype is None else {name: tensor.to(_DTYPES[dtype]) for name, tensor in state.items()}
