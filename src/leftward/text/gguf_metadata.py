"""A tokenizer as the metadata of a GGUF file, which llama.cpp reads; foreign.py reads them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leftward.errors import UserError
from leftward.text.pretokenizers import name_of, pre_tokenizer_of
from leftward.text.sentencepiece import PieceKind


def byte_level_metadata(content: Mapping[str, Any]) -> dict[str, Any]:
    """Vocabulary, merges and the cut into words, of a tokenizer.json.

    Raises:
        UserError: it is no byte-level BPE, or cuts text in a way that llama.cpp has no name for.
    """
    model = content["model"]
    if model["type"] != "BPE" or (content["decoder"] or {}).get("type") != "ByteLevel":
        raise UserError(f"a tokenizer of kind {model['type']} can't be written to GGUF yet, only byte-level BPE")
    added = {token["content"]: token for token in content["added_tokens"]}
    ids = model["vocab"] | {text: token["id"] for text, token in added.items()}
    tokens = [f"[PAD{i}]" for i in range(max(ids.values()) + 1)]  # llama.cpp's name for a hole
    kinds = [int(PieceKind.UNUSED)] * len(tokens)
    for text, token_id in ids.items():
        tokens[token_id] = text
        is_special = text in added and added[text]["special"]
        kinds[token_id] = int(
            PieceKind.CONTROL if is_special else PieceKind.USER_DEFINED if text in added else PieceKind.NORMAL
        )
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_of(content["pre_tokenizer"], model["ignore_merges"]),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
    }


def _pre_of(pre_tokenizer: Mapping[str, Any] | None, ignore_merges: bool) -> str:
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    *splits, last = steps
    plain = last is not None and last["type"] == "ByteLevel" and not last["add_prefix_space"]
    patterns = (
        [split.get("pattern", {}).get("Regex") for split in splits]
        if splits
        else list(pre_tokenizer_of("gpt-2").patterns)
    )
    if plain and bool(splits) != last["use_regex"] and (name := name_of(tuple(patterns), ignore_merges)):
        return name
    raise UserError(f"llama.cpp has no name for how this tokenizer cuts text into words: {str(pre_tokenizer)[:200]}")
