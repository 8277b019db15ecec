"""`leftward report`: what `explore` shows of a text, as one HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from leftward.cli.explore import IDLE, PROMPT
from leftward.cli.sampling import WeightsOption, with_sampling_options
from leftward.errors import UserError
from leftward.formats.directory import check_model
from leftward.formats.kinds import Weights


@with_sampling_options(without=IDLE, max_tokens=20)
def report(
    model: Annotated[Path, typer.Argument(help="A run or model directory, a .gguf file, or owner/name on the hub.")],
    sampling: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="The text to look at.", show_default=PROMPT)] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file.")] = Path("report.html"),
    max_mb: Annotated[float, typer.Option(help="Its size at most; what matters less is left out.")] = 20.0,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", help="Write the numbers too, as .lwtrace, for Python.")
    ] = None,
    dtype: WeightsOption = "stored",
) -> None:
    """Write a page that shows what happens inside a model as it reads and writes a text.

    Example: leftward report runs/my-run "Once upon a time" -o page.html
    """
    if not max_mb > 0:
        raise UserError(f"max-mb is {max_mb:g}: it must be above 0")
    check_model(model)

    from leftward.inspection.subject import opening  # torch takes a second or two
    from leftward.inspection.trace import trace
    from leftward.language_model import load

    language_model = load(model, dtype=cast(Weights, dtype))
    directory = model if (model / "recipe.yaml").is_file() else None
    begins = opening(language_model, PROMPT, language_model.config.max_seq_len) if prompt is None else prompt
    made = trace(language_model, begins, name=model.name, directory=directory, **{"max_tokens": 20, **sampling})
    made.report(output, max_mb)
    if trace_file is not None:
        made.save(trace_file)
    typer.echo(f"[{output}: {output.stat().st_size / 1e6:.1f} MB]", err=True)
