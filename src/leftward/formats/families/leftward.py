"""Our own: any Config that no Hugging Face class expresses, under our own names. Loads here only."""

from __future__ import annotations

import dataclasses

from leftward.config import Config
from leftward.formats.family import Family, Row, Setting

_MODULES = (
    "embed",
    "position_embed",
    "blocks.{i}.attn_norm",
    "blocks.{i}.attn.qkv",
    "blocks.{i}.attn.q_norm",
    "blocks.{i}.attn.k_norm",
    "blocks.{i}.attn.o",
    "blocks.{i}.ff_norm",
    "blocks.{i}.ff.up",
    "blocks.{i}.ff.down",
    "norm",
    "head",
)

LEFTWARD = Family(
    model_type="leftward",
    architecture="LeftwardForCausalLM",
    settings=tuple(Setting(field.name, field.name) for field in dataclasses.fields(Config)),
    fixed={},
    defaults={
        field.name: field.default for field in dataclasses.fields(Config) if field.default is not dataclasses.MISSING
    },
    rows=tuple(Row(module, (module,)) for module in _MODULES),
)
