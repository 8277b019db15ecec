"""`leftward chat`: a conversation with a model in the terminal, or line by line through a pipe.

In a pipe, each line of stdin is a message and stdout holds the answers and nothing else. Remarks go to stderr.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from leftward import files
from leftward.cli import INTERRUPTED
from leftward.cli.generate import DraftOption, SpeculativeOption, check_guesses, guesses
from leftward.cli.sampling import WeightsOption, with_sampling_options
from leftward.errors import UserError
from leftward.formats.directory import check_model
from leftward.formats.kinds import Weights
from leftward.generation.settings import CHAT_MAX_TOKENS, Sampling

if TYPE_CHECKING:
    from leftward.language_model import LanguageModel

_HELP = "[/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer]"


@with_sampling_options(without=("n", "best_of", "logprobs", "prompt_logprobs"), max_tokens=CHAT_MAX_TOKENS)
def chat(
    model: Annotated[Path, typer.Argument(help="A run or model directory, a .gguf file, or owner/name on the hub.")],
    sampling: dict[str, Any],
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    template: Annotated[
        Path | None, typer.Option(help="A chat template (Jinja) in the place of the model's own.")
    ] = None,
    speculative: SpeculativeOption = None,
    draft: DraftOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object an answer, one a line.")] = False,
    dtype: WeightsOption = "stored",
) -> None:
    """Talk with a model that was trained for it.

    Example: leftward chat my-model --system "Answer in one sentence." --temperature 0.7
    """
    check_model(model)
    check_guesses(speculative, draft)
    template_text = None if template is None else files.read_text(template)

    from leftward.language_model import load  # torch takes a second or two, which no mistake above waits for
    from leftward.text.chat import ChatTemplate

    language_model = load(model, dtype=cast(Weights, dtype))
    if template_text is not None:
        language_model.chat_template = ChatTemplate(template_text, language_model.tokenizer)
    _ = language_model.chat_template  # says at once where there is none
    history = [] if system is None else [{"role": "system", "content": system}]
    settled = language_model.sampling(sampling, max_tokens=CHAT_MAX_TOKENS)
    _converse(language_model, history, settled.seeded(), guesses(speculative, draft, dtype), as_json)


def _converse(
    model: LanguageModel, history: list[dict[str, str]], sampling: Sampling, how: dict[str, Any], as_json: bool
) -> None:
    on_a_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    fixed, turn = len(history), 0
    if on_a_terminal:
        typer.echo(_HELP, err=True)
    for line in _typed() if on_a_terminal else _piped():
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                del history[fixed:]
                turn = 0
                typer.echo("[the conversation is forgotten]", err=True)
                continue
        history.append({"role": "user", "content": line})
        answer, reason = "", "interrupted"
        try:
            for event in model.chat_events(history, sampling.seeded(turn), **how):
                answer += event.text
                reason = event.finish_reason or reason
                if not as_json:
                    _write(event.text)
        except KeyboardInterrupt:
            if not on_a_terminal:
                raise SystemExit(INTERRUPTED) from None
        except UserError as error:
            if answer and not as_json:
                _write("\n")
            if not on_a_terminal:
                raise
            history.pop()
            typer.echo(f"[{error}]", err=True)
            continue
        _write((json.dumps({"content": answer, "finish_reason": reason}, ensure_ascii=False) if as_json else "") + "\n")
        history.append({"role": "assistant", "content": answer})
        turn += 1
        if reason == "context":
            typer.echo("[the context is full: /reset begins a new conversation]", err=True)


def _typed() -> Iterator[str]:
    """What a person types, until Ctrl-D, or Ctrl-C at the prompt."""
    with contextlib.suppress(ImportError):  # which gives `input` its history and editing; not everywhere
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            _write("\n")
            return
        yield line


def _piped() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise UserError(f"line {number} on stdin is not UTF-8 text (byte {error.start})") from None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
