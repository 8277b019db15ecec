"""The options of sampling, for every command that generates: one list, one place that makes a `Sampling` of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from leftward.generation.settings import Sampling

_DEFAULTS = Sampling()


def _options(
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = _DEFAULTS.max_tokens,
    temperature: Annotated[
        float, typer.Option(help="1: the model's own distribution; lower is safer; 0: greedy.")
    ] = _DEFAULTS.temperature,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the most likely token; same as temperature 0.")
    ] = False,
    top_k: Annotated[int, typer.Option(help="Only the k most likely tokens; 0: all.")] = _DEFAULTS.top_k,
    top_p: Annotated[
        float, typer.Option(help="Only the most likely tokens that together have this probability; 1: all.")
    ] = _DEFAULTS.top_p,
    min_p: Annotated[
        float, typer.Option(help="Only tokens at least this likely, as a share of the most likely one; 0: all.")
    ] = _DEFAULTS.min_p,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of prompt and output become less likely.")
    ] = _DEFAULTS.repetition_penalty,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text. Absent: drawn and shown.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")] = None,
) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )


def with_sampling_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put the options into the place of a command's parameter `sampling`, with other `defaults` where they differ."""
    options = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, parameter.default))
        for name, parameter in inspect.signature(_options, eval_str=True).parameters.items()
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
