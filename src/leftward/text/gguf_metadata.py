"""A tokenizer as the metadata of a GGUF file, which llama.cpp reads; foreign.py reads them back.

llama.cpp has three kinds: gpt2 (byte-level BPE), llama (SentencePiece's BPE) and t5 (unigram). What is written gives
the same ids for every text, but for what no GGUF file can say: that text is brought into Unicode's NFC first (Qwen,
NeoX), that white space beside a control token is taken with it (Phi-3), that a text which begins with a space is not
given another (Hugging Face's Metaspace; SentencePiece itself gives one, as llama.cpp does; t5 to words only).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from leftward.errors import UserError
from leftward.text.decoding import SYMBOL_OF, AnyKind
from leftward.text.foreign import BYTE_PIECE, SPACE
from leftward.text.pretokenizers import name_of, pre_tokenizer_of
from leftward.text.sentencepiece import PieceKind

_WAY_OUT = "leftward convert --to hf writes it as it is"
# Scores are compared, nothing else: below all that a vocabulary of 2^24 pieces has, and exact in 32 bits.
_WORST = -float(1 << 24)


def vocabulary_metadata(content: Mapping[str, Any], kind: AnyKind) -> dict[str, Any]:
    """The vocabulary, and how text becomes its tokens, of a tokenizer.json that decodes as `kind`.

    Raises:
        UserError: llama.cpp has no tokenizer that gives the same ids.
    """
    if kind not in _WRITERS:
        what = "whole words" if kind == "word" else "words with an end of their own (</w>)"
        raise UserError(f"llama.cpp has no tokenizer of {what}: train one of kind bpe or char, or {_WAY_OUT}")
    model = content["model"]
    if model["type"] not in ("BPE", "Unigram" if kind == "spm" else "BPE") or model.get("continuing_subword_prefix"):
        raise UserError(f"llama.cpp has no such tokenizer ({_shown(dict(model, vocab=..., merges=...))}): {_WAY_OUT}")
    return {f"tokenizer.ggml.{name}": value for name, value in _WRITERS[kind](content).items()}


def template_metadata(templates: str | Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Chat templates as tokenizer_config.json has them: one text, or a list of named ones."""
    if templates is None or isinstance(templates, str):
        templates = [{"name": "default", "template": templates}] if templates else []
    found = {str(entry.get("name")): entry.get("template") for entry in templates if entry.get("template")}
    names = [name for name in found if name != "default"]
    metadata: dict[str, Any] = {
        "tokenizer.chat_template" + ("" if name == "default" else f".{name}"): template
        for name, template in found.items()
    }
    return metadata | ({"tokenizer.chat_templates": names} if names else {})


def with_padding(metadata: Mapping[str, Any], n_tokens: int) -> dict[str, Any]:
    """The same with at least `n_tokens` tokens: llama.cpp wants one for each row of a model's embedding.

    Raises: UserError, where there are more already.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return dict(metadata)
    if len(tokens) > n_tokens:
        raise UserError(f"the tokenizer has {len(tokens)} tokens, but the model's vocabulary holds {n_tokens}")
    added = range(len(tokens), n_tokens)
    padding: dict[str, list[Any]] = {
        "tokenizer.ggml.tokens": [_hole(i) for i in added],
        "tokenizer.ggml.scores": [_WORST] * len(added),
        "tokenizer.ggml.token_type": [_UNUSED] * len(added),
    }
    return {key: [*value, *padding[key]] if key in padding else value for key, value in metadata.items()}


# ---- tokens


_UNUSED = int(PieceKind.UNUSED)


def _hole(token_id: int) -> str:
    """llama.cpp's name for an id that no text has."""
    return f"[PAD{token_id}]"


def _tokens(content: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """The text of each id, and its kind."""
    model = content["model"]
    listed = model["vocab"]  # {token: id}, or a unigram's list of (token, score)
    ids = dict(listed) if isinstance(listed, Mapping) else {token: i for i, (token, _) in enumerate(listed)}
    added = {token["content"]: token for token in content["added_tokens"]}
    ids |= {text: token["id"] for text, token in added.items()}
    unknown = listed[model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")
    n_tokens = max(ids.values()) + 1
    tokens, kinds = [_hole(i) for i in range(n_tokens)], [_UNUSED] * n_tokens
    is_byte = {text: bool(model.get("byte_fallback") and BYTE_PIECE.fullmatch(text)) for text in ids}
    for text in sorted(ids, key=is_byte.__getitem__):  # Gemma's tab is a second name of the byte's token
        kind = PieceKind.BYTE if is_byte[text] else PieceKind.NORMAL
        if text == _hole(ids[text]):
            kind = PieceKind.UNUSED
        elif text == unknown:
            kind = PieceKind.UNKNOWN
        elif text in added and added[text]["special"]:
            kind = PieceKind.CONTROL
        # Runs of spaces that are added tokens are found as ▁ only after spaces have become such: by merging.
        elif text in added and text.strip(SPACE):
            kind = PieceKind.USER_DEFINED
        tokens[ids[text]], kinds[ids[text]] = text, int(kind)
    return tokens, kinds


# ---- byte-level BPE


def _byte_level(content: Mapping[str, Any]) -> dict[str, Any]:
    model = content["model"]
    tokens, kinds = _tokens(content)
    normalizer = content["normalizer"]
    if normalizer is not None and normalizer["type"] != "NFC":
        raise UserError(
            f"llama.cpp leaves text as it is, and this tokenizer changes it ({_shown(normalizer)}): {_WAY_OUT}"
        )
    return {
        "model": "gpt2",
        "pre": _name_of_cut(content["pre_tokenizer"], model["ignore_merges"]),
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in model["merges"]],
    }


# Falcon's own: its third step, which llama.cpp's lacks, makes a difference to no vocabulary that was learned with it.
_FALCON = [
    {"type": "Punctuation", "behavior": "Contiguous"},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    {"type": "Digits", "individual_digits": False},
    {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False},
]


def _name_of_cut(pre_tokenizer: Mapping[str, Any] | None, ignore_merges: bool) -> str:
    """llama.cpp's name for a cut into words."""
    steps = _steps(pre_tokenizer)
    if steps == _FALCON:
        return "falcon"
    patterns: list[str] = []
    for place, step in enumerate(steps, 1):
        match step:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Removed", "invert": True}:
                patterns.append(pattern)  # what isn't matched is dropped, and these match all
            case {"type": "Digits", "individual_digits": bool(alone)}:
                patterns.append(r"\p{N}" if alone else r"\p{N}+")
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(cuts)} if place == len(steps):
                patterns += pre_tokenizer_of("gpt-2").patterns if cuts else ()
            case _:
                patterns.append(str(step))  # which no name stands for
    if name := name_of(tuple(patterns), ignore_merges):
        return name
    cut = _shown(pre_tokenizer)
    raise UserError(f"llama.cpp has no name for how this tokenizer cuts text into words ({cut}): {_WAY_OUT}")


def _characters(content: Mapping[str, Any]) -> dict[str, Any]:
    """A byte-level BPE that merges the bytes of each character, and no further.

    What lies between, half a character, is no token, and needn't be one for llama.cpp. Of a text it drops what no token
    can write, where we refuse the text.
    """
    tokens, kinds = _tokens(content)
    spelled = [
        "".join(SYMBOL_OF[byte] for byte in token.encode()) if kind == PieceKind.NORMAL else token
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    characters = [token for token, kind in zip(spelled, kinds, strict=True) if kind == PieceKind.NORMAL]
    merges = dict.fromkeys(f"{token[:n]} {token[n]}" for token in characters for n in range(1, len(token)))
    return {"model": "gpt2", "pre": "gpt-2", "tokens": spelled, "token_type": kinds, "merges": list(merges)}


# ---- SentencePiece, and what is like it


def _sentencepiece(content: Mapping[str, Any]) -> dict[str, Any]:
    model = content["model"]
    unigram = model["type"] == "Unigram"
    tokens, kinds = _tokens(content)
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == PieceKind.NORMAL}
    settings = _settings(content, normal)
    trimmed = settings.get("remove_extra_whitespaces", False)
    if unigram:
        if model["byte_fallback"] or model["unk_id"] is None:
            what = "has no bytes for the unknown" if model["byte_fallback"] else "needs a token for the unknown"
            raise UserError(f"llama.cpp's unigram tokenizer {what}, and this one differs: {_WAY_OUT}")
        if trimmed and not settings["add_space_prefix"]:
            raise UserError(f"llama.cpp can't remove extra spaces and leave the first word without one: {_WAY_OUT}")
        scores = dict(model["vocab"])
    else:
        known = set(tokens)
        if trimmed:
            raise UserError(
                f"llama.cpp leaves all spaces to SentencePiece's BPE, and this tokenizer doesn't: {_WAY_OUT}"
            )
        # A character of one byte may stand for it (Gemma's tab).
        spelled = {bytes.fromhex(token[3:5]) for token in known if BYTE_PIECE.fullmatch(token)}
        if len(spelled | {token.encode() for token in known if len(token.encode()) == 1}) < 256:
            raise UserError(
                "llama.cpp spells what SentencePiece's BPE doesn't know in bytes, and this vocabulary has no tokens "
                f"for them (byte_fallback): {_WAY_OUT}"
            )
        scores = _scores([tuple(merge) for merge in model["merges"]], normal, known)
    return {
        "model": "t5" if unigram else "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": [float(scores.get(token, _WORST)) for token in tokens],
        "token_type": kinds,
        **settings,
    }


def _settings(content: Mapping[str, Any], pieces: Collection[str]) -> dict[str, bool]:
    """What GGUF says of the way from text to ▁pieces."""
    said = {"add_space_prefix": False}
    escapes = cuts = trims = False
    for step in [*_steps(content["normalizer"]), *_steps(content["pre_tokenizer"])]:
        match step:
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                escapes = True
            case {"type": "Prepend", "prepend": "▁"}:
                said["add_space_prefix"] = True
            case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}:
                escapes, cuts = True, cuts or split
                said["add_space_prefix"] = scheme != "never"
            case {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " " | "▁"}:
                said["remove_extra_whitespaces"] = True
            case {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""}:
                trims = True
            case {"type": "Replace", "pattern": {"Regex": r"\A▁"}, "content": "▁▁"}:
                pass  # so that Metaspace gives a text its space that has one
            case {"type": "Split", "pattern": {"String": " "}} if escapes:
                pass  # there are none any more
            case _:
                raise UserError(f"llama.cpp has no such way to prepare text ({_shown(step)}): {_WAY_OUT}")
    if trims != said.get("remove_extra_whitespaces", False):
        raise UserError(f"llama.cpp removes spaces at the ends of a text and runs of them, or neither: {_WAY_OUT}")
    if not escapes:
        raise UserError(f"llama.cpp writes spaces as ▁ in such a vocabulary, and this tokenizer doesn't: {_WAY_OUT}")
    if cuts and (across := min((piece for piece in pieces if SPACE in piece[1:]), default=None)):
        raise UserError(
            f"llama.cpp doesn't cut text at spaces, and this tokenizer does, for all its {across!r}: {_WAY_OUT}"
        )
    return said


def _scores(merges: Sequence[tuple[str, str]], pieces: set[str], tokens: set[str]) -> dict[str, float]:
    """Scores of the pieces by which merging the best one first is merging by rank.

    llama.cpp makes a piece of any two parts, and has one score for it. So all pairs of a piece must be merges, and
    stand together: so it is where the merges were derived from SentencePiece's scores.
    """
    merges = [(left, right) for left, right in merges if left + right in pieces]
    ranks: dict[str, int] = {}
    highest = last = -1
    for left, right in merges:
        piece = left + right
        rank = ranks.setdefault(piece, len(ranks))
        is_run = len(set(piece)) == 1  # which may be mixed among each other: the longest is taken from the left
        if rank < highest and not (is_run and rank > last):
            raise UserError(f"llama.cpp can't merge in this tokenizer's order (at {piece!r}): {_WAY_OUT}")
        highest, last = max(highest, rank), last if is_run else rank
    pairs, lengths = set(merges), {1, *map(len, pieces)}
    for piece in pieces:
        for n in range(1, len(piece)):
            if n not in lengths or len(piece) - n not in lengths:
                continue  # a piece of a million characters is not cut a million times
            parts = piece[:n], piece[n:]
            # A character that is no token can be merged there all the same.
            if parts not in pairs and all(p in pieces or (len(p) == 1 and p not in tokens) for p in parts):
                left, right = parts
                raise UserError(f"llama.cpp would merge {left!r} and {right!r}, and this tokenizer doesn't: {_WAY_OUT}")
    return {piece: -float(rank) for piece, rank in ranks.items()}


# ---- shared


def _steps(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, step by step."""
    if part is None:
        return []
    inner = part.get("normalizers", part.get("pretokenizers"))
    return [part] if inner is None else [step for each in inner for step in _steps(each)]


def _shown(part: object) -> str:
    return f"{part!s:.200}"


_WRITERS: dict[AnyKind, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "bpe": _byte_level,
    "char": _characters,
    "spm": _sentencepiece,
}
