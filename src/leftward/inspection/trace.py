"""A trace: a prompt, what a model made of it, and answers to what a page, a report or a notebook asks about that.

    trace = lw.trace(model, "The cat sat on the mat.", max_tokens=20, seed=1)
    trace.part("attention", layer=3, head=1).arrays["weights"]
    trace.save("cat.lwtrace");  Trace.load("cat.lwtrace")

A live one has the model and answers anything; a saved one has the answers that it was saved with. The file is

    "LWT1"  uint32 length of the index  index (JSON): {"version", "parts": [[offset, size], …]}  the parts (part.py)
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leftward import files
from leftward.errors import UserError
from leftward.inspection.part import VERSION, Part, Value, check_version, damaged, key_of, read_header
from leftward.inspection.parts import ask, known
from leftward.inspection.reading import Cancelled
from leftward.inspection.subject import Subject, write
from leftward.language_model import LanguageModel

_MAGIC = b"LWT1"
_KEPT_BYTES = 256 << 20  # of answers that a live trace remembers


class Trace:
    """Answers by name. Make one with `trace`, `Trace.load`."""

    def __init__(self, subject: Subject | None = None, parts: Iterable[Part] = ()) -> None:
        self.subject = subject
        self._parts = OrderedDict((part.key, part) for part in parts)
        self._bytes = 0

    def __repr__(self) -> str:
        about = self.part("about").data
        kind = "live" if self.subject is not None else f"{len(self._parts)} parts"
        return f"Trace({about['name']}, {len(about['tokens'])} tokens of {about['prompt'][:40]!r}, {kind})"

    def part(self, name: str, /, **params: Value) -> Part:
        """The answer to one question; `parts.PARTS` lists them with their parameters.

        Raises:
            UserError: there is no such part, a parameter is wrong, or the trace was saved without it.
            Cancelled: nobody waits for it any more.
        """
        key = key_of(name, params)
        if key in self._parts:
            if self.subject is not None:  # the oldest is forgotten first
                self._parts.move_to_end(key)
            return self._parts[key]
        if self.subject is None:
            raise UserError(f"{key} is not in this trace: make one of the model itself (lw.trace, leftward explore)")
        if self.subject.cancelled():
            raise Cancelled
        part = ask(self.subject, name, params)
        self._parts[key] = part
        self._bytes += sum(array.nbytes for array in part.arrays.values())
        while self._bytes > _KEPT_BYTES and len(self._parts) > 1:
            _, oldest = self._parts.popitem(last=False)
            self._bytes -= sum(array.nbytes for array in oldest.arrays.values())
        return part

    @property
    def parts(self) -> Sequence[Part]:
        """Those that it holds."""
        return list(self._parts.values())

    def save(self, path: Path | str, questions: Iterable[tuple[str, Mapping[str, Value]]] | None = None) -> None:
        """Write a file of what can be asked later: `questions`, or what a report has (report.py).

        Raises: UserError, where it can't be written.
        """
        from leftward.inspection.report import everything  # which knows how a trace is shown

        contents = [self.part(name, **params).to_bytes() for name, params in questions or everything(self)]
        index, offset = [], 0
        for content in contents:
            index.append([offset, len(content)])
            offset += len(content)
        header = json.dumps({"version": VERSION, "parts": index}).encode()
        header += b" " * (-len(header) % 4)
        whole = b"".join((_MAGIC, len(header).to_bytes(4, "little"), header, *contents))
        files.write_atomic(Path(path), lambda temporary: temporary.write_bytes(whole))

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Raises: UserError: no such file, or it is no trace, is damaged, or a newer leftward wrote it."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        try:
            return cls(parts=_parts_of(content))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def report(self, path: Path | str, max_mb: float = 20.0) -> None:
        """Write one HTML file that shows the trace anywhere, without a network. Raises: UserError."""
        from leftward.inspection.report import whole_page

        files.write_text(Path(path), whole_page(self, max_mb))

    def figure(self, kind: str, path: Path | str, **params: Any) -> None:
        """A picture for a paper: SVG, PNG or PDF by the name of `path`. `kind` and `params` are those of figures.py.

        Raises: UserError.
        """
        from leftward.inspection.figures import save_figure  # matplotlib takes a second

        save_figure(self, kind, Path(path), **params)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from html import escape

        from leftward.inspection.report import NOTEBOOK_MB, whole_page

        page = escape(whole_page(self, NOTEBOOK_MB), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:860px;border:0" title="leftward trace"></iframe>'


def trace(
    model: LanguageModel,
    prompt: str | Sequence[int],
    *,
    name: str = "model",
    directory: Path | None = None,
    most_tokens: int | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Trace:
    """Look at `prompt` and at what the model writes behind it.

    Args:
        name: of the model, to be shown.
        directory: of the run that it comes from; its losses are shown beside the laws'.
        most_tokens: that both may have together.
        cancelled: asked between tokens; Cancelled is raised where it says so.
        settings: the fields of `Sampling`; max_tokens is 20 if not given, and 0 for no text.

    Raises:
        UserError: as `LanguageModel.generate`.
    """
    subject = write(
        model, prompt, settings, name=name, directory=directory, most_tokens=most_tokens, cancelled=cancelled
    )
    return Trace(subject)


def _parts_of(content: bytes) -> Iterable[Part]:
    header, start = read_header(content, _MAGIC)
    check_version(header)
    index = header.get("parts")
    if not isinstance(index, list):
        damaged("its index lists no parts")
    found = []
    for entry in index:
        if not (isinstance(entry, list) and len(entry) == 2 and all(type(n) is int and n >= 0 for n in entry)):
            damaged("its index has an entry that is no offset and size")
        offset, size = entry
        if start + offset + size > len(content):
            damaged("it is cut short")
        found.append(Part.from_bytes(content[start + offset : start + offset + size]))
    return known(found)
