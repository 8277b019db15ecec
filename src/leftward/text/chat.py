"""Chat templates: a conversation to the text, and the ids, that a model was trained to continue.

A template is a Jinja program that comes with the model. Its text is where control tokens belong; what a user or a tool
has written is only text. The two are told apart by marks: before rendering, a character that occurs nowhere else is put
into every control token that a message has, and the tokenizer reads no control token that has a mark in it.

What that leaves open: a template may build a control token from parts of messages, `'<|' + message.role + '|>'`. Roles
must be words, so they can name a token in such a template and no more. Where a template cuts or changes a message so
that the marks would show, the conversation is refused.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from leftward.errors import UserError
from leftward.text.bounded_jinja import TemplateRefusal, compile_template, raise_exception, render
from leftward.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""{"role": "user", "content": "Hello"}, and whatever else the template reads."""

# Code points that Unicode keeps for a program's own use and that no text has.
_MARKS = [chr(code) for code in (*range(0xFDD0, 0xFDF0), *(plane * 0x10000 + 0xFFFE for plane in range(1, 17)))]
_ROLE = re.compile(r"[\w.-]{1,64}")
_PROBE = "Answer"


class ChatTemplate:
    """A model's way of writing a conversation down."""

    def __init__(self, sources: str | Mapping[str, str], tokenizer: Tokenizer) -> None:
        """From the template's text, or several by name: "default", and "tool_use" for conversations with tools."""
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The one that the model came with. Raises: UserError, where there is none."""
        found: Any = tokenizer.chat_template
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found if _is_entry(entry)}
        if not found:
            raise UserError(
                "this model has no chat template: it was made to continue a text (leftward generate); if you know the "
                "template it was trained with, give it as a file (--template FILE; ChatTemplate in Python)"
            )
        if not isinstance(found, (str, dict)):
            raise UserError(f"the chat template must be a text; this is {type(found).__name__}")
        return cls(found, tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text, ready for the assistant's answer unless not `add_generation_prompt`.

        `variables` are what this template knows beside, such as enable_thinking.

        Raises:
            UserError: the template objects (to the order of the roles, say), is broken, or would run without end; the
                messages are none.
        """
        given = _checked({**variables, "messages": messages, "tools": tools, "documents": variables.get("documents")})
        return self._render(given, add_generation_prompt)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The conversation as ids: control tokens where the template writes them, and nowhere else.

        What the tokenizer's configuration puts before a text stands there once, whether or not the template writes it.

        Raises: UserError, as for `render`, and where a message can't be told apart from the template.
        """
        given = _checked({**variables, "messages": messages, "tools": tools, "documents": variables.get("documents")})
        mark = _unused_mark(given)
        marked = {name: self._marked(value, mark) for name, value in given.items()}
        text = self._render(marked, add_generation_prompt)
        if marked != given and text.replace(mark, "") != self._render(given, add_generation_prompt):
            raise UserError(
                "a message holds text that is a control token of this model, and the chat template takes the message "
                "apart, so that the two can't be told apart: remove it from the message"
            )
        return self._tokenizer.encode_marked(text, mark, add_bos=True)

    @functools.cached_property
    def end_ids(self) -> frozenset[int]:
        """The control token that ends an answer, found by writing one down. None where the template has no such."""
        conversation = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self.render(conversation, add_generation_prompt=False)
        except UserError:
            return frozenset()
        ids = self._tokenizer.encode(text[text.rfind(_PROBE) + len(_PROBE) :], parse_special=True)
        special = [token_id for token_id in ids if token_id in self._tokenizer.special_ids]
        return frozenset(special[:1] if _PROBE in text else [])

    # ---- inside

    def _render(self, given: Mapping[str, Any], add_generation_prompt: bool) -> str:
        name = "tool_use" if given.get("tools") and "tool_use" in self.sources else "default"
        source = self.sources.get(name)
        if source is None:
            raise UserError(f"the model's chat templates are {', '.join(self.sources)}; none is the default one")
        variables = {**self._tokenizer.named_tokens, **given, "add_generation_prompt": add_generation_prompt}
        try:
            return render(_compiled(source), sum(map(len, _texts(given))), variables)
        except TemplateRefusal as error:
            raise UserError(f"the chat template refuses this conversation: {_line(error)}") from None
        except UserError as error:
            raise UserError(f"the chat template is broken: {_line(error)}") from None

    def _marked(self, value: Any, mark: str) -> Any:
        """The same, with a mark in every control token, or in what could become one beside its neighbour."""
        if isinstance(value, str):
            return self._marked_text(value, mark)
        if isinstance(value, dict):
            return {
                self._marked_text(key, mark): part if key == "role" else self._marked(part, mark)
                for key, part in value.items()
            }
        return [self._marked(part, mark) for part in value] if isinstance(value, list) else value

    def _marked_text(self, text: str, mark: str) -> str:
        tokens, first, beginnings, endings = self._control_tokens
        sizes = {len(token) for token in tokens}
        longest = max(sizes, default=0)
        starts = [match.start() for match in first.finditer(text)]
        places = {start + 1 for start in starts if any(text[start : start + n] in tokens for n in sizes)}
        if any(text[-n:] in beginnings for n in range(1, longest)):
            places.add(len(text))
        if any(text[:n] in endings for n in range(1, longest)):
            places.add(0)
        cuts = [0, *sorted(places), len(text)]
        return mark.join(text[start:end] for start, end in itertools.pairwise(cuts)) if places else text

    @functools.cached_property
    def _control_tokens(self) -> tuple[set[str], re.Pattern[str], set[str], set[str]]:
        """All of them, their first characters, what they begin with and what they end with."""
        names = [self._tokenizer.token_bytes(i).decode(errors="replace") for i in self._tokenizer.special_ids]
        tokens = {name for name in names if not name.isspace() and len(name) > 1}
        beginnings = {token[:n] for token in tokens for n in range(1, len(token))}
        endings = {token[-n:] for token in tokens for n in range(1, len(token))}
        first = re.compile("|".join(re.escape(character) for character in {token[0] for token in tokens}) or "(?!)")
        return tokens, first, beginnings, endings


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    functions = {"raise_exception": raise_exception, "strftime_now": _strftime_now}
    return compile_template(source, functions, {"tojson": _tojson})


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja's own would write < as \\u003c."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data, as JSON has it: a template must not get hold of anything that does something."""
    messages = given["messages"]
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise UserError("a conversation must be a list of messages, each with a role and a content")
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise UserError(
                f"message {number} has the role {role!r}: a role is a word, as in "
                "{'role': 'user', 'content': 'Hello'}"
            )
    try:
        plain: dict[str, Any] = {name: _plain(value) for name, value in given.items()}
    except RecursionError:
        raise UserError("the messages are nested too deeply") from None
    # Templates ask whether a key is there, and would write None.
    absent = [{key: value for key, value in message.items() if value is not None} for message in plain["messages"]]
    return {**plain, "messages": absent}


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    raise UserError(f"a message holds {value!r:.60}, a {type(value).__name__}: it must be what JSON can say")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(part)


def _unused_mark(given: Mapping[str, Any]) -> str:
    everything = "".join(_texts(dict(given)))
    mark = next((mark for mark in _MARKS if mark not in everything), None)
    if mark is None:
        raise UserError("the messages hold every code point that is no character (U+FDD0 …): leave them out")
    return mark


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
