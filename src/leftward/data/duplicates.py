"""Documents that are copies of others: exactly, or nearly (MinHash, Broder 1997; the library is datasketch)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leftward.errors import missing_extra

PERMUTATIONS = 128
_HIGHEST_INDEXED = 0.95
_WORDS = 5
# Thai, Lao, Burmese, Khmer, Chinese and Japanese put no spaces between words: there a character stands for one.
_NO_SPACES = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ua4cf\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_NO_SPACES}]|[^\W{_NO_SPACES}]+")


def check_library() -> None:
    """Raises: UserError where datasketch is not installed."""
    try:
        import datasketch  # noqa: F401
    except ImportError:
        raise missing_extra("datasketch", "dedup", "finding near copies (dedup=near)") from None


def signatures(texts: Sequence[str]) -> NDArray[np.uint32]:
    """[texts, PERMUTATIONS]: what a text's runs of five words are like. That of a text in parts is the least of theirs.

    Of two texts, the share of equal numbers estimates the share of runs that both have (Jaccard's).
    """
    found = np.empty((len(texts), PERMUTATIONS), dtype=np.uint32)
    if len(texts):
        from datasketch import MinHash

        blank = MinHash(PERMUTATIONS, hashfunc=zlib.crc32)
        for row, text in zip(found, texts, strict=True):
            words = _WORD.findall(text) or text.split()  # of signs alone, which else would all be alike
            runs = [" ".join(words[i : i + _WORDS]).encode() for i in range(max(1, len(words) - _WORDS + 1))]
            minhash = blank.copy()
            minhash.update_batch(runs)
            row[:] = minhash.hashvalues
    return found


def exact_copies(digests: NDArray[np.uint64], comes_first: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[N]: which of N documents are copies of another one that stays.

    Of equal ones stays the first of those that `comes_first` says, or else the first.

    Args:
        digests: [N, 2], of their text.
        comes_first: [N]
    """
    order = np.lexsort((~comes_first, digests[:, 1], digests[:, 0]))  # which keeps the order of what is equal
    ordered = digests[order]
    copies = np.zeros(len(digests), dtype=np.bool_)
    copies[order[1:]] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return copies


def near_copies(signed: NDArray[Any], order: Iterable[int], threshold: float) -> NDArray[np.bool_]:
    """[N]: which of N documents resemble one that comes before them in `order` and stays.

    Args:
        signed: [N, PERMUTATIONS], their `signatures`.
        order: numbers of documents; those that it leaves out are not looked at.
        threshold: the share of runs of words that two documents must have in common, as estimated.
    """
    from datasketch import MinHash, MinHashLSH

    # It only proposes, and of the highest thresholds it can't make an index.
    index = MinHashLSH(threshold=min(threshold, _HIGHEST_INDEXED), num_perm=PERMUTATIONS)
    blank = MinHash(PERMUTATIONS)
    copies = np.zeros(len(signed), dtype=np.bool_)
    for document in order:
        minhash = blank.copy()
        minhash.hashvalues = np.array(signed[document])
        candidates = index.query(minhash)
        if candidates and (signed[candidates] == minhash.hashvalues).mean(axis=1).max() >= threshold:
            copies[document] = True
        else:
            index.insert(document, minhash, check_duplication=False)
    return copies
