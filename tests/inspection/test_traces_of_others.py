"""A trace file that somebody sent: whatever is missing in it, or is something else, is one line, and what is accepted
can be drawn and reported. Every part of a real trace loses, in turn, each field and each array, or has another one
there; what a figure draws may be any number."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from explored import small_model

pytest.importorskip("matplotlib", reason="figures need matplotlib (extra `plot`)")

import leftward as lw
from leftward.errors import UserError
from leftward.inspection.part import Part
from leftward.inspection.parts import PARTS
from leftward.inspection.report import whole_page
from leftward.inspection.trace import Trace

ASKED: dict[str, dict[str, Any]] = {
    "about": {},
    "checks": {},
    "preset": {"name": "gpt2"},
    "attention": {"layer": 1, "head": 2},
    "attention_row": {"layer": 1, "head": 2, "query": 4},
    "thumbnails": {},
    "experiment": {"mask": "none", "size": 4, "layer": 0, "head": 1},
    "stream": {},
    "activations": {"layer": 1, "site": "attn_norm", "position": 3},
    "next": {"position": 3},
    "losses": {},
    "lens": {"start": 12, "pin": -1},
    "attribution": {"position": 3, "token": -1},
    "generation": {},
    "variants": {},
}
FIGURES: dict[str, dict[str, Any]] = {
    "attention": {"layer": 1, "head": 2},
    "lens": {"start": 12},
    "norms": {},
    "losses": {},
    "attribution": {"position": 3},
}
DRAWN = {"attention": "attention", "lens": "lens", "stream": "norms", "losses": "losses", "attribution": "attribution"}
OTHERS: list[Any] = [None, True, -7, 10**30, 1e308, "\x00\n$x$" * 4000, [], [[]], {}]
Address = tuple[str | int, ...]


@pytest.fixture(scope="module")
def parts() -> list[Part]:
    trace = lw.trace(small_model(), "the cat s", max_tokens=8, seed=1)
    return [Part.from_bytes(trace.part(name, **params).to_bytes()) for name, params in ASKED.items()]


def loaded(parts: Sequence[Part], path: Path) -> Trace:
    contents = [part.to_bytes() for part in parts]
    starts = [sum(map(len, contents[:i])) for i in range(len(contents))]
    index = [[start, len(content)] for start, content in zip(starts, contents, strict=True)]
    header = json.dumps({"version": 1, "parts": index}).encode()
    path.write_bytes(b"LWT1" + len(header).to_bytes(4, "little") + header + b"".join(contents))
    return Trace.load(path)


def draw(trace: Trace, kind: str, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib's, of numbers that it can't show
        try:
            trace.figure(kind, path.with_suffix(".svg"), **FIGURES[kind])
        except UserError as error:
            check_line(error)


def check_line(error: UserError) -> None:
    assert "\n" not in str(error) and len(str(error)) < 500


def try_it(parts: Sequence[Part], changed: Part, path: Path, *, is_drawn: bool) -> bool:
    """Whether a file of what it is about and of this part is accepted. Then it is shown in every way."""
    try:
        trace = loaded([changed] if changed.name == "about" else [parts[0], changed], path)
    except UserError as error:
        check_line(error)
        return False
    repr(trace)
    whole_page(trace)
    if is_drawn and changed.name in DRAWN:
        draw(trace, DRAWN[changed.name], path)
    return True


def addresses(value: Any, at: Address = ()) -> Iterator[Address]:
    """Of all fields; in lists of the last entry, of texts by token id of one."""
    if at:
        yield at
    if isinstance(value, dict):
        for name in list(value)[: 1 if "texts" in at else None]:
            yield from addresses(value[name], (*at, name))
    elif isinstance(value, list):
        for i in range(len(value))[-1:]:
            yield from addresses(value[i], (*at, i))


def without(data: Any, at: Address) -> Any:
    changed = copy.deepcopy(data)
    del _holder(changed, at)[at[-1]]
    return changed


def having(data: Any, at: Address, value: Any) -> Any:
    changed = copy.deepcopy(data)
    _holder(changed, at)[at[-1]] = value
    return changed


def _holder(data: Any, at: Address) -> Any:
    for name in at[:-1]:
        data = data[name]
    return data


def other_arrays(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    yield array[None]
    yield array.reshape(-1)[:1].reshape(())
    yield np.repeat(array, 2, axis=-1)
    yield from (np.delete(array, 0, axis=axis) for axis in range(array.ndim))
    yield from (np.take(array, [], axis=axis) for axis in range(array.ndim))
    with np.errstate(invalid="ignore"):
        yield from (array.astype(dtype) for dtype in ("f4", "u1", "i4"))


@pytest.mark.parametrize("name", ASKED)
def test_a_field_that_is_absent_or_something_else(name: str, parts: list[Part], tmp_path: Path) -> None:
    part = next(part for part in parts if part.name == name)
    data = dict(part.data)
    n_refused = n = 0
    for at in addresses(data):
        for changed in (without(data, at), *(having(data, at, value) for value in OTHERS)):
            n += 1
            n_refused += not try_it(
                parts,
                Part(name, part.params, changed, part.arrays),
                tmp_path / "a.lwtrace",
                is_drawn=at[0] in ("texts", "parts", "label"),
            )
    assert n_refused >= n / 3


@pytest.mark.parametrize("label", ["", "\x00\n$x$" * 4000, "\u202e|\ue000", "$\\frac$"])
def test_any_label_can_be_drawn(label: str, parts: list[Part], tmp_path: Path) -> None:
    tokens = [{**token, "label": label} for token in parts[0].data["tokens"]]
    about = Part("about", {}, {**parts[0].data, "tokens": tokens})
    trace = loaded([about, *parts[1:]], tmp_path / "a.lwtrace")
    for kind in FIGURES:
        draw(trace, kind, tmp_path / "a.lwtrace")


@pytest.mark.parametrize("name", [name for name in ASKED if name not in ("about", "checks", "generation")])
def test_an_array_that_is_absent_or_something_else(name: str, parts: list[Part], tmp_path: Path) -> None:
    part = next(part for part in parts if part.name == name)

    def is_accepted(arrays: dict[str, Any]) -> bool:
        return try_it(parts, Part(name, part.params, part.data, arrays), tmp_path / "a.lwtrace", is_drawn=True)

    for key, array in part.arrays.items():
        rest = {other: value for other, value in part.arrays.items() if other != key}
        assert is_accepted(rest) == (key in ("factor", "bias"))
        for other in other_arrays(array):
            if other.dtype == array.dtype and other.shape == array.shape:
                continue
            may_be = other.dtype == array.dtype and other.ndim == array.ndim and (name == "variants" or array.ndim > 1)
            assert not is_accepted({**rest, key: other}) or may_be, (key, other.shape)


USED = [("attention", "weights"), ("lens", "top_ids"), ("lens", "top_probs"), ("stream", "rms"), ("losses", "logprob")]


@pytest.mark.parametrize(("name", "key"), USED)
@pytest.mark.parametrize("number", [np.nan, np.inf, -1.0, 3e38])
def test_any_number_can_be_drawn(name: str, key: str, number: float, parts: list[Part], tmp_path: Path) -> None:
    part = next(part for part in parts if part.name == name)
    for places in (slice(None), slice(0, 1)):
        changed = part.arrays[key].copy()
        with np.errstate(invalid="ignore"):
            changed[places] = np.array(number).astype(changed.dtype)
        assert try_it(
            parts,
            Part(name, part.params, part.data, {**part.arrays, key: changed}),
            tmp_path / "a.lwtrace",
            is_drawn=True,
        )


def test_a_file_of_little(parts: list[Part], tmp_path: Path) -> None:
    path = tmp_path / "a.lwtrace"
    with pytest.raises(UserError, match="does not say what it is about"):
        loaded(parts[1:], path)
    trace = loaded([*parts[:1], Part("of_tomorrow", {"a": 1}, {"b": 2})], path)
    assert [part.name for part in trace.parts] == ["about"]
    whole_page(trace)
    for kind, params in FIGURES.items():
        with pytest.raises(UserError, match="is not in this trace"):
            trace.figure(kind, path.with_suffix(".svg"), **params)
        with pytest.raises(UserError, match="is not in this trace"):
            trace.figure(kind, path.with_suffix(".svg"), more=1)


def test_parameters_that_no_question_has(parts: list[Part], tmp_path: Path) -> None:
    """Nor is a part found under the name of another one."""
    path = tmp_path / "a.lwtrace"
    for part in parts:
        for params in ({}, {"layer": 99}, {**part.params, "more": 1}, dict.fromkeys(part.params, "a\nb")):
            if params != part.params:
                changed = Part(part.name, params, part.data, part.arrays)
                assert not try_it(parts, changed, path, is_drawn=False)
    with pytest.raises(UserError, match="a part twice"):
        loaded([*parts, parts[0]], path)
    posing = Part("attention&head=2&layer=1", {}, {}, {})
    trace = loaded([*(part for part in parts if part.name != "attention"), posing], path)
    with pytest.raises(UserError, match="not in this trace"):
        trace.figure("attention", path.with_suffix(".svg"), layer=1, head=2)


def test_all_parts_are_tried() -> None:
    assert set(ASKED) == set(PARTS)
