"""What a trace can be asked: for each part the function that answers, and the parameters that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from leftward.errors import UserError, nearest
from leftward.inspection.part import Part, Value
from leftward.inspection.parts import about, attention, prediction, stream, variants, writing
from leftward.inspection.subject import Subject
from leftward.presets import PRESETS


@dataclass(frozen=True)
class _Number:
    """A whole number from `least` up to, not including, what `bound` says of the subject."""

    bound: Callable[[Subject], int]
    least: int = 0


@dataclass(frozen=True)
class _Word:
    """One of these."""

    valid: tuple[str, ...]


@dataclass(frozen=True)
class _Question:
    answer: Callable[..., about.Answer]
    takes: Mapping[str, _Number | _Word]


_LAYER = _Number(lambda subject: subject.model.config.n_layers)
_HEAD = _Number(lambda subject: subject.model.config.n_heads)
_POSITION = _Number(lambda subject: len(subject.ids))
_TOKEN = _Number(lambda subject: subject.model.config.vocab_size, least=-1)

PARTS: dict[str, _Question] = {
    "about": _Question(about.about, {}),
    "checks": _Question(about.checks, {}),
    "preset": _Question(about.of_preset, {"name": _Word(tuple(PRESETS))}),
    "attention": _Question(attention.of_head, {"layer": _LAYER, "head": _HEAD}),
    "attention_row": _Question(attention.of_row, {"layer": _LAYER, "head": _HEAD, "query": _POSITION}),
    "thumbnails": _Question(attention.thumbnails, {}),
    "experiment": _Question(
        attention.experiment,
        {
            "mask": _Word(attention.MASKS),
            "size": _Number(lambda subject: len(subject.ids) + 1, least=1),
            "layer": _LAYER,
            "head": _HEAD,
        },
    ),
    "stream": _Question(stream.growth, {}),
    "activations": _Question(stream.activations, {"layer": _LAYER, "site": _Word(stream.SITES), "position": _POSITION}),
    "next": _Question(prediction.following, {"position": _POSITION}),
    "losses": _Question(prediction.losses, {}),
    "lens": _Question(prediction.lens, {"start": _POSITION, "pin": _TOKEN}),
    "attribution": _Question(prediction.attributed, {"position": _POSITION, "token": _TOKEN}),
    "generation": _Question(writing.generation, {}),
    "variants": _Question(variants.variants, {}),
}


def ask(subject: Subject, name: str, params: Mapping[str, Value]) -> Part:
    """Raises: UserError: there is no such part, or a parameter is unknown, absent or out of range."""
    if name not in PARTS:
        raise UserError(f"a trace has no part {name!r}: {nearest(name, PARTS)}")
    question = PARTS[name]
    if unknown := [key for key in params if key not in question.takes]:
        hint = nearest(unknown[0], question.takes) if question.takes else "it takes nothing"
        raise UserError(f"{name} takes no {unknown[0][:40]!r}: {hint}")
    if absent := [key for key in question.takes if key not in params]:
        raise UserError(f"{name} needs {', '.join(absent)}")
    settled = {key: _settled(key, params[key], kind, subject) for key, kind in question.takes.items()}
    data, arrays = question.answer(subject, **settled)
    return Part(name, settled, data, arrays)


def _settled(key: str, value: Value, kind: _Number | _Word, subject: Subject) -> Value:
    if isinstance(kind, _Word):
        if value not in kind.valid:
            raise UserError(f"{key} is {str(value)[:40]!r}: {nearest(str(value), kind.valid)}")
        return value
    bound = kind.bound(subject)
    try:
        number = int(value)
    except ValueError:
        number = kind.least - 1
    if not kind.least <= number < bound:
        raise UserError(f"{key} is {str(value)[:40]}: it must be a whole number from {kind.least} to {bound - 1}")
    return number
