"""The page as one file that needs no network: the modules as data: URLs, and the trace's parts in it, deflated.

What doesn't fit is left out, the likeliest to be looked at first in, and the page says so.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from leftward.errors import UserError
from leftward.inspection import assets
from leftward.inspection.part import Part, Value
from leftward.inspection.parts.attention import WHOLE
from leftward.inspection.parts.prediction import LENS_COLUMNS

if TYPE_CHECKING:
    from leftward.inspection.trace import Trace

NOTEBOOK_MB = 4.0
"""Of what a notebook shows: each page of it is saved with the notebook."""
_COMPARED = ("gpt2", "llama3-8b", "gemma3-270m", "mistral-7b", "bloom-560m")

Question = tuple[str, Mapping[str, Value]]


def everything(trace: Trace) -> Iterator[Question]:
    """What a page may ask, what matters most first. A trace that isn't live gives what it has."""
    if trace.subject is None:
        yield from ((part.name, part.params) for part in trace.parts)
        return
    config, n = trace.subject.model.config, len(trace.subject.ids)
    last = max(0, trace.subject.n_prompt - 1)
    heads = [(layer, head) for layer in range(config.n_layers) for head in range(config.n_heads)]
    for name in ("about", "stream", "losses", "generation", "variants", "thumbnails", "checks"):
        yield name, {}
    yield from (("preset", {"name": name}) for name in _COMPARED)
    yield "next", {"position": last}
    yield "attention", {"layer": 0, "head": 0}
    quarter = max(1, -(-n // 4))  # what the page begins with
    for mask, size in (("causal", n), ("window", quarter), ("prefix", quarter), ("none", n)) if n <= WHOLE else ():
        yield "experiment", {"mask": mask, "size": size, "layer": 0, "head": 0}
    for start in _starts(n, last):
        yield "lens", {"start": start, "pin": -1}
    for layer in range(config.n_layers):
        for site in trace.subject.reading.norms(layer):
            yield "activations", {"layer": layer, "site": site, "position": last}
    yield "attribution", {"position": last, "token": -1}
    for layer, head in heads[1:]:
        yield "attention", {"layer": layer, "head": head}
    yield from (("next", {"position": position}) for position in range(n) if position != last)
    if n > WHOLE:
        yield from (("attention_row", {"layer": layer, "head": head, "query": last}) for layer, head in heads)


def _starts(n: int, first: int) -> list[int]:
    """Where the lens' tables begin, that of `first` before the others."""
    starts = range(0, n, LENS_COLUMNS)
    return sorted(starts, key=lambda start: start != first // LENS_COLUMNS * LENS_COLUMNS)


def whole_page(trace: Trace, max_mb: float = 20.0) -> str:
    """HTML of at most `max_mb` megabytes.

    Raises: UserError: not even the beginning fits.
    """
    room = int(max_mb * 1_000_000) - len(assets.page("")) - 2000
    embedded, left_out = list[str](), dict[str, int]()
    for name, params in everything(trace):
        if left_out.get(name, 0) > 2:  # parts of one kind are alike
            left_out[name] += 1
            continue
        try:
            part = trace.part(name, **params)
        except UserError:  # such as an architecture that a part doesn't speak of
            continue
        block = _block(part)
        if len(block) > room:
            left_out[name] = left_out.get(name, 0) + 1
            continue
        room -= len(block)
        embedded.append(block)
    if not any('data-part="about"' in block for block in embedded):
        raise UserError(f"a report of {max_mb:g} MB has no room for its own page: raise --max-mb")
    remark = json.dumps({"left_out": left_out, "max_mb": max_mb}).replace("<", "\\u003c")  # a file's names may say all
    blocks = "\n".join((*embedded, f'<script type="application/json" id="report">{remark}</script>'))
    return assets.page(blocks, title=f"{trace.part('about').data['name']} – leftward")


def _block(part: Part) -> str:
    content = base64.b64encode(zlib.compress(part.to_bytes(), 6)).decode()
    return f'<script type="application/octet-stream" data-part="{html.escape(part.key, quote=True)}">{content}</script>'
