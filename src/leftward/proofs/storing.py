"""Proofs about what is kept: tied weights, a model's way to disk and back, text's way to ids and back."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leftward.errors import UserError
from leftward.formats.model_directory import load_model, save_model
from leftward.proofs.report import Fails, Skips
from leftward.proofs.subject import Subject
from leftward.text.tokenizer import Tokenizer

_MOST_BYTES = 4 << 30  # written to a temporary directory

_TEXTS = {
    "plain": "The quick brown fox, 12,345 times — isn't it?",
    "accents": "Ångström, naïve façade, Łódź, ĳ, ﬁ, İstanbul",
    "scripts": "Ελληνικά, русский, العربية, עברית, हिन्दी, ไทย, 日本語, 한국어",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇺🇳",
    "marks": "e\u0301 \u0301alone a\u0300\u0316\u0321 \u200b\u200d\ufeff\u2028 \u00a0",
    "controls": "tab\there, bell\x07, NUL\x00, escape\x1b[0m, \x7f\x85",
    "line ends": "one\r\ntwo\rthree\n\n\n  four\t \n",
    "spaces": "  two before,   three within,  two behind  ",
    "astral": "𝄞𝕏𐍈\U0010ffff",
    "empty": "",
}


def head_is_tied(subject: Subject) -> str:
    """The head and the embedding are one tensor where the configuration says so, and two where it doesn't."""
    embedding, head, tied = _ends(subject)
    is_one = head is embedding or head.data_ptr() == embedding.data_ptr() != 0
    if tied and not is_one:
        how = "equal still, but training parts them" if torch.equal(head, embedding) else "different already"
        raise Fails(f"the head is to be tied to the embedding, and they are two tensors: {how}")
    if is_one and not tied:
        raise Fails("the head and the embedding are one tensor, and the configuration says that they are not tied")
    return "the head is the embedding's tensor" if tied else "untied, as configured: two tensors"


def _ends(subject: Subject) -> tuple[Tensor, Tensor, bool]:
    """The weights of the embedding and of the head, and whether they are to be one. Raises: Skips."""
    model: Any = subject.model
    if subject.decoder is not None:
        return model.embed.weight, model.head.weight, model.config.tie_embeddings
    if hasattr(model, "get_output_embeddings") and hasattr(model, "get_input_embeddings"):
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        weights = getattr(embedding, "weight", None), getattr(head, "weight", None)
        if isinstance(weights[0], Tensor) and isinstance(weights[1], Tensor):
            return weights[0], weights[1], bool(getattr(model.config, "tie_word_embeddings", False))
    raise Skips("nothing says whether this model's head is to be tied to its embedding")


def loads_as_saved(subject: Subject) -> str:
    """Saved to a model directory and loaded again: the same Config and, to the bit, the same weights."""
    if (decoder := subject.decoder) is None:
        raise Skips("our model directories are for our Decoder")
    state = decoder.state_dict()
    size = sum(tensor.nbytes for tensor in state.values())
    if size > _MOST_BYTES:
        raise Skips(f"{size / 1e9:.0f} GB are too much to write for a trial")
    tokenizer = None if subject.language_model is None else subject.language_model.tokenizer
    with tempfile.TemporaryDirectory(prefix="leftward-check-") as directory:
        save_model(Path(directory), decoder.config, state, tokenizer)
        loaded, loaded_tokenizer, _ = load_model(directory, subject.dtype)
        if loaded.config != decoder.config:
            ours, theirs = decoder.config.to_dict(), loaded.config.to_dict()
            named = [f"{key} {ours[key]!r} → {theirs[key]!r}" for key in ours if ours[key] != theirs[key]]
            raise Fails(f"the Config comes back changed: {', '.join(named[:3])}")
        again = loaded.state_dict()
        if state.keys() != again.keys():
            raise Fails(f"other weights come back: {', '.join(sorted(state.keys() ^ again.keys())[:3])}")
        changed = [name for name, tensor in state.items() if not _is_same(tensor.cpu(), again[name])]
        if changed:
            raise Fails(f"{len(changed)} of {len(state)} weights come back changed: {', '.join(changed[:3])}")
        if decoder.config.tie_embeddings and loaded.head.weight is not loaded.embed.weight:
            raise Fails("the head comes back untied from the embedding")
    found = f"{len(state)} tensors, {size / 1e6:,.1f} MB: bit for bit, with the Config"
    if tokenizer is None:
        return found
    if loaded_tokenizer is None or loaded_tokenizer.fingerprint() != tokenizer.fingerprint():
        raise Fails("the tokenizer comes back changed")
    return f"{found} and the tokenizer"


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def text_comes_back(subject: Subject) -> str:
    """Hard texts and the vocabulary's own, to ids and back, whole and as a stream."""
    tokenizer = _tokenizer(subject)
    texts = {**_TEXTS, "the vocabulary": _own_text(tokenizer)}
    refused = 0
    for name, text in texts.items():
        try:
            ids = tokenizer.encode(text)
        except UserError:  # a vocabulary without such characters, which says so
            refused += 1
            continue
        back = tokenizer.decode(ids, skip_special=False)
        if back != text:
            place = next((i for i in range(len(text)) if back[: i + 1] != text[: i + 1]), len(text))
            raise Fails(
                f"{name}: comes back changed from character {place} on: {text[place : place + 12]!r} is "
                f"{back[place : place + 12]!r}"
            )
        decoder = tokenizer.stream_decoder(skip_special=False)
        pieces = [decoder.feed(token_id) for token_id in ids] + [decoder.flush()]
        if "".join(pieces) != back:
            raise Fails(f"{name}: the pieces of a stream join to other text than is decoded at once")
    if refused == len(texts):
        raise Fails("no text can be written at all")
    remark = f", {refused} refused in words, as the vocabulary lacks their characters" if refused else ""
    return f"{len(texts) - refused} texts come back, at once and as a stream{remark}"


def _own_text(tokenizer: Tokenizer) -> str:
    """What the ids of the vocabulary spell, as far as it is whole characters."""
    ordinary = (i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids)
    spelt = []
    for token_id in itertools.islice(ordinary, 4096):
        try:
            spelt.append(tokenizer.token_bytes(token_id))
        except UserError:  # a hole
            continue
    text = b"".join(spelt).decode("utf-8", errors="ignore")
    # A word tokenizer gives a first word the space that it lacks, and takes it away again.
    return text.removeprefix(" ")


def control_tokens_stay_text(subject: Subject) -> str:
    """A control token's name in a text is text: nobody can type the end of a document."""
    tokenizer = _tokenizer(subject)
    names = [tokenizer.token_bytes(token_id).decode("utf-8", errors="replace") for token_id in tokenizer.special_ids]
    if not names:
        raise Skips("the tokenizer has no control tokens")
    tried = 0
    for name in names[:32]:
        try:
            ids = tokenizer.encode(f"a {name} b {name}")
        except UserError:
            continue
        tried += 1
        if typed := set(ids) & set(tokenizer.special_ids):
            raise Fails(f"{name!r} in a text becomes the control token {min(typed)}")
    if not tried:
        raise Skips("the vocabulary lacks the characters of its control tokens' names")
    return f"{tried} of {len(names)} control tokens written in a text stay text"


def _tokenizer(subject: Subject) -> Tokenizer:
    if subject.language_model is None:
        raise Skips("there is no tokenizer")
    return subject.language_model.tokenizer
