"""Static pictures for papers, as SVG, PNG or PDF by the file's name. matplotlib draws them (extra `plot`).

Each function takes plain arrays and gives a matplotlib Figure, which a notebook shows behind %matplotlib inline;
`save_figure` draws one of a trace's parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from leftward.errors import UserError, missing_extra, nearest, printable

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError:
    raise missing_extra("matplotlib", "plot", "a figure") from None

if TYPE_CHECKING:
    from leftward.inspection.trace import Trace

Array = NDArray[Any]

_SUFFIXES = (".svg", ".png", ".pdf")
_MOST_LABELS = 64
"""Tokens that can be read beside each other."""


def attention(weights: Array, tokens: Sequence[str], title: str = "") -> Figure:
    """Who looks at whom: weights [T, T], a row a query."""
    figure, axes = _figure(_side(len(tokens)), _side(len(tokens)))
    shown = np.ma.masked_where(np.triu(np.ones_like(weights), 1) * (weights == 0) > 0, weights)
    image = axes.imshow(shown, cmap="Blues", vmin=0, vmax=1, aspect="equal")
    _name(axes, "x", tokens)
    _name(axes, "y", tokens)
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(title)
    figure.colorbar(image, ax=axes, shrink=0.8, label="attention weight")
    return figure


def lens(best: Sequence[Sequence[str]], probabilities: Array, tokens: Sequence[str]) -> Figure:
    """What each layer would say: its likeliest token [rows, T] and that one's probability, the model itself on top."""
    n_rows, n = probabilities.shape
    figure, axes = _figure(max(4.0, 0.9 * n), max(3.0, 0.3 * n_rows))
    image = axes.imshow(probabilities, cmap="Blues", vmin=0, vmax=1, aspect="auto", origin="lower")
    for row, column in np.ndindex(n_rows, n):
        colour = "white" if probabilities[row, column] > 0.6 else "black"
        look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "clip_on": True, "parse_math": False}
        axes.text(column, row, best[row][column], color=colour, **look)
    _name(axes, "x", tokens)
    axes.set(xlabel="token", ylabel="layers read")
    figure.colorbar(image, ax=axes, label="probability of the likeliest token")
    return figure


def norms(rms: Array) -> Figure:
    """How the stream grows: the root mean square [n_layers + 1, T], a line a position and their median."""
    figure, axes = _figure(6, 4)
    axes.plot(rms, color="tab:blue", alpha=min(1.0, max(0.08, 6 / rms.shape[1])), linewidth=0.8)
    axes.plot(np.median(rms, axis=1), color="black", label="median of positions")
    axes.set(xlabel="layers read", ylabel="root mean square of the stream", yscale="log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def losses(logprobs: Array, tokens: Sequence[str]) -> Figure:
    """What each token cost: −log p [T − 1] of the tokens from the second on, in nats."""
    figure, axes = _figure(max(5.0, 0.22 * min(len(tokens), 200)), 3.5)
    nats = -np.asarray(logprobs)
    axes.bar(range(len(nats)), nats, color="tab:blue")
    axes.axhline(float(nats.mean()), color="black", linewidth=0.8)
    _name(axes, "x", tokens[1:])
    axes.set(xlabel="token", ylabel="loss (nats)", title=f"mean {nats.mean():.3f}")
    return figure


def attribution(parts: Sequence[tuple[str, float]], title: str = "", most: int = 20) -> Figure:
    """The parts that add most to a logit, for and against, and the sum of the others."""
    ordered = sorted(parts, key=lambda part: -abs(part[1]))
    shown, rest = ordered[:most], ordered[most:]
    if rest:
        shown = [*shown, (f"{len(rest)} others", sum(value for _, value in rest))]
    figure, axes = _figure(6, max(2.5, 0.25 * len(shown)))
    values = [value for _, value in shown]
    axes.barh(range(len(shown)), values, color=["tab:blue" if value >= 0 else "tab:orange" for value in values])
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.invert_yaxis()
    axes.set_xlabel("share of the logit")
    axes.set_title(title, parse_math=False)
    return figure


# ---- of a trace


def save_figure(trace: Trace, kind: str, path: Path | str, **params: Any) -> None:
    """Draw a part of a trace: attention (layer, head), lens (start, pin), norms, losses, attribution (position, token).

    Raises: UserError: no such figure, a file name that says no format, or as `Trace.part`.
    """
    if kind not in _KINDS:
        raise UserError(f"there is no figure {kind!r}: {nearest(kind, _KINDS)}")
    tokens = [_short(token["label"]) for token in trace.part("about").data["tokens"]]
    save(_KINDS[kind](trace, tokens, params), path)


def save(figure: Figure, path: Path | str) -> None:
    """Write SVG, PNG or PDF. Raises: UserError: another format, or it can't be written."""
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise UserError(f"{path.name} says no format: its name must end with {', '.join(_SUFFIXES)}")
    try:
        figure.savefig(path, dpi=200, bbox_inches="tight")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _of_attention(trace: Trace, tokens: list[str], params: Mapping[str, Any]) -> Figure:
    part = trace.part("attention", **params)
    if "weights" not in part.arrays:
        raise UserError(f"a text of {len(tokens)} tokens is too long for a figure of all its weights")
    return attention(part.arrays["weights"], tokens, f"layer {params['layer']}, head {params['head']}")


def _of_lens(trace: Trace, tokens: list[str], params: Mapping[str, Any]) -> Figure:
    part = trace.part("lens", **({"start": 0, "pin": -1} | dict(params)))
    texts, best = part.data["texts"], part.arrays["top_ids"][..., 0]
    named = [[_short(texts.get(str(i), f"[{i}]")) for i in row] for row in best.tolist()]
    start, n_columns = int(part.params["start"]), best.shape[1]
    return lens(named, part.arrays["top_probs"][..., 0], tokens[start : start + n_columns])


def _of_norms(trace: Trace, tokens: list[str], params: Mapping[str, Any]) -> Figure:
    return norms(trace.part("stream", **params).arrays["rms"])


def _of_losses(trace: Trace, tokens: list[str], params: Mapping[str, Any]) -> Figure:
    return losses(trace.part("losses", **params).arrays["logprob"][: len(tokens) - 1], tokens)


def _of_attribution(trace: Trace, tokens: list[str], params: Mapping[str, Any]) -> Figure:
    data = trace.part("attribution", **({"token": -1} | dict(params))).data
    parts = [(_short(name), math.nan if value is None else value) for name, value in data["parts"]]
    return attribution(parts, f"logit of {_short(data['label'])}")


_KINDS: dict[str, Callable[[Trace, list[str], Mapping[str, Any]], Figure]] = {
    "attention": _of_attention,
    "lens": _of_lens,
    "norms": _of_norms,
    "losses": _of_losses,
    "attribution": _of_attribution,
}


def _short(text: str) -> str:
    """As much as there is room for: a token may be a hundred spaces, and a file may say anything."""
    return printable(text, 40)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(min(width, 24), min(height, 24)), layout="constrained")
    return figure, figure.subplots()


def _side(n: int) -> float:
    return max(4.0, 0.2 * min(n, _MOST_LABELS) + 2)


def _name(axes: Axes, which: str, tokens: Sequence[str]) -> None:
    """Tokens beside an axis, where there is room for them; none is a formula."""
    if len(tokens) > _MOST_LABELS:
        return
    if which == "x":
        axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=7, parse_math=False)
    else:
        axes.set_yticks(range(len(tokens)), tokens, fontsize=7, parse_math=False)
