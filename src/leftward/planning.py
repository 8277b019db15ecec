"""`lw.plan`: what a name, a directory or settings stand for, and what it costs (planner.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leftward import planner
from leftward.config import Config
from leftward.planner import Plan
from leftward.presets import PRESETS, preset_settings

Model = str | Path | Config | Mapping[str, Any]


def plan(what: Model, **settings: Any) -> Plan:
    """Parameters, FLOPs, memory, KV cache and time of a model that need not exist.

    Args:
        what: the name of a preset, a run or Hugging Face model directory, a Config, or its fields.
        settings: those of `planner.plan`: seq_len, batch_size, dtype, tokens, device …

    Raises:
        UserError: there is no such model, or a setting does not fit.
    """
    config = Config.from_dict(settings_of(what))
    return planner.plan(config, name=str(what) if isinstance(what, str | Path) else None, **settings)


def settings_of(what: Model) -> dict[str, Any]:
    """The fields of Config that `what` sets. A directory named like a preset is written ./name, or as a Path."""
    if isinstance(what, Config):
        return what.to_dict()
    if isinstance(what, Mapping):
        return dict(what)
    path = path_of(what)
    return preset_settings(str(what)) if path is None else _config_in(path).to_dict()


def path_of(name: str | Path) -> Path | None:
    """The directory that a name stands for; None: it is, or is meant to be, a preset's."""
    if isinstance(name, str) and (name in PRESETS or not (Path(name).exists() or "/" in name)):
        return None
    return Path(name)


def _config_in(directory: Path) -> Config:
    from leftward.formats.model_directory import load_config  # torch takes a second or two, which no preset waits for

    return load_config(directory)
