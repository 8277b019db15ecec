"""The files of llama2.c (Karpathy 2023, github.com/karpathy/llama2.c): models of the "version 0" header and their
vocabularies. Read only; versions 1 and 2 (a magic number "ak42") are refused by name.

    header      7 int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size (negative: the head has weights of
                its own), seq_len
    weights     fp32, each kind for all layers together, in the order of `_weights`
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from leftward.config import Config
from leftward.errors import UserError
from leftward.formats.gguf_architectures import INTERLEAVE
from leftward.formats.mapping import map_file

_HEADER = struct.Struct("<7i")
_VERSIONED = b"24ka"  # 0x616b3432, little endian
_PICKLED = (b"PK\3\4", b"\x80\2")  # PyTorch's files have the same ending
_LONGEST_PIECE = 1 << 16


def read_llama2c(path: Path | str) -> tuple[Config, dict[str, Tensor]]:
    """The Config and a Decoder's state dict, a tied head left out. The rotary pairs (2i, 2i + 1) become (i, i + n / 2).

    Raises:
        UserError: it is missing, or its size is not the one that its header says.
    """
    path = Path(path)
    data = map_file(path, _HEADER.size)
    if data[:4] == _VERSIONED:
        raise UserError(f"{path} is of a later version of llama2.c's format; only the first one (version 0) is read")
    if data[:4].startswith(_PICKLED):
        raise UserError(f"{path} is a pickle of PyTorch: load the directory that it is in, with its config.json")
    width, hidden, n_layers, n_heads, n_kv_heads, vocab_size, length = _HEADER.unpack_from(data)
    try:
        config = Config(
            vocab_size=abs(vocab_size),
            max_seq_len=length,
            n_layers=n_layers,
            d_model=width,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_ff=hidden,
            qk_norm="none",
            norm_eps=1e-5,
            tie_embeddings=vocab_size > 0,
        )
        if config.head_dim * n_heads != width:
            raise UserError(f"dim {width} is not divisible by n_heads {n_heads}")
    except UserError as error:
        raise UserError(f"{path} is damaged, or no model of llama2.c: {error}") from None
    shapes = _weights(config)
    expected = _HEADER.size + 4 * sum(map(math.prod, shapes.values()))
    if len(data) != expected:
        raise UserError(
            f"{path} is damaged, or no model of llama2.c: expected {expected} bytes for its header "
            f"{_HEADER.unpack_from(data)}, found {len(data)}"
        )
    numbers = torch.frombuffer(data, dtype=torch.float32, offset=_HEADER.size)
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = zip(shapes.items(), numbers.split(sizes), strict=True)
    return config, _state(config, {name: part.view(shape) for (name, shape), part in parts})


def _weights(config: Config) -> dict[str, tuple[int, ...]]:
    """What stands in the file, in its order (memory_map_weights in run.c)."""
    layers, width, hidden = config.n_layers, config.d_model, config.d_ff
    kv_width = config.n_kv_heads * config.head_dim
    rotary = (config.max_seq_len, config.head_dim // 2)
    weights: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, width),
        "attn_norm": (layers, width),
        "q": (layers, width, width),
        "k": (layers, kv_width, width),
        "v": (layers, kv_width, width),
        "o": (layers, width, width),
        "ff_norm": (layers, width),
        "gate": (layers, hidden, width),
        "down": (layers, width, hidden),
        "up": (layers, hidden, width),
        "norm": (width,),
        "cos": rotary,  # the program computes them
        "sin": rotary,
    }
    return weights if config.tie_embeddings else {**weights, "head": (config.vocab_size, width)}


def _state(config: Config, given: dict[str, Tensor]) -> dict[str, Tensor]:
    state = {f"{name}.weight": given[name] for name in ("embed", "norm", "head") if name in given}
    for i in range(config.n_layers):
        q, k, v = given["q"][i], given["k"][i], given["v"][i]
        state |= {f"blocks.{i}.{name}.weight": given[name][i] for name in ("attn_norm", "ff_norm")}
        state |= {
            f"blocks.{i}.attn.qkv.weight": INTERLEAVE.read(config, [q, k, v]),
            f"blocks.{i}.attn.o.weight": given["o"][i],
            f"blocks.{i}.ff.up.weight": torch.cat((given["gate"][i], given["up"][i])),
            f"blocks.{i}.ff.down.weight": given["down"][i],
        }
    return state


def read_tok512(path: Path | str) -> list[tuple[bytes, float]]:
    """The vocabulary beside such a model: the bytes and the score of each piece, in the order of their ids, as they are
    in the file: `<0x0A>` stands for a byte.

    The file: the longest piece's length (int32), then for each piece its score (fp32), its length (int32) and bytes.
    Raises: UserError, where it is missing or damaged.
    """
    path = Path(path)
    data = map_file(path, 4)
    (longest,) = struct.unpack_from("<i", data)
    at = 4
    pieces: list[tuple[bytes, float]] = []
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at) if at + 8 <= len(data) else (math.nan, -1)
        at += 8
        if not 0 <= length <= min(longest, _LONGEST_PIECE) or at + length > len(data) or math.isnan(score):
            raise UserError(
                f"{path} is damaged, or no vocabulary of llama2.c: expected piece {len(pieces)} of at most {longest} "
                f"bytes at byte {at - 8}, found length {length} of {len(data)} bytes in all"
            )
        pieces.append((bytes(data[at : at + length]), score))
        at += length
    return pieces
