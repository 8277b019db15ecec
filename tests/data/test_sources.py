"""Sources: every kind of file gives its documents exactly, and what can't be read is named with its place."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leftward.data import sources
from leftward.data.sources import BUILTIN, Report
from leftward.errors import UserError


def documents(*paths: Path | str, report: Report | None = None, **options: object) -> list[str]:
    """All documents, whole."""
    report = report or Report()
    found, parts = [], []
    for piece in sources.read(sources.find(paths, report), report, **options):  # type: ignore[arg-type]
        parts.append(piece.text)
        if piece.ends_document:
            found.append("".join(parts))
            parts = []
    assert not parts
    return found


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def jsonl(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


# ---- what is read


def test_a_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    text = "héllo\r\n  two\n\n\x0cthree\rfour\u2028five 😀\n"
    assert documents(write(tmp_path / "a.txt", text)) == [text]
    assert documents(write(tmp_path / "a.unknown", text)) == [text]
    assert documents(write(tmp_path / "bom.txt", b"\xef\xbb\xbf" + text.encode())) == [text]
    late = "a\ufeff" + text
    assert documents(write(tmp_path / "late.txt", late)) == [late]


def test_a_nul_byte_far_inside_text_is_kept(tmp_path: Path) -> None:
    text = "x" * 10_000 + "\0y"
    assert documents(write(tmp_path / "a.txt", text)) == [text]


def test_a_separator_parts_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one<|endoftext|>\ntwo\n<|endoftext|>  \n <|endoftext|>three <|endoftext|>")
    report = Report()
    assert documents(path, document_separator="<|endoftext|>", report=report) == ["one", "\ntwo\n", "three "]
    assert report.empty_documents == 1
    lines = write(tmp_path / "lines.txt", "a b\nc d\n\ne f")
    assert documents(lines, document_separator="\n") == ["a b", "c d", "e f"]
    with pytest.raises(UserError, match="document_separator is empty"):
        documents(path, document_separator="")


@given(text=st.text(st.sampled_from("ab \n|é"), max_size=300), chunks=st.integers(1, 20), size=st.integers(3, 40))
def test_pieces_join_to_the_documents(text: str, chunks: int, size: int) -> None:
    """Against str.split, with pieces and chunks so small that every border is met."""
    parts = [text[i : i + chunks] for i in range(0, len(text), chunks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_PIECE", size)
        pieces = list(sources._pieces(parts, "||", Report()))
    joined, found = "", []
    for piece in pieces:
        assert len(piece.text) > 0 or piece.ends_document
        joined += piece.text
        if piece.ends_document:
            found.append(joined)
            joined = ""
    assert joined == ""
    assert found == [document for document in text.split("||") if document.strip()]


def test_long_documents_come_in_pieces_cut_between_lines(tmp_path: Path) -> None:
    text = "".join(f"line number {i}\n" for i in range(100_000))
    report = Report()
    path = write(tmp_path / "long.txt", text)
    pieces = list(sources.read(sources.find([path], report), report))
    assert len(pieces) == -(-len(text) // (1 << 18))
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text.endswith("\n") and piece.text.startswith("line") for piece in pieces)
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert documents(write(tmp_path / "row.txt", "é" * 1_000_000)) == ["é" * 1_000_000]


def test_a_directory_is_read_in_order_without_what_it_does_not_know(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "B")
    write(tmp_path / "a.md", "A")
    write(tmp_path / "sub" / "c.jsonl", jsonl({"text": "C"}, {"text": "D"}))
    write(tmp_path / "sub" / "d.txt.gz", gzip.compress(b"E"))
    write(tmp_path / "empty.txt", "")
    write(tmp_path / ".hidden.txt", "no")
    write(tmp_path / ".git" / "x.txt", "no")
    write(tmp_path / "picture.png", b"\x89PNG\0")
    report = Report()
    assert documents(tmp_path, report=report) == ["A", "B", "C", "D", "E"]
    assert (report.empty_files, report.skipped_files) == (1, 1)


def test_a_glob_and_several_paths_give_each_file_once(tmp_path: Path) -> None:
    for name in "cab":
        write(tmp_path / f"{name}.txt", name)
    assert documents(str(tmp_path / "*.txt")) == ["a", "b", "c"]
    assert documents(tmp_path / "b.txt", str(tmp_path / "**" / "*.txt")) == ["b", "a", "c"]
    strange = write(tmp_path / "x[1].txt", "brackets")
    assert documents(strange) == ["brackets"]


def test_json_lines(tmp_path: Path) -> None:
    lines = jsonl({"text": "one\n", "id": 1}, {"text": " "}, {"text": "zwei 😀"}) + "\n" + json.dumps({"text": "end"})
    report = Report()
    assert documents(write(tmp_path / "a.jsonl", "\ufeff" + lines), report=report) == ["one\n", "zwei 😀", "end"]
    assert report.empty_documents == 1
    assert documents(write(tmp_path / "a.jsonl.gz", gzip.compress(lines.encode()))) == ["one\n", "zwei 😀", "end"]
    crlf = write(tmp_path / "crlf.jsonl", lines.replace("\n", "\r\n"))
    assert documents(crlf) == ["one\n", "zwei 😀", "end"]
    other = write(tmp_path / "b.jsonl", jsonl({"body": "x"}))
    assert documents(other, text_field="body") == ["x"]


def test_a_json_line_may_be_longer_than_a_chunk(tmp_path: Path) -> None:
    texts = ["x y " * 500_000, "short"]
    path = write(tmp_path / "a.jsonl", jsonl(*({"text": text} for text in texts)))
    assert documents(path) == texts


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"document {i} é" for i in range(300)]
    table = pyarrow.table({"id": range(302), "content": [*texts, None, " "]})
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, row_group_size=100)
    report = Report()
    assert documents(path, text_field="content", report=report) == texts
    assert report.empty_documents == 2
    with pytest.raises(UserError, match=r"a\.parquet has no column 'contents': did you mean content\?"):
        documents(path, text_field="contents")
    with pytest.raises(UserError, match="column 'id' holds int64, not strings"):
        documents(path, text_field="id")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"a\.parquet is damaged or not Parquet"):
        documents(path)


@pytest.mark.parametrize("frames", [1, 3])
def test_zstd(tmp_path: Path, frames: int) -> None:
    zstandard = pytest.importorskip("zstandard")
    text = "".join(f"line {i}\n" for i in range(50_000))
    compressor = zstandard.ZstdCompressor()
    step = -(-len(text) // frames)
    data = b"".join(compressor.compress(text[i : i + step].encode()) for i in range(0, len(text), step))
    assert documents(write(tmp_path / "a.txt.zst", data)) == [text]
    with pytest.raises(UserError, match=r"a\.txt\.zst is cut short"):
        documents(write(tmp_path / "a.txt.zst", data[:-10]))
    with pytest.raises(UserError, match=r"b\.zst is not zstd"):
        documents(write(tmp_path / "b.zst", "plain text"))


def test_without_the_optional_libraries_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library, name in (("zstandard", "a.txt.zst"), ("pyarrow", "a.parquet")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(UserError, match=rf"needs {library}: pip install {library} \(leftward's extra `data`\)"):
            documents(write(tmp_path / name, "x"))


def test_the_reference_that_every_python_carries() -> None:
    found = documents(BUILTIN)
    assert found == documents(BUILTIN)
    from pydoc_data.topics import topics

    assert set(found) < set(topics.values())
    # What is left out stands in what is kept, and so nothing of it is lost.
    paragraphs = {part for text in found for part in text.split("\n\n")}
    for text in set(topics.values()) - set(found):
        held = sum(len(part) for part in text.split("\n\n") if part in paragraphs)
        assert held >= len(text) / 2 - 4
    with pytest.raises(UserError, match=r"builtin:python: did you mean builtin:python-reference"):
        documents("builtin:python")


def test_standard_input_is_spooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\r\n".encode())))
    sources.spool_stdin(tmp_path / "stdin")
    assert documents(tmp_path / "stdin") == ["é\r\n"]
    with pytest.raises(UserError, match="standard input is empty"):
        sources.spool_stdin(tmp_path / "stdin")


# ---- what is refused


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "input.txt", "x")
    with pytest.raises(UserError, match=r"inptu\.txt does not exist \(did you mean input\.txt\?\)"):
        documents(tmp_path / "inptu.txt")
    with pytest.raises(UserError, match=r"nowhere.x\.txt does not exist$"):
        documents(tmp_path / "nowhere" / "x.txt")
    with pytest.raises(UserError, match="no file matches"):
        documents(str(tmp_path / "*.csv"))
    with pytest.raises(UserError, match="no data given"):
        documents()
    with pytest.raises(UserError, match="name too long"):
        documents(tmp_path / ("x" * 300))


def test_an_empty_file_is_refused_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.txt is empty"):
        documents(write(tmp_path / "a.txt", ""))
    with pytest.raises(UserError, match=r"holds no file to read.*; 1 of other kinds"):
        write(tmp_path / "d" / "x.bin", "x")
        documents(tmp_path / "d")


@pytest.mark.parametrize("offset", [0, 5000, (1 << 18) - 1, (1 << 18) + 7, 600_001])
def test_text_that_is_not_utf8_is_refused_with_the_offset(tmp_path: Path, offset: int) -> None:
    # U+00E9 all along, so that characters straddle the chunks; 0xE9 is it in Latin 1.
    good = "é".encode() * 400_000
    even = offset // 2 * 2
    path = write(tmp_path / "latin.txt", good[:even] + b"\xe9" + good[even:])
    with pytest.raises(UserError, match=rf"latin\.txt is not UTF-8 text: byte 0xE9 at offset {even:,};"):
        documents(path)
    bom = write(tmp_path / "bom.txt", b"\xef\xbb\xbf" + good[:even] + b"\xe9")
    with pytest.raises(UserError, match=rf"byte 0xE9 at offset {even + 3:,};"):
        documents(bom)


def test_a_character_cut_off_at_the_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="byte 0xE7 at offset 3;"):
        documents(write(tmp_path / "a.txt", "abc猫".encode()[:-1]))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.whatever"])
def test_a_binary_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} is a binary file \(NUL byte at offset 3\)"):
        documents(write(tmp_path / name, b"\x7fEL\0F"))
    with pytest.raises(UserError, match=rf"{name} is UTF-16"):
        documents(write(tmp_path / name, "text".encode("utf-16")))


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    data = gzip.compress(os.urandom(1000).hex().encode())
    with pytest.raises(UserError, match=r"a\.gz is not gzip, though its name says so"):
        documents(write(tmp_path / "a.gz", "plain text"))
    with pytest.raises(UserError, match=r"a\.gz is damaged or cut short"):
        documents(write(tmp_path / "a.gz", data[:-20]))
    with pytest.raises(UserError, match=r"a\.gz is .*damaged"):
        documents(write(tmp_path / "a.gz", data[:100] + b"\xff" * 50 + data[150:]))


BAD_LINES = [
    ("{'text': 1}", r"not JSON"),
    ('["text"]', r"a JSON object was expected, not list"),
    ('{"texts": "x"}', r"no field 'text': did you mean texts\?"),
    ("{}", r"no field 'text'"),
    ('{"text": 5}', r"the field 'text' is not a string: 5"),
    ('{"text": null}', r"the field 'text' is not a string: null"),
    (r'{"text": "half \ud800 pair"}', r"half a surrogate pair \(\\ud800\)"),
    ("[" * 100_000, r"not JSON"),
    ('{"text": ' + "1" * 5000 + "}", r"not JSON"),
    (b'{"text": "\xe9"}', r"not UTF-8: byte 0xE9 at byte 10"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_json_line_is_named_or_counted(tmp_path: Path, line: bytes | str, message: str) -> None:
    bad = line.encode() if isinstance(line, str) else line
    path = write(tmp_path / "a.jsonl", b'{"text": "one"}\n\n' + bad + b'\n{"text": "two"}\n' + bad)
    with pytest.raises(UserError, match=rf"a\.jsonl:3: {message}"):
        documents(path)
    report = Report()
    assert documents(path, bad_lines="skip", report=report) == ["one", "two"]
    assert len(report.bad_lines) == 2
    assert "a.jsonl:3: " in report.bad_lines[0]


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe or a device"):
        documents(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x")
    path.chmod(0)
    with pytest.raises(UserError, match=r"cannot read .*a\.txt: permission denied"):
        documents(path)


# ---- units of work


@given(
    # without NUL, which marks a binary file
    lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\0"), max_size=30), max_size=40),
    ends=st.booleans(),
    n_bytes=st.integers(1, 90),
)
def test_ranges_of_lines_are_the_lines(lines: list[str], ends: bool, n_bytes: int) -> None:
    """Against str.split, with ranges so small that borders fall everywhere; line numbers too."""
    content = "\n".join(f'{{"text": {json.dumps("x" + line)}}}' if "b" not in line else line for line in lines)
    data = (content + "\n" * ends).encode()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setattr(sources, "_CHUNK", 16)
        path = Path(directory, "a.jsonl")
        path.write_bytes(data)
        found: list[str] = []
        report = Report()
        for unit in sources.units([sources.Source(path)], n_bytes):
            assert len(unit.sources) == 1 and unit.size <= max(n_bytes, 1)
            found += [piece.text for piece in sources.read(unit.sources, report, bad_lines="skip")] if data else []
    assert found == ["x" + line for line in lines if "b" not in line]
    bad = [i for i, line in enumerate(lines, 1) if "b" in line and line.strip(" \t\r\x0b\x0c")]
    assert [int(line.split(":")[1]) for line in report.bad_lines] == bad


def test_units_keep_the_order_and_are_of_a_size(tmp_path: Path) -> None:
    texts = []
    for i in range(30):
        records = [{"text": f"{i} {j} " + "x" * (37 * i % 100)} for j in range(i)]
        texts += [record["text"] for record in records]
        write(tmp_path / f"{i:02d}.jsonl", jsonl(*records))
    write(tmp_path / "30.txt", "y" * 5000)
    write(tmp_path / "31.jsonl.gz", gzip.compress(jsonl({"text": "z" * 4000}).encode()))
    found = sources.units(sources.find([tmp_path], Report()), 1000)
    assert [p.text for unit in found for p in sources.read(unit.sources, Report())] == [*texts, "y" * 5000, "z" * 4000]
    sizes = [unit.size for unit in found]
    assert sum(sizes) == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert all(1000 <= size < 2000 for size in sizes[:-2])
    assert len(sources.units(sources.find([BUILTIN], Report()), 1000)) == 1
