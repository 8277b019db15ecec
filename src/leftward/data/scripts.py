"""Which scripts a text is written in: how many letters of each. Counted a character, not a letter at a time."""

from __future__ import annotations

import functools
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Python knows a letter's name, which begins with its script ("GREEK SMALL LETTER ALPHA"), and not the script itself.
_WIDTHS = ("FULLWIDTH", "HALFWIDTH")
_OTHER_NAMES = {"CJK": "HAN", "HENTAIGANA": "HIRAGANA", "IDEOGRAPHIC": "HAN"}
_OF_TWO_WORDS = ("OLD", "NEW", "TAI", "LINEAR", "OL", "CYPRO", "MEETEI", "PAU", "SYLOTI", "WARANG")
_OF_NO_SCRIPT = (
    *("ALEF", "BET", "BLACK-LETTER", "CARON", "DALET", "DOUBLE-STRUCK", "EULER", "FEMININE", "GIMEL", "INFORMATION"),
    *("KATAKANA-HIRAGANA", "MASCULINE", "MATHEMATICAL", "MICRO", "MODIFIER", "OHM", "PLANCK", "SCRIPT", "SUPERSCRIPT"),
    *("TURNED", "VEDIC", "VERTICAL"),
)


def letters_by_script(texts: Iterable[str]) -> Counter[str]:
    """How many letters of each Unicode script the texts hold. What belongs to no script, or to all, is not counted."""
    text = "".join(texts)
    codes: NDArray[Any] = (
        np.frombuffer(text.encode(), dtype=np.uint8)
        if text.isascii()
        else np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    )
    counts = np.bincount(codes)
    found: Counter[str] = Counter()
    for code in np.flatnonzero(counts).tolist():
        if name := script_of(code):
            found[name] += int(counts[code])
    return found


@functools.lru_cache(maxsize=1 << 16)
def script_of(code: int) -> str:
    """The script of a code point that is a letter, "Latin" or "Han"; "" for what is no letter of one script."""
    character = chr(code)
    words = unicodedata.name(character, "").split() if character.isalpha() else []
    if words and words[0] in _WIDTHS:
        words = words[1:]
    if not words or words[0] in _OF_NO_SCRIPT:
        return ""
    name = " ".join(words[: 2 if words[0] in _OF_TWO_WORDS else 1])
    return _OTHER_NAMES.get(name, name).title()
