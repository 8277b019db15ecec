"""The options of sampling, for every command that generates: one list, one place that checks them."""

from __future__ import annotations

import copy
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from leftward.generation.settings import Sampling

_DEFAULTS = Sampling()


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
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens of prompt and output become less likely.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text. Absent: drawn and shown.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")] = None,
) -> dict[str, Any]:
    """What was asked for. Raises: UserError, where it can't be, whatever the model."""
    asked = {
        "max_tokens": max_tokens,
        "temperature": 0.0 if greedy else temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": tuple(stop) if stop else None,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    Sampling.of(asked)
    return asked


def _with_default(option: inspect.Parameter, defaults: Mapping[str, Any]) -> inspect.Parameter:
    """The option, whose help says what it is where neither the user nor the model says."""
    default = defaults.get(option.name, getattr(_DEFAULTS, option.name, None))
    if option.default is None and isinstance(default, int | float):
        kind, described = typing.get_args(option.annotation)
        described = copy.copy(described)
        described.help = f"{described.help} [default: the model's, or {default}]"
        option = option.replace(annotation=Annotated[kind, described])
    return option.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def with_sampling_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put the options into the place of a command's parameter `sampling`, which gets those that were given. `defaults`
    are what the command has where `Sampling` has others."""
    options = [
        _with_default(parameter, defaults)
        for parameter in inspect.signature(_options, eval_str=True).parameters.values()
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
