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

Json = Mapping[str, Any]

# ---- settings


class Setting(NamedTuple):
    """A key of config.json ↔ a field of Config, or several that the class can only set alike."""

    theirs: str
    ours: str | tuple[str, ...]
    values: Mapping[str, str] | None = None
    """Their value → ours, where the two differ. Of several names for one value the first is written."""

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


class Rule(NamedTuple):
    """Keys of config.json ↔ fields of Config that only make sense together (see rules.py)."""

    read: Callable[[Json], dict[str, Any]]
    """config.json without its nulls → fields. Raises: UserError, KeyError where a key is missing."""
    write: Callable[[Config], dict[str, Any]] = lambda config: {}
    """→ keys. What reading can't get back from them the class can't say."""


# ---- tensors


class Op(NamedTuple):
    """What happens to a tensor on its way."""

    write: Callable[[Config, Tensor], list[Tensor]]
    """Ours → theirs: one of ours may be several of theirs."""
    read: Callable[[Config, list[Tensor]], Tensor]


def _heads_apart(config: Config, tensor: Tensor) -> list[Tensor]:
    return list(tensor.split([n * config.head_dim for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]))


def _grouped(config: Config, tensor: Tensor) -> list[Tensor]:
    rest = tensor.shape[1:]
    parts = [part.view(config.n_kv_heads, -1, config.head_dim, *rest) for part in _heads_apart(config, tensor)]
    return [torch.cat(parts, dim=1).flatten(0, 2)]


def _ungrouped(config: Config, tensors: list[Tensor]) -> Tensor:
    group, rest = config.n_heads // config.n_kv_heads, tensors[0].shape[1:]
    parts = tensors[0].view(config.n_kv_heads, group + 2, config.head_dim, *rest).split((group, 1, 1), dim=1)
    return torch.cat([part.flatten(0, 2) for part in parts])


SAME = Op(lambda config, tensor: [tensor], lambda config, tensors: tensors[0])
# GPT-2's Conv1D keeps [in, out]. A bias has one axis, which `t` leaves alone.
TRANSPOSED = Op(lambda config, tensor: [tensor.t()], lambda config, tensors: tensors[0].t())
# The rows that pad a vocabulary are zeros of ours, and nobody else's. A head's bias has one axis.
VOCABULARY = Op(
    lambda config, tensor: [tensor[: config.vocab_size]],
    lambda config, tensors: F.pad(
        tensors[0], (*[0, 0] * (tensors[0].ndim - 1), 0, config.padded_vocab_size - config.vocab_size)
    ),
)
QKV_APART = Op(_heads_apart, lambda config, tensors: torch.cat(tensors))
# For each key/value head its queries, then its key, then its value: GPT-NeoX, BLOOM, Falcon.
QKV_GROUPED = Op(_grouped, _ungrouped)
HALVES_APART = Op(lambda config, tensor: list(tensor.chunk(2)), lambda config, tensors: torch.cat(tensors))
# Of experts, [n_experts, out, in]: each on its own, …
EXPERTS_APART = Op(lambda config, tensor: list(tensor), lambda config, tensors: torch.stack(tensors))
# … gate and up too, in turn, …
EXPERTS_HALVES_APART = Op(
    lambda config, tensor: [half for expert in tensor for half in expert.chunk(2)],
    lambda config, tensors: torch.stack([torch.cat(pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]),
)
# … or stacked with [in, out], …
EXPERTS_TRANSPOSED = Op(lambda config, tensor: [tensor.mT], lambda config, tensors: tensors[0].mT)


def _interleaved(config: Config, tensor: Tensor) -> list[Tensor]:
    return [torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)]


def _halves(config: Config, tensors: list[Tensor]) -> Tensor:
    return torch.cat((tensors[0][:, 0::2], tensors[0][:, 1::2]), dim=1)


# … and gate and up row by row (gpt-oss).
EXPERTS_INTERLEAVED = Op(_interleaved, _halves)
EXPERTS_INTERLEAVED_TRANSPOSED = Op(
    lambda config, tensor: [_interleaved(config, tensor)[0].mT],
    lambda config, tensors: _halves(config, [tensors[0].mT]),
)


class Row(NamedTuple):
    """A module of ours ↔ the modules of theirs that hold the same weight and bias; or, where the name of ours ends like
    a tensor's, tensor ↔ tensors. {i} is the layer; names with an {e} stand once for each expert."""

    ours: str
    theirs: tuple[str, ...]
    op: Op = SAME


@dataclass(frozen=True, kw_only=True)
class Family:
    """One Hugging Face class."""

    model_type: str
    architecture: str
    settings: tuple[Setting | Rule, ...]
    fixed: Mapping[str, Any]
    """Fields of Config that the class leaves no choice about, where that is not our default."""
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
    head: str = "lm_head."
    """What the names of the head's tensors start with."""
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)
    """Ends of the names of tensors that old files hold and that are no weights."""
