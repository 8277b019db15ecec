"""What a family's table is made of: how one Hugging Face class names its settings and tensors, as data for both ways.

The tables are in families/, one file each; hf.py reads them. A table says nothing twice: a row serves reading and
writing, the shapes of a class's tensors follow from our own Decoder and the row's operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from leftward.config import Config


class Setting(NamedTuple):
    """A key of config.json ↔ a field of Config, or several that the class can only set alike."""

    theirs: str
    ours: str | tuple[str, ...]
    values: Mapping[str, str] | None = None
    """Their value → ours, where the two differ. Of several names for one value the first is written."""

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


class Op(NamedTuple):
    """What happens to a tensor on its way."""

    write: Callable[[Config, Tensor], list[Tensor]]
    """Ours → theirs: one of ours may be several of theirs."""
    read: Callable[[Config, list[Tensor]], Tensor]


SAME = Op(lambda config, tensor: [tensor], lambda config, tensors: tensors[0])
# GPT-2's Conv1D keeps [in, out]. A bias has one axis, which `t` leaves alone.
TRANSPOSED = Op(lambda config, tensor: [tensor.t()], lambda config, tensors: tensors[0].t())
# The rows that pad a vocabulary are zeros of ours, and nobody else's.
VOCABULARY = Op(
    lambda config, tensor: [tensor[: config.vocab_size]],
    lambda config, tensors: F.pad(tensors[0], (0, 0, 0, config.padded_vocab_size - config.vocab_size)),
)
QKV_APART = Op(
    lambda config, tensor: list(
        tensor.split([n * config.head_dim for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads)])
    ),
    lambda config, tensors: torch.cat(tensors),
)
HALVES_APART = Op(lambda config, tensor: list(tensor.chunk(2)), lambda config, tensors: torch.cat(tensors))


class Row(NamedTuple):
    """A module of ours ↔ the modules of theirs that hold the same weight and bias; {i} is the layer."""

    ours: str
    theirs: tuple[str, ...]
    op: Op = SAME


@dataclass(frozen=True, kw_only=True)
class Family:
    """One Hugging Face class."""

    model_type: str
    architecture: str
    settings: tuple[Setting, ...]
    fixed: Mapping[str, Any]
    """Fields of Config that the class leaves no choice about."""
    suits: Callable[[Config], bool] = lambda config: True
    """What else the class demands of a Config."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that we write, and can read, with one value only."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the class assumes for a key that is absent or null: a value, or a function of config.json. None leaves our
    field to be derived. A key that is in no list must be there."""
    dropouts: tuple[str, ...] = ()
    """Keys that hold a dropout probability."""
    rows: tuple[Row, ...]
    prefix: str = ""
    """What the names of all tensors but the head's start with. Files of the bare model leave it out."""
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)
    """Ends of the names of tensors that old files hold and that are no weights."""
