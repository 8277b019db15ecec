"""`leftward bench`: how fast this machine does what leftward does, against what the machine can do."""

from __future__ import annotations

import json
from typing import Annotated, cast

import typer

from leftward.cli.sampling import WeightsOption
from leftward.cli.train import RecipeAndOverrides, recipe_values
from leftward.formats.kinds import Weights

app = typer.Typer(no_args_is_help=True, help="Measure speed on this machine, against what the machine can do.")


@app.command()
def train(
    recipe_and_overrides: RecipeAndOverrides = None,
    data: Annotated[list[str] | None, typer.Option(help="Text to train on. Default: random tokens.")] = None,
    steps: Annotated[int, typer.Option(help="Steps to measure, behind three to warm up.")] = 10,
    vocab_size: Annotated[int, typer.Option(help="Of the random tokens.")] = 50_304,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Measure a recipe's training steps: tokens/s, FLOP/s, their share of the machine's peak, memory.

    Example: leftward bench train gpt2-124m training.batch_size=4 training.seq_len=256
    """
    from leftward.training.measuring import measure

    found = measure(recipe_values(list(recipe_and_overrides or []), data, None), steps=steps, vocab_size=vocab_size)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    waited = found.data_seconds / found.step_seconds
    typer.echo(
        f"{found.parameters:,} parameters, {found.tokens_per_step:,} tokens a step, {found.dtype} on {found.device}, "
        f"{found.threads} threads, {found.kernels} kernels\n"
        f"{found.tokens_per_second:,.0f} tokens/s: {found.step_seconds:.3f} s a step (median of {found.steps}), "
        f"{waited:.1%} of it waiting for data\n"
        f"{found.flops_per_second / 1e9:,.0f} GFLOP/s, {found.mfu:.0%} of the {found.peak_flops / 1e9:,.0f} that a "
        f"product of 2048 x 2048 matrices reaches here\n"
        f"{found.memory_bytes / 1e9:.2f} GB of memory at most"
    )


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A model directory, a .gguf file, or owner/name on the hub.")],
    dtype: WeightsOption = "stored",
    vs: Annotated[list[str] | None, typer.Option(help="Also measure transformers, llama.cpp. May repeat.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions, of which the medians are told.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Measure how fast a model reads and writes: tokens/s, the share of what memory allows, time to the first token.

    Example: leftward bench generate model.gguf --vs transformers
    """
    import dataclasses

    from leftward.speed import ROWS, measure

    found = measure(model, dtype=cast(Weights, dtype), rivals=vs or (), repeats=repeats)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found) | {"decode_limit": found.decode_limit}))
        return
    ours = found.speeds[0]
    typer.echo(f"{found.model}, {found.threads} threads; medians of {repeats}, in turns")
    for speed in found.speeds:
        at_once = ""
        if speed.together is not None:
            at_once = (
                f", {speed.together:,.0f} with {ROWS} sequences at once ({speed.together / speed.decode:.1f} times one)"
            )
        typer.echo(
            f"{speed.name} ({speed.path}): {speed.decode:,.1f} tokens/s written, {speed.prefill:,.0f} read{at_once}"
        )
    for rival in found.speeds[1:]:
        at_once = ""
        if ours.together is not None and rival.together is not None:
            at_once = f", {ours.together / rival.together:.2f} times at once"
        typer.echo(
            f"leftward writes {ours.decode / rival.decode:.2f} times as fast as {rival.name}, reads "
            f"{ours.prefill / rival.prefill:.2f} times as fast{at_once}"
        )
    typer.echo(
        f"{found.bytes_per_token / 1e6:,.0f} MB of weights a token, read at {found.bandwidth / 1e9:.1f} GB/s at most: "
        f"{found.decode_limit:,.0f} tokens/s are the limit, {ours.decode / found.decode_limit:.0%} of it are reached\n"
        f"first token after {found.first_token_seconds:.2f} s, from the start of the process\n"
        f"written: {found.lengths.output} tokens behind {found.lengths.prompt}, greedily; read: "
        f"{found.lengths.long_prompt} tokens"
    )
