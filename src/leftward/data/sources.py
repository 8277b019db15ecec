"""Where text comes from: files, directories, globs, JSON lines, Parquet, compressed or not → a stream of documents.

Memory stays constant whatever the size: documents come in pieces, and only what is being cut is held. Every source can
be read twice with the same result, and a large .jsonl by ranges of its lines. Nothing is repaired in silence: text is
strict UTF-8, line ends stay as they are, and what can't be read is an error that names the file and the place. Not
here: tokens (prepare.py).
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from leftward import files
from leftward.errors import UserError, missing_extra, nearest

BUILTIN = "builtin:python-reference"
"""The language reference that every Python carries: 79 documents of English about Python."""
STDIN = "-"
BadLines = Literal["stop", "skip"]

_PLAIN = (".txt", ".md")
_RECORDS = (".jsonl", ".parquet")
_COMPRESSED = (".gz", ".zst")
_CHUNK = 1 << 18  # bytes read at a time
_PIECE = 1 << 18  # characters of a piece at most; smaller pieces keep more cores busy when they are encoded
_BINARY_PROBE = 8192


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a part of one that is too long to be held whole."""

    text: str
    ends_document: bool


@dataclass
class Report:
    """What reading left out."""

    empty_documents: int = 0
    empty_files: int = 0
    skipped_files: int = 0
    """Files in directories that are of no kind known here."""
    bad_lines: list[str] = field(default_factory=list)
    """Place (file:line) and fault of each."""

    def take(self) -> Report:
        """What was counted so far. Counting begins anew."""
        taken = replace(self)
        vars(self).update(vars(Report()))
        return taken


@dataclass(frozen=True)
class Source:
    """A file to read, a range of its lines, or the builtin text. Made by `find` and `units`."""

    path: Path
    explicit: bool = field(compare=False, default=True)
    """Named by the user, not found in a directory or by a glob: being empty is an error, not something to count."""
    start: int = 0
    """Only lines that begin at this byte or after it, and"""
    stop: int | None = None
    """before this one."""

    @property
    def is_builtin(self) -> bool:
        return str(self.path) == BUILTIN

    def size(self) -> int:
        """Bytes on disk; 0 for the builtin text. Raises: UserError."""
        if self.is_builtin:
            return 0
        if self.stop is not None:
            return self.stop - self.start
        with _reading(self.path):
            return self.path.stat().st_size


@dataclass(frozen=True)
class Unit:
    """Some sources that are read one behind the other, by whoever has the time."""

    sources: tuple[Source, ...]
    size: int
    """Bytes on disk."""


def find(paths: Sequence[str | Path], report: Report) -> list[Source]:
    """The files behind names of files, directories and globs, each once, in an order that does not change.

    Raises:
        UserError: a name that stands for nothing that can be read.
    """
    if not paths:
        raise UserError("no data given: name a file, a directory, a glob, or " + BUILTIN)
    found: dict[Source, None] = {}
    for path in paths:
        for source in _find_one(str(path), report):
            found.setdefault(source)
    return list(found)


def units(sources: Iterable[Source], n_bytes: int) -> list[Unit]:
    """The same documents in the same order, in units of about `n_bytes` on disk.

    Plain .jsonl is cut into ranges of lines; any other file is whole in one unit, however large.
    """
    found: list[Unit] = []
    gathered: list[Source] = []
    size = 0
    for source in sources:
        for part in _ranges(source, n_bytes):
            gathered.append(part)
            size += part.size()
            if size >= n_bytes:
                found.append(Unit(tuple(gathered), size))
                gathered, size = [], 0
    if gathered:
        found.append(Unit(tuple(gathered), size))
    return found


def _ranges(source: Source, n_bytes: int) -> list[Source]:
    size = source.size()
    if source.path.suffix.lower() != ".jsonl" or size <= n_bytes:
        return [source]
    starts = range(0, size, n_bytes)
    return [replace(source, start=start, stop=min(start + n_bytes, size)) for start in starts]


def read(
    sources: Iterable[Source],
    report: Report,
    *,
    text_field: str = "text",
    document_separator: str | None = None,
    bad_lines: BadLines = "stop",
) -> Iterator[Piece]:
    """All documents of `sources` in order. Documents of white space only are left out, and counted.

    A text file is one document, or several where `document_separator` parts them. `text_field` names the text in JSON
    lines and Parquet. With `bad_lines="skip"` a line that is not JSON with a text is counted instead of an error.

    Raises:
        UserError: naming the file, and the line or byte.
    """
    if document_separator == "":
        raise UserError("document_separator is empty: leave it out, or give the text that parts documents")
    for source in sources:
        if source.is_builtin:
            for text in _python_reference():
                yield from _pieces(_slices(text), None, report)
            continue
        with _reading(source.path):
            kind = _kind(source.path)
            if source.path.stat().st_size == 0:
                if source.explicit:
                    raise UserError(f"{source.path} is empty")
                report.empty_files += 1
            elif kind == ".parquet":
                for text in _parquet_texts(source.path, text_field, report):
                    yield from _pieces(_slices(text), None, report)
            elif kind == ".jsonl":
                for text in _json_texts(source, text_field, bad_lines, report):
                    yield from _pieces(_slices(text), None, report)
            else:
                yield from _pieces(_decoded(source.path), document_separator, report)


def spool_stdin(path: Path) -> None:
    """Copy standard input to `path`, because data is read twice.

    Raises:
        UserError: nothing came, or it can't be written.
    """
    stdin = sys.stdin.buffer
    files.write_atomic(path, lambda temporary: _copy(stdin, temporary))
    if path.stat().st_size == 0:
        raise UserError("standard input is empty")


# ---- finding files


def _find_one(name: str, report: Report) -> list[Source]:
    if name.startswith("builtin:"):
        if name != BUILTIN:
            raise UserError(f"unknown data {name}: {nearest(name, [BUILTIN])}")
        return [Source(Path(name))]
    if not name:
        raise UserError(f"the data has an empty name: give a file, a directory, a glob, {STDIN} or {BUILTIN}")
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path's own raises where there is no such user
    with _reading(path):
        if path.is_dir():
            return _find_in_directory(path, report)
        if path.exists():
            if not path.is_file():
                raise UserError(f"{path} is a pipe or a device, which can't be read twice: give it as {STDIN} (stdin)")
            return [Source(path)]
    if glob.has_magic(name):
        # Path.glob takes no absolute pattern.
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
        sources = [Source(match, explicit=False) for match in matches if match.is_file()]
        if not sources:
            raise UserError(f"no file matches {name}")
        return sources
    hint = ""
    if path.parent.is_dir():
        with contextlib.suppress(OSError):
            siblings = [entry.name for entry in path.parent.iterdir()]
            close = nearest(path.name, siblings) if siblings else ""
            hint = f" ({close})" if close.startswith("did you mean") else ""
    raise UserError(f"{path} does not exist{hint}")


def _find_in_directory(directory: Path, report: Report) -> list[Source]:
    sources = []
    refused: list[OSError] = []
    for folder, subfolders, names in os.walk(directory, onerror=refused.append):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".") or not path.is_file():
                continue
            if _kind(path):
                sources.append(Source(path, explicit=False))
            else:
                report.skipped_files += 1
    if refused:
        raise refused[0]
    if not sources:
        skipped = f"; {report.skipped_files} of other kinds" if report.skipped_files else ""
        raise UserError(
            f"{directory} holds no file to read ({', '.join(_PLAIN + _RECORDS)}, each also with "
            f"{' or '.join(_COMPRESSED)}){skipped}: name files of another kind one by one"
        )
    return sources


def _kind(path: Path) -> str:
    """The suffix that says what is in a file, compression aside; "" where it says nothing."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _PLAIN + _RECORDS else ""


# ---- bytes


def _chunks(path: Path, start: int = 0) -> Iterator[bytes]:
    """The content of a file from byte `start` on, decompressed. Damage becomes an error that names the file."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        yield from _zstd_chunks(path)
    elif suffix == ".gz":
        try:
            with gzip.open(path) as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        except gzip.BadGzipFile as error:
            raise UserError(f"{path} is not gzip, though its name says so, or damaged ({error})") from None
        except (EOFError, zlib.error) as error:
            raise UserError(f"{path} is damaged or cut short ({error})") from None
    else:
        with path.open("rb") as file:
            file.seek(start)
            while chunk := file.read(_CHUNK):
                yield chunk


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise missing_extra("zstandard", "data", f"reading {path}") from None
    # One object a frame: the library's reader of many frames takes a file that is cut short for a whole one.
    frame = None
    try:
        with path.open("rb") as file:
            # A few kilobytes can stand for many megabytes, all of which come at once.
            while chunk := file.read(_CHUNK // 16):
                while chunk:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(chunk)
                    chunk = frame.unused_data
                    if frame.eof:
                        frame = None
    except zstandard.ZstdError as error:
        raise UserError(f"{path} is not zstd, though its name says so, or damaged ({error})") from None
    if frame is not None:
        raise UserError(f"{path} is cut short: its last zstd frame does not end")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal to read `path` into one line for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {(error.strerror or str(error)).lower()}") from error


# ---- text files


def _decoded(path: Path) -> Iterator[str]:
    """The text of a file in chunks: strict UTF-8, without the byte order mark that some editors write."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    taken = 0  # bytes given to the decoder
    pending = 0  # of which it keeps some: the beginning of a character, which waits for the rest
    at_start = True
    for chunk in _chunks(path):
        if at_start:
            _check_is_text(path, chunk[:_BINARY_PROBE])
        text = _decode(decoder, chunk, path, taken - pending)
        taken += len(chunk)
        pending = len(decoder.getstate()[0])
        yield text.removeprefix("\ufeff") if at_start else text
        at_start = at_start and not text
    _decode(decoder, b"", path, taken - pending, final=True)


def _decode(decoder: codecs.IncrementalDecoder, chunk: bytes, path: Path, offset: int, final: bool = False) -> str:
    try:
        return decoder.decode(chunk, final)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02X} at offset {offset + error.start:,}; "
            "convert it first (such as iconv -f LATIN1 -t UTF-8)"
        ) from None


def _check_is_text(path: Path, beginning: bytes) -> None:
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path} is UTF-16 text: convert it to UTF-8 first (iconv -f UTF-16 -t UTF-8)")
    if (zero := beginning.find(b"\0")) >= 0:
        raise UserError(f"{path} is a binary file (NUL byte at offset {zero:,}): give text in UTF-8")


def _pieces(chunks: Iterable[str], separator: str | None, report: Report) -> Iterator[Piece]:
    """Part text into documents, and long documents into pieces. Joined, the pieces are exactly the text."""
    held = ""  # text of the present document that is not given out yet
    begun = False  # whether a piece of the present document was given out
    for chunk in chunks:
        held += chunk
        if separator and separator in held:
            *whole, held = held.split(separator)
            for document in whole:
                yield from _end(document, begun, report)
                begun = False
        # What stays is never nothing, so that the last piece can say that it is the last. It may also hold the
        # beginning of a separator. White space alone stays too: a document of nothing else is left out.
        while len(held) > _PIECE + len(separator or "") and (begun or not held.isspace()):
            cut = _cut(held)
            yield Piece(held[:cut], ends_document=False)
            held, begun = held[cut:], True
    if held or begun:
        yield from _end(held, begun, report)


def _end(text: str, begun: bool, report: Report) -> Iterator[Piece]:
    """The last text of a document, unless there is nothing in the document."""
    if not begun and (not text or text.isspace()):
        report.empty_documents += 1
        return
    while len(text) > _PIECE:
        cut = _cut(text)
        yield Piece(text[:cut], ends_document=False)
        text = text[cut:]
    yield Piece(text, ends_document=True)


def _cut(text: str) -> int:
    """Where to part a text that is too long."""
    return cut_place(text, 0, _PIECE) or _PIECE


def cut_place(text: str, start: int, stop: int) -> int | None:
    """The last place in the second half of [start, stop) where a tokenizer would part a longer text too.

    Best is after a line's end with no other white space around it; else before a space. None: there is neither.
    """
    least, end = (start + stop) // 2, stop
    while (newline := text.rfind("\n", least, end)) >= 0:
        if not text[newline - 1].isspace() and not text[newline + 1].isspace():
            return newline + 1
        end = newline
    end = stop
    while (space := text.rfind(" ", least, end)) >= 0:
        if not text[space - 1].isspace():
            return space
        end = space
    return None


def _slices(text: str) -> Iterator[str]:
    """A whole text in chunks, so that cutting it up does not copy the rest of it again and again."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


# ---- records


def _json_texts(source: Source, text_field: str, bad_lines: BadLines, report: Report) -> Iterator[str]:
    lines_before = None if source.start else 0  # in the file; in the middle of it they are counted when somebody asks
    for number, (offset, line) in enumerate(_lines(source)):
        if offset == 0:
            _check_is_text(source.path, line[:_BINARY_PROBE])
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            yield _json_text(line, text_field)
        except UserError as error:
            if lines_before is None:
                lines_before = _newlines(source.path, offset) - number
            problem = f"{source.path}:{lines_before + number + 1}: {error}"
            if bad_lines == "stop":
                raise UserError(f"{problem} (bad_lines=skip passes over such lines)") from None
            report.bad_lines.append(problem)


def _json_text(line: bytes, text_field: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: byte 0x{line[error.start]:02X} at byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:  # ValueError: also numbers longer than Python converts
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f"a JSON object was expected, not {type(record).__name__}")
    if text_field not in record:
        raise UserError(f"no field {text_field!r}" + (f": {nearest(text_field, record)}" if record else ""))
    text = record[text_field]
    if not isinstance(text, str):
        raise UserError(f"the field {text_field!r} is not a string: {json.dumps(text)[:40]}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(f"half a surrogate pair ({half}) in the field {text_field!r}, which is no character") from None
    return text


def _lines(source: Source) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in the source's range, each with the byte at which it begins."""
    offset = max(source.start - 1, 0)  # the byte before says whether a line begins at the start
    parts: list[bytes] = []
    for chunk in _chunks(source.path, offset):
        first, *rest = chunk.split(b"\n")
        parts.append(first)
        for part in rest:
            line = b"".join(parts)
            if offset >= source.start:
                yield offset, line
            offset += len(line) + 1
            parts = [part]
            if source.stop is not None and offset >= source.stop:
                return
    if offset >= source.start:
        yield offset, b"".join(parts)


def _newlines(path: Path, stop: int) -> int:
    """How many there are before a byte of a file."""
    count = 0
    for chunk in _chunks(path):
        count += chunk[:stop].count(b"\n")
        stop -= len(chunk)
        if stop <= 0:
            break
    return count


def _parquet_texts(path: Path, text_field: str, report: Report) -> Iterator[str]:
    if path.suffix.lower() in _COMPRESSED:
        raise UserError(f"{path}: Parquet compresses itself and can't be read through {path.suffix}; decompress it")
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("pyarrow", "data", f"reading {path}") from None
    try:
        with parquet.ParquetFile(path) as file:
            schema: Any = file.schema_arrow
            if text_field not in schema.names:
                raise UserError(f"{path} has no column {text_field!r}: {nearest(text_field, schema.names)}")
            if schema.names.count(text_field) > 1:
                raise UserError(
                    f"{path} has several columns {text_field!r}: name one of another name (data.text_field)"
                )
            column = schema.field(text_field).type
            if pyarrow.types.is_dictionary(column):
                column = column.value_type
            if not (pyarrow.types.is_string(column) or pyarrow.types.is_large_string(column)):
                raise UserError(f"{path}: the column {text_field!r} holds {column}, not strings")
            for batch in file.iter_batches(batch_size=64, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    if text is None:
                        report.empty_documents += 1
                    else:
                        yield text
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise
        raise UserError(f"{path} is damaged or not Parquet ({str(error).splitlines()[0]})") from None


def _python_reference() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(f"this Python was installed without its reference ({BUILTIN}): give a text of yours") from None
    # A section stands under several topics. One that is for the most part in longer ones is left out: with a copy in
    # training, validation would measure memory.
    seen: set[str] = set()
    kept = []
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = {part: len(part) for part in topics[name].split("\n\n")}
        if sum(length for part, length in paragraphs.items() if part not in seen) > len(topics[name]) / 2:
            kept.append(name)
            seen |= paragraphs.keys()
    for name in sorted(kept):
        yield topics[name]


def _copy(stdin: Any, path: Path) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(stdin, file)
