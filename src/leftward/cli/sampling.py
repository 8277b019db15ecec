"""The options of sampling, for every command that generates: one list, one place that checks them."""

from __future__ import annotations

import copy
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from leftward import files
from leftward.errors import UserError
from leftward.generation.settings import Sampling

_DEFAULTS = Sampling()


WeightsOption = Annotated[
    str,
    typer.Option(
        metavar="stored|fp32|bf16|q8|q4",
        help="Of the weights. stored: a .gguf file's 4 and 8 bits as they are, fp32 where there are none.",
    ),
]
"""What verbs that load a model to write with take it as: formats.kinds.Weights."""


def _options(
    max_tokens: Annotated[int | None, typer.Option(help="New tokens at most.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="1: the model's own distribution; lower is safer; 0: greedy.")
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the most likely token; same as temperature 0.")
    ] = False,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens; 0: all.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Only the most likely tokens that together have this probability; 1: all.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Only tokens at least this likely, as a share of the most likely one; 0: all.")
    ] = None,
    typical_p: Annotated[
        float | None, typer.Option(help="Only the least surprising tokens that together have this probability; 1: all.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens of prompt and output become less likely.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Above 0: tokens that are in the output become less likely.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Above 0: the more often a token is in the output, the less likely it becomes.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=NUMBER", help="Add this to a token's logit; -inf: never that token. Repeatable."),
    ] = None,
    bad_words: Annotated[
        list[str] | None, typer.Option("--bad-word", help="A text that the output must not have. Repeatable.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text. Absent: drawn and shown.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")] = None,
    stop_ids: Annotated[list[int] | None, typer.Option("--stop-id", help="End at this token. Repeatable.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Nothing ends the output before so many tokens.")] = None,
    n: Annotated[int | None, typer.Option("-n", "--samples", help="How many continuations.")] = None,
    best_of: Annotated[
        int | None, typer.Option(help="Make so many and show the n likeliest, by log-probability per token.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: each token's log-probability, and so many of the likeliest ones'.")
    ] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same of the prompt's tokens.")] = None,
    json_schema: Annotated[Path | None, typer.Option(help="A file: the output is JSON that follows it.")] = None,
    regex: Annotated[str | None, typer.Option(help="The whole output matches it.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The output is this text. Repeatable: or another.")] = None,
    grammar: Annotated[Path | None, typer.Option(help="A file, Lark or GBNF: the output follows this grammar.")] = None,
) -> dict[str, Any]:
    """What was asked for. Raises: UserError, where it can't be, whatever the model."""
    asked = {
        "max_tokens": max_tokens,
        "temperature": 0.0 if greedy else temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": dict(map(_bias, logit_bias)) if logit_bias else None,
        "bad_words": bad_words or None,
        "seed": seed,
        "stop": tuple(stop) if stop else None,
        "stop_ids": stop_ids or None,
        "min_tokens": min_tokens,
        "n": n,
        "best_of": best_of,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "json_schema": None if json_schema is None else files.read_text(json_schema),
        "regex": regex,
        "choice": tuple(choice) if choice else None,
        "grammar": None if grammar is None else files.read_text(grammar),
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    Sampling.of(asked)
    return asked


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise UserError(f"logit-bias is {text!r}: it must be an id and a number, as 50256=-2.5") from None


def _with_default(option: inspect.Parameter, defaults: Mapping[str, Any]) -> inspect.Parameter:
    """The option, whose help says what it is where neither the user nor the model says."""
    default = defaults.get(option.name, getattr(_DEFAULTS, option.name, None))
    if option.default is None and isinstance(default, int | float):
        kind, described = typing.get_args(option.annotation)
        described = copy.copy(described)
        described.help = f"{described.help} [default: the model's, or {default}]"
        option = option.replace(annotation=Annotated[kind, described])
    return option.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def with_sampling_options(
    *, without: Collection[str] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put the options into the place of a command's parameter `sampling`, which gets those that were given. `without`
    are those that the command has no use for, `defaults` what it has where `Sampling` has others."""
    options = [
        _with_default(parameter, defaults)
        for parameter in inspect.signature(_options, eval_str=True).parameters.values()
        if parameter.name not in without
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())
        place = [parameter.name for parameter in own].index("sampling")

        @functools.wraps(command)
        def with_options(**arguments: Any) -> None:
            settings = {option.name: arguments.pop(option.name) for option in options}
            command(**arguments, sampling=_options(**settings))

        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        parameters[place : place + 1] = options
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_options

    return decorate
