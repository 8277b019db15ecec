"""Figures: files that hold the picture that was asked for, and plain words where there is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib (extra `plot`)")

from leftward.errors import UserError
from leftward.inspection import figures

TOKENS = ["The", "␣cat", "$x$", "⏎"]
WEIGHTS = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]

PARTS: dict[str, SimpleNamespace] = {
    "about": SimpleNamespace(data={"tokens": [{"label": token} for token in TOKENS]}, arrays={}),
    "attention": SimpleNamespace(data={}, arrays={"weights": WEIGHTS}),
    "lens": SimpleNamespace(
        params={"start": 0, "pin": -1},
        data={"start": 0, "stop": 4, "texts": {"7": "$c", "8": "d_$"}},
        arrays={"top_ids": np.full((3, 4, 2), (7, 8)), "top_probs": np.full((3, 4, 2), (0.7, 0.1))},
    ),
    "stream": SimpleNamespace(data={}, arrays={"rms": np.outer([1, 2, 4], [1, 1, 2, 1])}),
    "losses": SimpleNamespace(data={}, arrays={"logprob": np.array([-1.0, -2.0, -3.0, np.nan])}),
    "attribution": SimpleNamespace(
        data={"label": "cat", "parts": [[f"layers.0.attn.heads.{i}", i - 15.0] for i in range(30)]}, arrays={}
    ),
}


class Trace:
    """What figures ask of one."""

    def part(self, name: str, **params: Any) -> SimpleNamespace:
        return PARTS[name]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("attention", {"layer": 3, "head": 1}),
        ("lens", {}),
        ("norms", {}),
        ("losses", {}),
        ("attribution", {"position": 2}),
    ],
)
@pytest.mark.parametrize(("suffix", "begins"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_every_figure_in_every_format(
    kind: str, params: dict[str, Any], suffix: str, begins: bytes, tmp_path: Path
) -> None:
    path = tmp_path / f"figure{suffix}"
    figures.save_figure(Trace(), kind, path, **params)  # type: ignore[arg-type]
    assert path.read_bytes().startswith(begins)


def test_pictures_show_the_numbers() -> None:
    axes = figures.attention(WEIGHTS, TOKENS, "layer 3, head 1").axes[0]
    shown = axes.images[0].get_array()
    assert shown is not None
    np.testing.assert_allclose(np.ma.filled(shown, 0), WEIGHTS)
    assert np.ma.getmaskarray(shown).tolist() == np.triu(np.ones((4, 4), dtype=bool), 1).tolist()
    assert [label.get_text() for label in axes.get_xticklabels()] == TOKENS
    bars = figures.losses(np.array([-1.0, -2.0, -3.0]), TOKENS).axes[0]
    assert [bar.get_height() for bar in bars.patches] == [1, 2, 3]
    assert bars.get_title() == "mean 2.000"
    parts = figures.attribution([("a", 1.0), ("b", -3.0), ("c", 0.5), ("d", 0.25)], most=2).axes[0]
    assert [bar.get_width() for bar in parts.patches] == [-3.0, 1.0, 0.75]
    assert [label.get_text() for label in parts.get_yticklabels()] == ["b", "a", "2 others"]
    lines = figures.norms(np.array([[1.0, 3.0, 2.0], [2.0, 6.0, 4.0]])).axes[0].lines
    assert lines[-1].get_ydata().tolist() == [2.0, 4.0]  # type: ignore[union-attr]


def test_what_can_go_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no figure 'atention': did you mean attention"):
        figures.save_figure(Trace(), "atention", tmp_path / "a.svg")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"figure\.txt says no format: its name must end with \.svg, \.png, \.pdf"):
        figures.save_figure(Trace(), "norms", tmp_path / "figure.txt")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="cannot write"):
        figures.save_figure(Trace(), "norms", tmp_path / "nowhere" / "figure.svg")  # type: ignore[arg-type]
