"""`leftward convert`: a model from any format that is read here to one that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leftward.errors import UserError, nearest
from leftward.formats.directory import check_model

_FORMATS = ("hf", "gguf")
_DTYPES = ("fp32", "bf16", "fp16")


def convert(
    model: Annotated[
        Path,
        typer.Argument(help="A run or model directory, a .gguf file, a .bin of llama2.c, or owner/name on the hub."),
    ],
    out: Annotated[Path, typer.Argument(help="A directory (hf) or a file (gguf), which must not exist yet.")],
    to: Annotated[str, typer.Option(metavar="hf|gguf", help="For transformers and vLLM, or for llama.cpp.")] = "hf",
    dtype: Annotated[
        str | None, typer.Option(metavar="fp32|bf16|fp16", help="Of the weights that are written. [default: MODEL's]")
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(help="gguf only: q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k.")
    ] = None,
    max_shard_gb: Annotated[float, typer.Option(help="hf only: weights beyond it go into several files.")] = 5.0,
) -> None:
    """Write a model in another format.

    Example: leftward convert runs/my-run my-run.gguf --to gguf --quantize q8_0
    """
    for name, value, valid in (("to", to, _FORMATS), ("dtype", dtype, _DTYPES)):
        if value is not None and value not in valid:
            raise UserError(f"{name} is {value!r}: {nearest(value, valid)}")
    if quantize is not None and to != "gguf":
        raise UserError("--quantize is for --to gguf: Hugging Face classes take their weights whole")
    if not max_shard_gb > 0:
        raise UserError(f"max-shard-gb is {max_shard_gb}: it must be above 0")
    check_model(model)
    if out.exists():
        raise UserError(f"{out} exists: give another place, or remove it")

    from leftward.formats.converting import write_gguf_model, write_hf_model  # torch takes a second or two
    from leftward.formats.loading import open_model

    loaded = open_model(model, dtype=None)
    if to == "hf":
        write_hf_model(out, loaded, dtype, max_shard_bytes=int(max_shard_gb * 1e9))
    else:
        write_gguf_model(out, loaded, dtype, quantize, name=model.stem)
    typer.echo(f"{out}: {loaded.decoder.n_parameters:,} parameters")
