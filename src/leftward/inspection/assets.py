"""The files of the page: one static page of our own, ES modules and a style sheet, served as they are or put into one.

Modules import each other by bare names ("leftward/svg.js"), which an import map in the page resolves: to /page/svg.js
where a server gives them, to data: URLs in a file that must work from a disk.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from importlib import resources

_KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}


@functools.cache
def files() -> dict[str, bytes]:
    """The content of every file of the page by its name, "steps/mask.js"."""
    root = resources.files("leftward.inspection") / "page"
    found = {each.name: each.read_bytes() for each in root.iterdir() if each.is_file()}
    found |= {f"steps/{each.name}": each.read_bytes() for each in (root / "steps").iterdir() if each.is_file()}
    return {name: content for name, content in sorted(found.items()) if kind(name) is not None}


def kind(name: str) -> str | None:
    """The media type of a file; None: it is none of the page's."""
    return next((media for ending, media in _KINDS.items() if name.endswith(ending)), None)


def page(blocks: str, title: str = "leftward") -> str:
    """The page with everything in it, and `blocks` of HTML with the data."""
    urls = {name: _data_url(content) for name, content in files().items() if name.endswith(".js")}
    style = files()["style.css"].decode()
    policy = (
        "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    return _filled(
        {
            "POLICY": f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            "STYLE": f"<style>{style}</style>",
            "IMPORTS": f'<script type="importmap">{_import_map(urls)}</script>',
            "DATA": blocks,
            "TITLE": html.escape(title),
        }
    )


@functools.cache
def served_page() -> tuple[str, str]:
    """The page that asks a server for its modules and data, and the policy that it comes with."""
    imports = _import_map({name: f"/page/{name}" for name in files() if name.endswith(".js")})
    text = _filled(
        {
            "POLICY": "",
            "STYLE": '<link rel="stylesheet" href="/page/style.css">',
            "IMPORTS": f'<script type="importmap">{imports}</script>',
            "DATA": "",
            "TITLE": "leftward",
        }
    )
    inline = [imports, text.split('<script type="module">')[1].split("</script>")[0]]
    digests = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in inline]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src 'self' {hashes}; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _filled(values: dict[str, str]) -> str:
    text = files()["index.html"].decode()
    for name, value in values.items():
        text = text.replace(f"<!--{name}-->", value)
    return text


def _import_map(urls: dict[str, str]) -> str:
    return json.dumps({"imports": {f"leftward/{name}": url for name, url in urls.items()}})


def _data_url(content: bytes) -> str:
    return "data:text/javascript;base64," + base64.b64encode(content).decode()
