"""What the field has tried in each place, by the model's own code and the planner's arithmetic."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leftward.config import Config, FeedForward
from leftward.inspection.parts.about import Answer
from leftward.inspection.subject import Subject
from leftward.model.feedforward import ACTIVATIONS
from leftward.model.positions import alibi_slopes, frequencies, sinusoids
from leftward.planner import count_kv_cache, count_parameters
from leftward.scaling_laws import CHINCHILLA_FITS, compute_optimal

_PLACES = 64
_SAMPLES = 3  # of a run, the last ones
_SHOWN: tuple[FeedForward, ...] = ("relu", "gelu", "gelu_tanh", "relu2", "swiglu", "geglu")
_FLOPS = [10.0 ** (exponent / 2) for exponent in range(30, 53)]  # 1e15 … 1e26


def variants(subject: Subject) -> Answer:
    config = subject.model.config
    data = {
        "heads": _heads(config),
        "feed_forwards": _feed_forwards(config),
        "scaling": _scaling(),
        "parameters": count_parameters(config).total,
        "is_mixture": config.n_experts > 0,
    }
    arrays = _positions(subject) | _curves()
    if subject.directory is not None:
        arrays |= _history(subject.directory)
        data["samples"] = _lines(subject.directory / "samples.jsonl")[-_SAMPLES:]
    return data, arrays


def _positions(subject: Subject) -> dict[str, Any]:
    """sinusoids [64, 64]; slopes [n_heads]; frequencies [rope_dim / 2], radians a position; and where the model has a
    learned table, how alike its rows are (cosine)."""
    config = subject.model.config
    width = max(2, config.head_dim - config.head_dim % 2)
    plain = Config(vocab_size=1, d_model=width, n_heads=1, n_layers=1)
    rotary = config if config.positions == "rotary" else plain
    arrays = {
        "sinusoids": sinusoids(torch.arange(_PLACES)[None], 64)[0].numpy(),
        "slopes": np.array(alibi_slopes(config.n_heads), dtype=np.float32),
        "frequencies": np.array(frequencies(rotary)[0], dtype=np.float32),
    }
    table = subject.model.decoder.position_embed
    if table is not None:
        rows = table.weight[config.position_offset :][:_PLACES].detach().float()
        rows = rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-9)
        arrays["learned"] = (rows @ rows.T).cpu().numpy()
    return arrays


def _curves() -> dict[str, Any]:
    """What stands between the matrices, over its input; gated ones with 1 for what is gated."""
    x = torch.linspace(-4, 4, 161)
    curves = {"x": x.numpy()}
    for name in _SHOWN:
        is_gated = name in ("swiglu", "geglu")
        given = torch.stack((x, torch.ones_like(x)), dim=-1) if is_gated else x
        curves[f"curve.{name}"] = ACTIVATIONS[name](given).flatten().numpy()
    return curves


def _heads(config: Config) -> list[dict[str, Any]]:
    """Keys and values for each number of heads that may share them."""
    counts = [n for n in range(1, config.n_heads + 1) if config.n_heads % n == 0]
    made = [(n, dataclasses.replace(config, n_kv_heads=n)) for n in counts]
    return [
        {
            "n_kv_heads": n,
            "name": "MQA" if n == 1 and config.n_heads > 1 else "MHA" if n == config.n_heads else "GQA",
            "bytes_per_token": count_kv_cache(each, 1).bytes_per_token,
            "bytes_at_context": count_kv_cache(each, each.max_seq_len).bytes,
            "attention": count_parameters(each).attention,
            "own": n == config.n_kv_heads,
        }
        for n, each in made
    ]


def _feed_forwards(config: Config) -> list[dict[str, Any]]:
    """A feed-forward of each kind at the width that keeps the count: 4 d, or 2/3 of that where it is gated."""
    made = []
    for name in _SHOWN:
        shape = {"vocab_size": 1, "d_model": config.d_model, "n_heads": 1, "n_layers": 1, "ff_bias": config.ff_bias}
        each = Config.from_dict({**shape, "feed_forward": name})
        count = count_parameters(each).feed_forward
        made.append({"name": name, "gated": each.is_gated, "d_ff": each.d_ff, "parameters": count})
    return made


@functools.cache
def _scaling() -> dict[str, Any]:
    """Each law's best model for budgets from 1e15 to 1e26 FLOPs, and the fits themselves."""
    return {
        "fits": [dataclasses.asdict(fit) for fit in CHINCHILLA_FITS],
        "budgets": [dataclasses.asdict(compute_optimal(flops)) for flops in _FLOPS],
    }


def _history(directory: Path) -> dict[str, Any]:
    """The run's own losses by tokens trained on, from metrics.jsonl."""
    found: dict[str, list[tuple[float, float]]] = {"loss": [], "val_loss": []}
    for entry in _lines(directory / "metrics.jsonl"):
        for name, points in found.items():
            if name in entry:
                points.append((entry["tokens"], entry[name]))
    return {f"history.{name}": np.array(points, dtype=np.float32).reshape(-1, 2) for name, points in found.items()}


def _lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; none where there is no file. The last line may be half written."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found
