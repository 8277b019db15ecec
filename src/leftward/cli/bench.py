"""`leftward bench`: how fast this machine does what leftward does, against what the machine can do."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from leftward.cli.train import RecipeAndOverrides, recipe_values

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
