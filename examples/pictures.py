"""The option --plot FILE that some examples have: checked before their work begins, which may take minutes."""

from __future__ import annotations

import argparse
import importlib.util

from leftward.errors import missing_extra


def add_plot_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", metavar="FILE", type=_picture, help="draw a picture of it too (.png, .svg, .pdf)")


def _picture(path: str) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(str(missing_extra("matplotlib", "plot", "a picture")))
    return path
