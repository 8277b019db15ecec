"""The model and the text: what it is made of, what that costs, and whether what is shown holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import leftward
from leftward.config import Config
from leftward.inspection.lens import through
from leftward.inspection.readable import pieces
from leftward.inspection.reading import Reading
from leftward.inspection.subject import Subject
from leftward.kernels.packed import packed_of
from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder
from leftward.planner import count_flops, count_kv_cache, count_parameters
from leftward.presets import PRESETS, preset

Answer = tuple[dict[str, Any], dict[str, Any]]
"""Of a part: its data and its arrays."""

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_CHECKED = 512  # tokens that are read for the checks
_ROWS = 48  # queries of a head that a check looks at
_CACHED = 8  # tokens that a check reads one by one
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.5, torch.float16: 0.1}  # of logits, by rounding
_PACKED_TOLERANCE = 4.0  # a rounding to 8 bits that falls the other way moves all that follows from it


def about(subject: Subject) -> Answer:
    config, sampling = subject.model.config, subject.sampling
    data = {
        "leftward": leftward.__version__,
        "name": subject.name,
        **architecture(config, len(subject.ids), DTYPE_NAMES[subject.model.decoder.kv_dtype]),
        "tokens": pieces(subject.model.tokenizer, subject.ids),
        "n_prompt": subject.n_prompt,
        "prompt": subject.model.tokenizer.decode(subject.ids[: subject.n_prompt]),
        "sampling": {
            name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
        },
        "finish_reason": subject.finish_reason,
        "presets": list(PRESETS),
        "is_run": subject.directory is not None,
    }
    return data, {}


def architecture(config: Config, n_tokens: int, dtype: str) -> dict[str, Any]:
    """A Config and what it costs, for `n_tokens` tokens."""
    n_tokens = min(n_tokens, config.max_seq_len)
    kv = count_kv_cache(config, n_tokens, dtype=dtype)
    deeper = dataclasses.replace(config, n_layers=config.n_layers + 1)
    return {
        "config": {**config.to_dict(), "is_gated": config.is_gated},
        "layers": [
            {"window": config.window if config.is_local(i) else None, "positions": config.knows_positions(i)}
            for i in range(config.n_layers)
        ],
        "parameters": dataclasses.asdict(count_parameters(config)),
        "parameters_per_layer": count_parameters(deeper).total - count_parameters(config).total,
        "kv": {**dataclasses.asdict(kv), "tokens": n_tokens},
        "flops_per_token": count_flops(config, n_tokens).forward_per_token,
    }


def of_preset(subject: Subject, name: str) -> Answer:
    return {"name": name, **architecture(preset(name), len(subject.ids), "bf16")}, {}


def checks(subject: Subject) -> Answer:
    """What must hold of any model, tried on this one and this text, or on the beginning of a long one."""
    reading, decoder = subject.reading, subject.model.decoder
    if reading.length > _CHECKED:
        reading = Reading(decoder, subject.ids[:_CHECKED], subject.cancelled)
    tried = (_rows_sum_to_one, _last_lens_is_logits, _cached_is_full, _formula_is_numel, _predicted_is_measured)
    return {"checks": [try_it(reading) for try_it in tried]}, {}


def _rows_sum_to_one(reading: Reading) -> dict[str, Any]:
    config = reading.decoder.config
    queries = sorted({reading.length * i // _ROWS for i in range(_ROWS)})
    most = 0.0
    for layer in range(config.n_layers):
        for head in range(config.n_heads):
            excess = reading.stages(layer, head, queries).weights.sum(dim=-1) - 1
            most = max(most, float((excess.clamp(min=0) if config.attn_sinks else excess.abs()).max()))
    what = "rows sum to at most 1 (a sink takes the rest)" if config.attn_sinks else "rows of attention sum to 1"
    return _result(what, most <= 1e-4, f"off by {most:.0e} at most, over {config.n_layers * config.n_heads} heads")


def _last_lens_is_logits(reading: Reading) -> dict[str, Any]:
    decoder = reading.decoder
    positions = range(max(0, reading.length - _CACHED), reading.length)
    with torch.inference_mode():
        lens = through(decoder, reading.stream(decoder.config.n_layers)[list(positions)]).float()
    difference = (lens - reading.logits(positions)).abs().max()
    return _result("the last layer's lens is the model's output", float(difference) == 0, f"off by {difference:.0e}")


def _cached_is_full(reading: Reading) -> dict[str, Any]:
    decoder = reading.decoder
    if not decoder.config.causal:
        return _result("with a cache as without", True, "no cache: without a causal mask there can be none")
    first = max(1, reading.length - _CACHED)
    cache = KVCache(decoder.config, 1, reading.length, decoder.kv_dtype, decoder.device)
    most = 0.0
    with torch.inference_mode():
        ids = torch.tensor([reading.ids], device=decoder.device)
        for start, stop in [(0, first), *((i, i + 1) for i in range(first, reading.length))]:
            hidden = decoder.hidden(ids[:, start:stop], cache)[0, -1:]
            difference = decoder.logits(hidden).float() - reading.logits([stop - 1])
            most = max(most, float(difference.abs().max()))
    said = f"logits differ by {most:.0e}, in {reading.length - first} steps"
    if packed_of(decoder):
        said += "; 4- and 8-bit weights round what they are multiplied with to 8 bits, and keys and values to 16"
        return _result("with a cache as without", most <= _PACKED_TOLERANCE, said)
    return _result("with a cache as without", most <= tolerance(decoder), said)


def tolerance(decoder: Decoder) -> float:
    """By how much logits may differ that were computed in another order."""
    return _TOLERANCE[decoder.dtype]


def _formula_is_numel(reading: Reading) -> dict[str, Any]:
    formula, numel = count_parameters(reading.decoder.config).total, reading.decoder.n_parameters
    return _result("parameters: formula = measured", formula == numel, f"{formula:,} and {numel:,}")


def _predicted_is_measured(reading: Reading) -> dict[str, Any]:
    decoder, n = reading.decoder, reading.length
    predicted = count_kv_cache(decoder.config, n, dtype=DTYPE_NAMES[decoder.kv_dtype]).bytes
    measured = KVCache(decoder.config, 1, n, decoder.kv_dtype, rewindable=0).nbytes
    said = f"{predicted:,} and {measured:,} bytes for {n} tokens"
    return _result("cache: predicted = measured", predicted == measured, said)


def _result(what: str, holds: bool, said: str) -> dict[str, Any]:
    return {"what": what, "holds": holds, "said": said}
