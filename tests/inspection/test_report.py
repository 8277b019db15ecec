"""A report: everything in one file, and what is left out is said."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path

import pytest
from explored import small_model

import leftward as lw
from leftward.errors import UserError
from leftward.inspection.part import Part
from leftward.inspection.report import everything, whole_page
from leftward.inspection.trace import Trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return lw.trace(small_model(), "the cat s", max_tokens=8, seed=1, name="</script><b>small")


def parts_in(page: str) -> dict[str, Part]:
    blocks = re.findall(r'data-part="([^"]*)">([^<]*)</script>', page)
    return {key.replace("&amp;", "&"): Part.from_bytes(zlib.decompress(base64.b64decode(text))) for key, text in blocks}


def test_a_report_holds_what_a_page_asks(trace: Trace) -> None:
    found = parts_in(whole_page(trace))
    wanted = {Part(name, params).key for name, params in everything(trace)}
    assert set(found) == wanted
    assert all(key == part.key for key, part in found.items())
    assert sum(key.startswith("attention&") for key in found) == 3 * 4


def test_nothing_in_it_is_fetched(trace: Trace) -> None:
    page = whole_page(trace)
    assert "default-src 'none'" in page
    bare = re.sub(r"data:text/javascript;base64,[\w+/=]*", "", page)
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", bare)
    assert "http://" not in bare and "https://" not in bare


def test_a_name_is_never_markup(trace: Trace) -> None:
    page = whole_page(trace)
    assert "<b>small" not in page and "&lt;/script&gt;&lt;b&gt;small" in page


def test_what_does_not_fit_is_left_out_and_said(trace: Trace) -> None:
    whole = len(whole_page(trace))
    limit = (whole - 60_000) / 1e6
    page = whole_page(trace, limit)
    assert len(page) <= limit * 1e6
    remark = re.search(r'id="report">(.*?)</script>', page)
    assert remark is not None
    left_out = json.loads(remark[1])["left_out"]
    found = parts_in(page)
    assert left_out and "about" in found
    assert sum(left_out.values()) + len(found) == len(list(everything(trace)))
    with pytest.raises(UserError, match="raise --max-mb"):
        whole_page(trace, 0.01)


def test_a_saved_trace_makes_the_same_report(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "a.lwtrace")
    trace.report(tmp_path / "a.html")
    Trace.load(tmp_path / "a.lwtrace").report(tmp_path / "b.html")
    assert parts_in((tmp_path / "a.html").read_text()).keys() == parts_in((tmp_path / "b.html").read_text()).keys()


def test_a_part_that_is_named_like_markup_stays_a_name(trace: Trace) -> None:
    """Of a file that somebody sent: neither what a report holds nor what it leaves out becomes markup."""
    name = "</script><script>alert(1)</script><!--TITLE-->"
    parts = [trace.part("about"), Part(name, {name: name}), Part(f"{name}2", {}, {name: list(range(500_000))})]
    page = whole_page(Trace(parts=parts), max_mb=1.0)
    assert "left_out" in page and "alert(1)" in page
    assert "<script>alert" not in page and "</script><script>" not in page
