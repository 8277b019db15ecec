"""Other programs' vocabularies, turned into the `tokenizers` library's: GGUF, SentencePiece, tiktoken, GPT-2, llama2.c.

Each reader gives a `tokenizers.Tokenizer` and the contents of a tokenizer_config.json: what a `Tokenizer` is made of.
All of it may come from anywhere, so everything that can be wrong is one line. Not here: tokenizer.json (directory.py).
"""

from __future__ import annotations

import base64
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from leftward.errors import UserError
from leftward.text.decoding import BYTE_OF, SYMBOL_OF, library_errors
from leftward.text.pretokenizers import PreTokenizer, pre_tokenizer_of
from leftward.text.sentencepiece import Piece, PieceKind, SentencePieceModel, parse_model

Parts = tuple[Any, dict[str, Any]]
"""A `tokenizers.Tokenizer`, and what belongs into its tokenizer_config.json."""

SPACE = "▁"
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
# Below every score that a file can mean, so that Viterbi's search never takes such a piece for text.
_NEVER = -1000.0


# ---- GGUF

_GGUF = "tokenizer.ggml."
# What tokens without the type "control" are control tokens all the same (llama.cpp's list of those that end a turn).
_CONTROL_NAMES = re.compile(r"<\|.+\|>|<｜.+｜>|<(start|end)_of_turn>|</?s>|<(bos|eos|pad)>|\[/?(INST|EOT|EOS)\]")
# GGUF's name of a token → tokenizer_config.json's
SHORT_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
# The kinds of tokenizer, and the ids that llama.cpp takes where a file of such a kind names none. (Its 11 for gpt2 is
# Falcon's, and in other vocabularies text.)
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "gpt2": {},
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}


def from_gguf(metadata: Mapping[str, Any]) -> Parts:
    """The tokenizer that a GGUF file's metadata describe, chat template included.

    Source: the specification (docs/gguf.md of ggml) and what llama.cpp does where it leaves something open.

    Raises:
        UserError: keys are missing, of a wrong type or contradict each other; a kind or a pre-tokenizer is unknown.
    """
    model = metadata.get(_GGUF + "model")
    if not isinstance(model, str) or model not in _DEFAULT_IDS:
        supported = "gpt2 (byte-level BPE), llama (SentencePiece) and t5 (unigram) are"
        raise UserError(f"tokenizer.ggml.model is {model!r}, which is not supported; {supported}")
    texts = _array(metadata, "tokens", str)
    if texts is None:
        raise UserError("tokenizer.ggml.tokens is missing")
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]  # as llama.cpp names them
    kinds = _array(metadata, "token_type", int, len(texts)) or [PieceKind.NORMAL] * len(texts)
    kinds = [
        kind if text == "<s>" and "<bos>" in texts else _control_if_it_looks_so(text, kind)  # Gemma's <s> is HTML
        for text, kind in zip(texts, kinds, strict=True)
    ]
    ids = {
        name: _token_id(metadata, f"{name}_token_id", len(texts), _DEFAULT_IDS[model].get(name)) for name in SHORT_NAMES
    }
    if model == "gpt2":
        pre_tokenizer = pre_tokenizer_of(str(metadata.get(_GGUF + "pre", "default")))
        merges = _array(metadata, "merges", str)
        if merges is None:
            raise UserError("tokenizer.ggml.merges is missing")
        characters = _characters(texts, kinds)
        texts = characters or texts
        library = _closed(texts) if characters else _byte_level(texts, map(_pair, merges), pre_tokenizer)
        _add(library, texts, kinds)
        adds_bos = pre_tokenizer.adds_bos
    else:
        scores = _array(metadata, "scores", float, len(texts))
        if scores is None:
            raise UserError("tokenizer.ggml.scores is missing")
        unigram = model == "t5"
        library = _sentencepiece(
            SentencePieceModel(
                tuple(map(Piece, texts, map(float, scores), kinds)),
                unigram=unigram,
                add_dummy_prefix=_flag(metadata, "add_space_prefix", not unigram),
                remove_extra_whitespaces=unigram and _flag(metadata, "remove_extra_whitespaces", False),
                charsmap=_bytes(metadata, "precompiled_charsmap") if unigram else b"",
            )
        )
        adds_bos = not unigram
    named = {name: None if token_id is None else texts[token_id] for name, token_id in ids.items()}
    add_ends(
        library,
        named["bos"] if _flag(metadata, "add_bos_token", adds_bos) else None,
        named["eos"] if _flag(metadata, "add_eos_token", model == "t5") else None,
    )
    config: dict[str, Any] = {f"{short}_token": named[name] for name, short in SHORT_NAMES.items()}
    templates = _chat_templates(metadata)
    return library, config | ({"chat_template": templates} if templates else {})


def _chat_templates(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """As tokenizer_config.json has them: one text, or a list where there are others beside the default one."""
    found = {
        "default" if key == "tokenizer.chat_template" else key.removeprefix("tokenizer.chat_template."): value
        for key, value in metadata.items()
        if (key + ".").startswith("tokenizer.chat_template.") and isinstance(value, str)
    }
    if set(found) <= {"default"}:
        return found.get("default")
    return [{"name": name, "template": template} for name, template in found.items()]


def _control_if_it_looks_so(text: str, kind: int) -> int:
    """Some converters write the tokens that end a turn as user-defined ones, which any text could write."""
    return PieceKind.CONTROL if kind == PieceKind.USER_DEFINED and _CONTROL_NAMES.fullmatch(text) else kind


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge[1:].partition(" ")  # the first symbol may be a space itself
    if not space or not right:
        raise UserError(f"the merge {merge!r} of tokenizer.ggml.merges is not two tokens with a space between them")
    return merge[0] + left, right


def _array(metadata: Mapping[str, Any], name: str, kind: type, size: int | None = None) -> list[Any] | None:
    """A list of texts or numbers; None where it is absent."""
    values = metadata.get(_GGUF + name)
    if values is None:
        return None
    tolist = getattr(values, "tolist", None)
    values = tolist() if callable(tolist) else list(values) if isinstance(values, Sequence) else None
    right = (int, float) if kind is float else kind
    if values is None or not all(isinstance(value, right) for value in values):
        raise UserError(f"tokenizer.ggml.{name} must be a list of {kind.__name__}")
    if size is not None and len(values) != size:
        raise UserError(f"tokenizer.ggml.{name} has {len(values)} entries for {size} tokens")
    return values


def _bytes(metadata: Mapping[str, Any], name: str) -> bytes:
    values = _array(metadata, name, int) or []
    if not all(-128 <= value < 256 for value in values):
        raise UserError(f"tokenizer.ggml.{name} must be a list of bytes")
    return bytes(value % 256 for value in values)


def _token_id(metadata: Mapping[str, Any], name: str, n_tokens: int, default: int | None) -> int | None:
    value = metadata.get(_GGUF + name)
    if value is None:
        return default if default is not None and default < n_tokens else None
    try:
        token_id = operator.index(value)
    except TypeError:
        raise UserError(f"tokenizer.ggml.{name} is {value!r}: it must be a token id") from None
    if not 0 <= token_id < n_tokens:
        raise UserError(f"tokenizer.ggml.{name} is {token_id}, but there are {n_tokens} tokens (ids from 0)")
    return token_id


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_GGUF + name, default)
    if value not in (True, False):
        raise UserError(f"tokenizer.ggml.{name} is {value!r}: it must be true or false")
    return bool(value)


# ---- SentencePiece, and what is like it


def from_sentencepiece(path: Path) -> Parts:
    """A .model file of SentencePiece, BPE or unigram. Raises: UserError."""
    try:
        model = parse_model(path.read_bytes())
        library = _sentencepiece(model)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UserError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    ids = {"bos_token": model.bos_id, "eos_token": model.eos_id, "unk_token": model.unk_id}
    named = {name: model.pieces[i].text for name, i in ids.items() if 0 <= i < len(model.pieces)}
    return library, {**named, "add_bos_token": True}  # unless a tokenizer_config.json beside it says otherwise


def from_pieces(pieces: Iterable[tuple[bytes, float]]) -> Parts:
    """llama2.c's tokenizer.bin: a piece for each id, spaces as they are; 0 to 2 are unknown, bos and eos.

    Raises: UserError.
    """
    read: list[Piece] = []
    fixed = [PieceKind.UNKNOWN, PieceKind.CONTROL, PieceKind.CONTROL]
    for i, (data, score) in enumerate(pieces):
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise UserError(f"piece {i} of the vocabulary is not UTF-8: {data[:40]!r}") from None
        kind = fixed[i] if i < len(fixed) else PieceKind.BYTE if BYTE_PIECE.fullmatch(text) else PieceKind.NORMAL
        read.append(Piece(text.strip("\n") if i < len(fixed) else text.replace(" ", SPACE), score, kind))
    if len(read) < len(fixed):
        raise UserError(f"the vocabulary has {len(read)} pieces: it must begin with unknown, bos and eos")
    model = SentencePieceModel(tuple(read), unigram=False, remove_extra_whitespaces=False)
    library = _sentencepiece(model)
    bos, eos = read[1].text, read[2].text
    add_ends(library, bos, None)
    return library, {"bos_token": bos, "eos_token": eos}


def _sentencepiece(model: SentencePieceModel) -> Any:
    """The library's tokenizer that gives SentencePiece's ids."""
    texts, kinds = [piece.text for piece in model.pieces], [piece.kind for piece in model.pieces]
    if not all(math.isfinite(piece.score) for piece in model.pieces):
        raise UserError("a score of the vocabulary is not a number")
    unknown = next((i for i, kind in enumerate(kinds) if kind == PieceKind.UNKNOWN), None)
    byte_fallback = PieceKind.BYTE in kinds
    normal = {text: score for text, score, kind in model.pieces if kind == PieceKind.NORMAL}
    best = max(normal.values(), default=0.0)
    # Runs of spaces that are taken whole (Gemma's): the library looks for added tokens before spaces become ▁.
    runs = [text for text, _, kind in model.pieces if kind == PieceKind.USER_DEFINED and text.strip(SPACE) == ""]
    vocabulary = _numbered(texts)
    with library_errors("the vocabulary is damaged"):
        if model.unigram:
            never = min(normal.values(), default=0.0) + _NEVER
            whole = dict.fromkeys(runs, -0.1)  # SentencePiece's own number: better than all that is learned
            entries = [(text, normal.get(text, whole.get(text, never))) for text in texts]
            library = tokenizers.Tokenizer(models.Unigram(entries, unk_id=unknown, byte_fallback=byte_fallback))
        else:
            bpe = models.BPE(
                vocab=vocabulary,
                merges=_merges_by_score(normal | dict.fromkeys(runs, best + 1)),
                unk_token=None if unknown is None else texts[unknown],
                fuse_unk=True,
                byte_fallback=byte_fallback,
            )
            library = tokenizers.Tokenizer(bpe)
        library.normalizer = _sentencepiece_normalizer(model)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else steps)
    _add(library, texts, [PieceKind.NORMAL if text in runs else kind for text, _, kind in model.pieces])
    return library


def _sentencepiece_normalizer(model: SentencePieceModel) -> Any:
    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:  # spaces only: other white space stays
        steps.append(normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    space = SPACE if model.escape_whitespaces else " "
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(space))
    steps.append(normalizers.Replace(" ", space))
    return normalizers.Sequence(steps)


def _merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs that make a piece, the best piece first: then merging by rank is merging by score.

    SentencePiece takes the leftmost of several pairs with one score, which no rank can say. Long pieces first, and long
    left parts, comes to the same for runs of spaces, where it happens (Llama's have one score).
    """
    merges = []
    lengths = set(map(len, scores))  # a piece of a million characters is not cut a million times
    for piece in sorted(scores, key=lambda piece: (-scores[piece], -len(piece))):
        for split in range(len(piece) - 1, 0, -1):
            if split in lengths and len(piece) - split in lengths:
                left, right = piece[:split], piece[split:]
                if left in scores and right in scores:
                    merges.append((left, right))
    return merges


# ---- byte-level BPE


def from_vocab_and_merges(vocab_path: Path, merges_path: Path) -> Parts:
    """GPT-2's vocab.json and merges.txt. Raises: UserError."""
    try:
        vocabulary = json.loads(vocab_path.read_text(encoding="utf-8"))
        lines = merges_path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{vocab_path} or {merges_path.name} is damaged: {error}") from None
    if not isinstance(vocabulary, dict) or not all(type(i) is int for i in vocabulary.values()):
        raise UserError(f"{vocab_path} is damaged: it must hold an id for each token")
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise UserError(f"{vocab_path} is damaged: the ids of its {len(vocabulary)} tokens must be 0, 1, 2 …")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if wrong := next((pair for pair in merges if len(pair) != 2), None):
        raise UserError(f"{merges_path} is damaged: {' '.join(wrong)[:80]!r} is not two tokens")
    texts = sorted(vocabulary, key=vocabulary.__getitem__)
    try:
        library = _byte_level(texts, merges, pre_tokenizer_of("gpt-2"))  # type: ignore[arg-type]
    except UserError as error:
        raise UserError(f"{vocab_path} or {merges_path.name} does not fit the other: {error}") from None
    ends = [text for text in texts if text == "<|endoftext|>"]
    library.add_special_tokens(ends)
    return library, dict.fromkeys(("bos_token", "eos_token"), ends[0]) if ends else {}


def from_tiktoken(path: Path, pre: str, special_tokens: Mapping[str, int]) -> Parts:
    """A .tiktoken file: a token in base64 and its rank on each line.

    The file doesn't say how text is cut and what the control tokens are. `pre` names the cut as GGUF files do: gpt-2
    (r50k_base), llama-bpe (cl100k_base, Llama 3), qwen2, gpt-4o (o200k_base).

    Raises: UserError.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    ranks: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                token, rank = line.split()
                ranks["".join(SYMBOL_OF[byte] for byte in base64.b64decode(token, validate=True))] = int(rank)
            except ValueError:
                raise UserError(f"{path} is damaged: line {number} is not a token in base64 and its rank") from None
    places = ranks | dict(special_tokens)
    if len(places) < len(ranks) + len(special_tokens) or len(set(places.values())) < len(places):
        raise UserError(f"{path} is damaged: two tokens have the same text or the same id")
    lowest, highest = min(places.values(), default=-1), max(places.values(), default=-1)
    if lowest < 0 or highest >= 2 * len(places) + 1024:
        raise UserError(f"{path} is damaged: its {len(places)} tokens have ids from {lowest} to {highest}")
    merges = _merges_by_score({token: -rank for token, rank in ranks.items()})
    with library_errors(f"{path} is damaged"):
        library = _byte_level_of(places, merges, pre_tokenizer_of(pre), ignore_merges=True)
    library.add_special_tokens(list(special_tokens))
    return library, {}


def _byte_level(texts: Sequence[str], merges: Iterable[tuple[str, str]], pre: PreTokenizer) -> Any:
    vocabulary, pairs = _numbered(texts), list(merges)
    with library_errors("the vocabulary is damaged"):
        return _byte_level_of(vocabulary, pairs, pre, pre.ignore_merges)


def _characters(texts: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """The texts of a vocabulary that has a token for each character and no others, as written by gguf_metadata.py;
    empty, where it is another."""
    read = []
    for text, kind in zip(texts, kinds, strict=True):
        if kind == PieceKind.NORMAL:
            data = bytes(BYTE_OF.get(symbol, 0xFF) for symbol in text)
            text = data.decode(errors="replace")
            if len(text) != 1 or text.encode() != data:
                return []
        read.append(text)
    return read


def _closed(texts: Sequence[str]) -> Any:
    """As `vocabularies.train_char` makes it."""
    library = tokenizers.Tokenizer(models.BPE(vocab=_numbered(texts), merges=[]))
    library.decoder = decoders.Fuse()
    return library


def _byte_level_of(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], pre: PreTokenizer, ignore_merges: bool
) -> Any:
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    library.decoder = decoders.ByteLevel()
    return library


# ---- shared


def _numbered(texts: Sequence[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for i, text in enumerate(texts):
        if vocabulary.setdefault(text, i) != i:
            raise UserError(f"the token {text!r} stands twice in the vocabulary, at {vocabulary[text]} and at {i}")
    return vocabulary


def _add(library: Any, texts: Sequence[str], kinds: Sequence[int]) -> None:
    """Say which tokens are taken whole where a text has them: control tokens only where that is asked for."""
    by_special = {True: (PieceKind.CONTROL, PieceKind.UNKNOWN), False: (PieceKind.USER_DEFINED,)}
    with library_errors("the vocabulary is damaged"):
        for special, wanted in by_special.items():
            added = [text for text, kind in zip(texts, kinds, strict=True) if kind in wanted and text]
            library.add_tokens([tokenizers.AddedToken(text, normalized=False, special=special) for text in added])


def add_ends(library: Any, bos: str | None, eos: str | None) -> None:
    """Say what comes before and behind every text."""
    if bos is eos is None:
        return
    ends = {"bos": bos, "eos": eos}
    single = " ".join(
        name for name, there in (("bos", bos is not None), ("$A", True), ("eos", eos is not None)) if there
    )
    library.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[
            {"id": name, "ids": [library.token_to_id(text)], "tokens": [text]}
            for name, text in ends.items()
            if text is not None
        ],
    )
