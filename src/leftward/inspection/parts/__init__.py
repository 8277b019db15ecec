"""What a trace can be asked: for each part the function that answers, the parameters that it takes, and what an answer
is. A part that comes from a file is an answer, or it is refused (`known`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leftward.errors import UserError, nearest, printable
from leftward.inspection.part import Part, Value, check_arrays, check_data, damaged
from leftward.inspection.parts import about, attention, prediction, stream, variants, writing
from leftward.inspection.subject import Subject
from leftward.presets import PRESETS


@dataclass(frozen=True)
class _Number:
    """A whole number from `least` up to, not including, this size."""

    bound: str
    least: int = 0


@dataclass(frozen=True)
class _Word:
    """One of these."""

    valid: tuple[str, ...]


@dataclass(frozen=True)
class _Question:
    answer: Callable[..., about.Answer]
    takes: Mapping[str, _Number | _Word] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    """Of the answer, as `part.check_data` reads it."""
    arrays: Mapping[str, str] = field(default_factory=dict)
    """Of the answer, as `part.check_arrays` reads them, in the sizes of `_sizes`."""
    of_short: Mapping[str, str] = field(default_factory=dict)
    """More of them, where a text is short enough for all weights of a head;"""
    of_long: Mapping[str, str] = field(default_factory=dict)
    """and where it isn't."""


_LAYER, _HEAD, _POSITION, _TOKEN = _Number("L"), _Number("H"), _Number("T"), _Number("V", least=-1)

_ARCHITECTURE: dict[str, Any] = {
    "config": {"n_layers": int, "n_heads": int, "n_kv_heads": int, "head_dim": int, "d_model": int, "d_ff": int}
    | {"vocab_size": int, "max_seq_len": int, "positions": str, "norm": str, "block": str, "feed_forward": str},
    "layers": [{"window": (int, None), "positions": bool}],
    "parameters": {str: int},
    "parameters_per_layer": int,
    "kv": {"dtype": str, "bytes_per_token": int, "bytes_per_token_global": int, "bytes": int, "tokens": int},
    "flops_per_token": float,
}
_ABOUT: dict[str, Any] = _ARCHITECTURE | {
    "leftward": str,
    "name": str,
    "tokens": [{"id": int, "label": str, "text": str, "control": bool, "group": int}],
    "n_prompt": int,
    "prompt": str,
    "sampling": {"max_tokens": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float}
    | {"seed": (int, None)},
    "finish_reason": (str, None),
    "presets": [str],
    "is_run": bool,
}
_HEADS_DATA: dict[str, Any] = {"scale": float, "head_dim": int, "softcap": float, "slope": float, "sink": float}
_HEADS_DATA |= {"window": (int, None), "kv_head": int}
_STEP: dict[str, Any] = {"kind": str, "read": int, "position": int, "id": int, "label": str, "processed": int}
_STEP |= {"processed_without": int, "cache_tokens": int, "cache_bytes": int, "logprob": float, "drawn_with": float}
_STEP |= {"top": [[int, str, float, float]]}
_ROWS = {"entropy": "f32 T", "maximum": "f32 T"}
_WEIGHTS = {"weights": "f32 T T", "visible": "u8 T T"}
_MAP = {"map": f"u8 {attention.WHOLE} {attention.WHOLE}"}

PARTS: dict[str, _Question] = {
    "about": _Question(about.about, data=_ABOUT),
    "checks": _Question(about.checks, data={"checks": [{"what": str, "holds": bool, "said": str}]}),
    "preset": _Question(about.of_preset, {"name": _Word(tuple(PRESETS))}, {"name": str} | _ARCHITECTURE),
    "attention": _Question(
        attention.of_head,
        {"layer": _LAYER, "head": _HEAD},
        _HEADS_DATA,
        _ROWS,
        of_short={"products": "f32 T T", **_WEIGHTS},
        of_long=_MAP,
    ),
    "attention_row": _Question(
        attention.of_row,
        {"layer": _LAYER, "head": _HEAD, "query": _POSITION},
        _HEADS_DATA,
        {"products": "f32 T", "weights": "f32 T", "visible": "u8 T"},
    ),
    "thumbnails": _Question(
        attention.thumbnails,
        data={"n": int, "queries": [int]},
        arrays={"maps": "u8 L H + +", "entropy": "f32 L H", "first": "f32 L H", "previous": "f32 L H"},
    ),
    "experiment": _Question(
        attention.experiment,
        {"mask": _Word(attention.MASKS), "size": _Number("T+1", least=1), "layer": _LAYER, "head": _HEAD},
        {"mask": str, "size": int, "leaks": [int], "changed": int, "changed_to": str, "most": float}
        | {"loss": float, "loss_before": float},
        {"moved": "f32 T", "leak": "f32 T", **_ROWS},
        of_short=_WEIGHTS,
        of_long=_MAP,
    ),
    "stream": _Question(stream.growth, arrays=dict.fromkeys(("mean", "std", "rms"), "f32 L+1 T")),
    "activations": _Question(
        stream.activations,
        {"layer": _LAYER, "site": _Word(stream.SITES), "position": _POSITION},
        {"site": str, "sites": [str], "kind": str, "eps": float, "block": str},
        dict.fromkeys(("before", "behind", "factor?", "bias?"), "f32 D"),
    ),
    "next": _Question(
        prediction.following,
        {"position": _POSITION},
        {"top": [[int, str]], "target": ([int, str], None)},
        {"logits": "f32 V"},
    ),
    "losses": _Question(
        prediction.losses,
        data={"texts": {str: str}},
        arrays={"logprob": "f32 T", "rank": "i32 T", "entropy": "f32 T", "top_ids": "i32 T +", "top_probs": "f32 T +"},
    ),
    "lens": _Question(
        prediction.lens,
        {"start": _POSITION, "pin": _TOKEN},
        {"start": int, "stop": int, "texts": {str: str}, "pinned?": str},
        {"logprob": "f32 L+1 columns", "rank": "i32 L+1 columns", "entropy": "f32 L+1 columns"}
        | {"top_ids": "i32 L+1 columns +", "top_probs": "f32 L+1 columns +"},
    ),
    "attribution": _Question(
        prediction.attributed,
        {"position": _POSITION, "token": _TOKEN},
        {"label": str, "position": int, "token": int, "against": (int, None), "logit": float, "rounding": float}
        | {"parts": [[str, float]], "heads": [[float]]},
    ),
    "generation": _Question(
        writing.generation,
        data={"steps": [_STEP], "n_prompt": int, "kv_dtype": str, "bytes_per_token": int, "finish_reason": (str, None)},
    ),
    "variants": _Question(
        variants.variants,
        data={
            "heads": [
                {"n_kv_heads": int, "name": str, "bytes_per_token": int, "bytes_at_context": int, "attention": int}
                | {"own": bool}
            ],
            "feed_forwards": [{"name": str, "gated": bool, "d_ff": int, "parameters": int}],
            "scaling": {
                "fits": [{str: object}],
                "budgets": [{"flops": float, "optima": [{str: object}], "notes": [str]}],
            },
            "parameters": int,
            "is_mixture": bool,
            "samples?": [{str: object}],
        },
        arrays={
            "sinusoids": "f32 64 64",
            "slopes": "f32 H",
            "frequencies": "f32 *",
            "learned?": "f32 * *",
            "x": "f32 *",
            **{f"curve.{name}": "f32 *" for name in ("relu", "gelu", "gelu_tanh", "relu2", "swiglu", "geglu")},
            **{f"history.{name}?": "f32 * 2" for name in ("loss", "val_loss")},
        },
    ),
}


def ask(subject: Subject, name: str, params: Mapping[str, Value]) -> Part:
    """Raises: UserError: there is no such part, or a parameter is unknown, absent or out of range."""
    if name not in PARTS:
        raise UserError(f"a trace has no part {name!r}: {nearest(name, PARTS)}")
    config = subject.model.config
    sizes = _sizes(len(subject.ids), config.n_layers, config.n_heads, config.d_model, config.vocab_size)
    settled = _settled(name, params, sizes)
    data, arrays = PARTS[name].answer(subject, **settled)
    return Part(name, settled, data, arrays)


def known(parts: Sequence[Part]) -> list[Part]:
    """The parts of a file, each checked to be an answer, so that whoever looks at one finds in it what it promises.
    What a newer leftward put beside them is left out.

    Raises: UserError: one is no answer to a question about the text of this file, or is there twice.
    """
    about = next((part.data for part in parts if part.key == "about"), None)
    if about is None:
        damaged("it does not say what it is about")
    check_data(about, _ABOUT, "about")
    config, n_tokens = about["config"], len(about["tokens"])
    sizes = _sizes(n_tokens, config["n_layers"], config["n_heads"], config["d_model"], config["vocab_size"])
    if not n_tokens or len(about["layers"]) != sizes["L"]:
        damaged("about has no tokens, or other layers than its config")
    found = [_checked(part, sizes) for part in parts if part.name in PARTS]
    if len({part.key for part in found}) < len(found):
        damaged("it has a part twice")
    return found


def _checked(part: Part, sizes: Mapping[str, int]) -> Part:
    question, where = PARTS[part.name], printable(part.key)
    try:
        settled = _settled(part.name, part.params, sizes)
    except UserError as error:
        damaged(printable(f"{part.key}: {error}", 200))
    check_data(part.data, question.data, where)
    if part.name == "lens":
        sizes = {**sizes, "columns": min(prediction.LENS_COLUMNS, sizes["T"] - int(settled["start"]))}
    more = question.of_short if sizes["T"] <= attention.WHOLE else question.of_long
    check_arrays(part.arrays, {**question.arrays, **more}, sizes, where)
    return Part(part.name, settled, part.data, part.arrays)


def _sizes(n_tokens: int, n_layers: int, n_heads: int, d_model: int, vocab_size: int) -> dict[str, int]:
    return {
        "T": n_tokens,
        "T+1": n_tokens + 1,
        "L": n_layers,
        "L+1": n_layers + 1,
        "H": n_heads,
        "D": d_model,
        "V": vocab_size,
    }


def _settled(name: str, params: Mapping[str, Value], sizes: Mapping[str, int]) -> dict[str, Value]:
    """The parameters of a part. Raises: UserError: one is unknown, absent or out of range."""
    takes = PARTS[name].takes
    if unknown := [key for key in params if key not in takes]:
        hint = nearest(unknown[0], takes) if takes else "it takes nothing"
        raise UserError(f"{name} takes no {unknown[0][:40]!r}: {hint}")
    if absent := [key for key in takes if key not in params]:
        raise UserError(f"{name} needs {', '.join(absent)}")
    return {key: _value(key, params[key], kind, sizes) for key, kind in takes.items()}


def _value(key: str, value: Value, kind: _Number | _Word, sizes: Mapping[str, int]) -> Value:
    if isinstance(kind, _Word):
        if value not in kind.valid:
            raise UserError(f"{key} is {str(value)[:40]!r}: {nearest(str(value), kind.valid)}")
        return value
    bound = sizes[kind.bound]
    try:
        number = int(value)
    except (ValueError, OverflowError):
        number = kind.least - 1
    if not kind.least <= number < bound:
        raise UserError(f"{key} is {str(value)[:40]}: it must be a whole number from {kind.least} to {bound - 1}")
    return number
