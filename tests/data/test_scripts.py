"""Scripts of letters, against Unicode's own table as fontTools carries it."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leftward.data.scripts import letters_by_script, script_of

# Letters whose name says nothing of their script, or another thing than Unicode's table: of 125,000.
_MODIFIERS = "MODIFIER", "SUPERSCRIPT", "TURNED"


def test_every_letter_has_its_script() -> None:
    table = pytest.importorskip("fontTools.unicodedata")
    wrong = []
    letters = 0
    for code in range(0x110000):
        character = chr(code)
        name = unicodedata.name(character, "")
        if not character.isalpha() or not name or name.startswith(_MODIFIERS):
            continue
        letters += 1
        theirs = table.script_name(table.script(character)).replace("_", " ").replace("-", " ").lower()
        theirs = "" if theirs in ("common", "inherited") else theirs
        ours = script_of(code).replace("-", " ").lower()
        if ours != theirs and not (ours and theirs.startswith(f"{ours} ")):
            wrong.append(character)
    assert letters > 120_000
    assert len(wrong) < 20, wrong


@given(st.lists(st.text(st.sampled_from("abZé 1!дИ猫かカ한α\n😀")), max_size=5))
def test_letters_are_counted(texts: list[str]) -> None:
    scripts = {
        "abZé": "Latin",
        "дИ": "Cyrillic",
        "猫": "Han",
        "か": "Hiragana",
        "カ": "Katakana",
        "한": "Hangul",
        "α": "Greek",
    }
    expected = {name: sum(text.count(c) for text in texts for c in letters) for letters, name in scripts.items()}
    assert letters_by_script(texts) == {name: count for name, count in expected.items() if count}
