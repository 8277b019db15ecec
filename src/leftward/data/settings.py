"""What to make a dataset of. Plain data, so that a recipe can be read before numpy and the tokenizers are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from leftward.data.sources import BadLines
    from leftward.text.tokenizer import Kind

Dedup = Literal["none", "exact", "near"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to read, how to split it, and which tokenizer to train on it."""

    paths: tuple[str, ...]
    """Files, directories, globs, "-" (standard input) or "builtin:python-reference"."""
    val_paths: tuple[str, ...] = ()
    """Text for validation; `paths` then is for training whole."""
    text_field: str = "text"
    document_separator: str | None = None
    bad_lines: BadLines = "stop"
    val_fraction: float = 0.1
    """The share of the bytes that validation gets."""
    dedup: Dedup = "none"
    """Which documents are left out: none; exact copies of another one; near copies as well."""
    near_threshold: float = 0.8
    """Near copies have at least this share of all their runs of five words in common."""
    tokenizer: Kind = "bpe"
    vocab_size: int | None = None
    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    byte_fallback: bool = True
    tokenizer_bytes: int = 200_000_000
    """How much of the text the tokenizer is trained on at most."""
