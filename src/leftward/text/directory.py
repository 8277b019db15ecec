"""The tokenizer's files in a model directory: which are there, and what they say together.

tokenizer.json is the vocabulary and its rules; tokenizer_config.json, special_tokens_map.json and config.json say which
of its tokens have a part to play, and may add some. A directory without tokenizer.json may have an older kind of file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from leftward import files
from leftward.errors import UserError
from leftward.text.decoding import library_errors
from leftward.text.foreign import Parts, from_sentencepiece, from_vocab_and_merges

TEMPLATE_FILE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def find(directory: Path) -> tuple[Path, ...]:
    """The files that hold the vocabulary, or none where there is no tokenizer."""
    for names in _READERS:
        paths = tuple(directory / name for name in names)
        if all(path.is_file() for path in paths):
            return paths
    return ()


def read(directory: Path) -> Parts:
    """The library's tokenizer, and its settings as tokenizer_config.json would have them. Raises: UserError."""
    paths = find(directory) or (directory / "tokenizer.json",)
    ours = paths[0].name == "tokenizer.json"
    if ours:
        files.read_json(paths[0])  # names what is wrong with the file better than the library does
    settings_path = directory / "tokenizer_config.json"
    settings = _object(settings_path) if ours or settings_path.exists() else {}
    library, found = _READERS[tuple(path.name for path in paths)](*paths)
    named = _optional(directory / "special_tokens_map.json")
    settings = {**found, **named, **settings}
    with library_errors(f"{settings_path} is damaged"):
        _add_tokens(library, settings)
    return library, _ids_of_model(library, directory, settings) | _templates(directory)


def _read_json_tokenizer(path: Path) -> Parts:
    with library_errors(f"{path} is damaged"):
        return tokenizers.Tokenizer.from_file(str(path)), {}


_READERS: dict[tuple[str, ...], Callable[..., Parts]] = {
    ("tokenizer.json",): _read_json_tokenizer,
    ("tokenizer.model",): from_sentencepiece,
    ("vocab.json", "merges.txt"): from_vocab_and_merges,
    ("encoder.json", "vocab.bpe"): from_vocab_and_merges,
}
"""What a directory may have, the best first. (.tiktoken files don't say enough: `Tokenizer.from_tiktoken`.)"""


def _add_tokens(library: Any, settings: Mapping[str, Any]) -> None:
    """What the settings add to the file, as in transformers: tokens, and that the named ones are control tokens."""
    listed = settings.get("added_tokens_decoder")
    for key, token in sorted(listed.items(), key=lambda item: int(item[0])) if isinstance(listed, dict) else ():
        library.add_tokens([_added_token(token)])
        if library.token_to_id(token["content"]) != int(key):
            raise ValueError(
                f"added_tokens_decoder gives {token['content']!r} the id {key}, but in the vocabulary it is "
                f"{library.token_to_id(token['content'])}"
            )
    extra = [settings.get(name) for name in ("additional_special_tokens", "extra_special_tokens")]
    named = [settings.get(name) for name in NAMED] + [t for tokens in extra if isinstance(tokens, list) for t in tokens]
    present = [token for token in named if token and library.token_to_id(_content(token)) is not None]
    library.add_special_tokens([_added_token(token) for token in present])


def _added_token(token: Any) -> Any:
    if isinstance(token, str):
        return tokenizers.AddedToken(token, normalized=False, special=True)
    return tokenizers.AddedToken(_content(token), **{flag: token[flag] for flag in _FLAGS if flag in token})


def _content(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ValueError(f"a token is {token!r}: it must be a text")
    return content


def _ids_of_model(library: Any, directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Where no file of the tokenizer says which tokens begin and end a text, the model's own configuration may."""
    ids = _optional(directory / "config.json")
    for name in ("bos_token", "eos_token"):
        token_id = ids.get(f"{name}_id")
        token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
        if name not in settings and type(token_id) is int and token_id >= 0:
            settings = {**settings, name: library.id_to_token(token_id) if token_id < 2**32 else None}
    return settings


def _templates(directory: Path) -> dict[str, Any]:
    """Chat templates in files of their own, which come before those in tokenizer_config.json."""
    paths = {"default": directory / TEMPLATE_FILE}
    paths |= {path.stem: path for path in sorted((directory / _MORE_TEMPLATES).glob("*.jinja"))}
    found = {name: files.read_text(path) for name, path in paths.items() if path.is_file()}
    if not found:
        return {}
    if set(found) == {"default"}:
        return {"chat_template": found["default"]}
    return {"chat_template": [{"name": name, "template": template} for name, template in found.items()]}


def _object(path: Path) -> dict[str, Any]:
    content = files.read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it must hold an object")
    return content


def _optional(path: Path) -> dict[str, Any]:
    return _object(path) if path.is_file() else {}
