"""What can't be drawn is said before the work begins."""

from __future__ import annotations

import argparse
import importlib.util

import pictures
import pytest


def test_without_matplotlib_the_option_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    parser = argparse.ArgumentParser()
    pictures.add_plot_option(parser)
    assert parser.parse_args([]).plot is None
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--plot", "it.png"])
    assert "pip install matplotlib" in capsys.readouterr().err
