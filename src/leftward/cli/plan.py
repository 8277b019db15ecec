"""`leftward plan`: what a model costs before it exists. Without torch for a preset or settings."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, cast

import typer

from leftward.errors import UserError

if TYPE_CHECKING:
    from leftward.planner import Plan
    from leftward.scaling_laws import ComputeOptimal

Rows = Sequence[Sequence[str]]


def plan(
    model_and_settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [key=value]...",
            help="A preset (--list), or a run or model directory, and fields of the architecture laid over it; or the "
            "fields alone.",
            show_default=False,
        ),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence. Default: the model's max_seq_len.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences at a time, in training and in decoding.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the weights: bf16, fp32, fp16, fp8, int8, q8_0, q4_0 …")] = "bf16",
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of the KV cache. Default: as the weights; bf16 where those are quantised.")
    ] = None,
    optimizer: Annotated[str, typer.Option(metavar="muon|adamw", help="What training remembers.")] = "muon",
    tokens: Annotated[float | None, typer.Option(help="Train on so many: FLOPs, time, expected loss.")] = None,
    flops: Annotated[float | None, typer.Option(help="The best size and tokens for this budget.")] = None,
    device: Annotated[
        str | None, typer.Option(help="A device whose figures are known: a100-80gb, h100-sxm, rtx-4090 …")
    ] = None,
    peak_flops: Annotated[float | None, typer.Option(help="FLOP/s of one device in this dtype.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Bytes/s of one device's memory.")] = None,
    memory: Annotated[float | None, typer.Option(help="Bytes of one device.")] = None,
    devices: Annotated[int | None, typer.Option(help="How many.")] = None,
    mfu: Annotated[float | None, typer.Option(help="The share of the peak that training reaches.")] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(help="A measured training speed, to get the MFU of.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the presets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Parameters, FLOPs, memory, KV cache and time of a model, by arithmetic.

    Examples: leftward plan llama3-8b --seq-len 8192 --device h100-sxm; leftward plan gpt2 n_layers=24; leftward plan
    --flops 1e21
    """
    from leftward import planner, scaling_laws
    from leftward.config import Config
    from leftward.overrides import override
    from leftward.planning import settings_of

    if show_list:
        _print_presets(as_json)
        return
    arguments = list(model_and_settings or [])
    model = arguments.pop(0) if arguments and "=" not in arguments[0] else None
    if model is None and not arguments:
        if flops is None:
            raise UserError("nothing to plan: give a preset (`leftward plan --list`), a model directory or key=value")
        unused = {"tokens": tokens, "seq-len": seq_len, "device": device, "peak-flops": peak_flops, "devices": devices}
        unused |= {"bandwidth": bandwidth, "memory": memory, "mfu": mfu, "tokens-per-second": tokens_per_second}
        if asked := [name for name, value in unused.items() if value is not None]:
            raise UserError(f"--{asked[0]} needs a model: give a preset, a model directory or key=value beside --flops")
        best = scaling_laws.compute_optimal(flops)
        typer.echo(json.dumps(dataclasses.asdict(best)) if as_json else "\n".join(_compute_optimal(best)))
        return
    hardware = {
        "device": device,
        "peak_flops": peak_flops,
        "bandwidth": bandwidth,
        "memory": memory,
        "n_devices": devices,
        "mfu": mfu,
        "tokens_per_second": tokens_per_second,
    }
    result = planner.plan(
        Config.from_dict(override({} if model is None else settings_of(model), arguments)),
        name=model,
        seq_len=seq_len,
        batch_size=batch_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        optimizer=cast("planner.OptimizerName", optimizer),
        tokens=tokens,
        flops=flops,
        **{key: value for key, value in hardware.items() if value is not None},
    )
    typer.echo(json.dumps(result.to_dict()) if as_json else "\n".join(_report(result)))


def _print_presets(as_json: bool) -> None:
    from leftward.planner import count_parameters
    from leftward.presets import PRESETS, preset

    totals = {name: count_parameters(preset(name)).total for name in PRESETS}
    if as_json:
        typer.echo(json.dumps(totals))
    else:
        typer.echo("\n".join(_aligned([(name, f"{total:,}") for name, total in totals.items()])))


def _report(plan: Plan) -> Iterator[str]:
    """The plan in sections of at most 80 columns."""
    config, parameters = plan.config, plan.parameters
    yield f"{plan.name or 'this model'}: {parameters.total:,} parameters"
    kv = f" ({config.n_kv_heads} for keys and values)" if config.n_kv_heads != config.n_heads else ""
    yield f"  {config.n_layers} layers × {config.d_model} wide, {config.n_heads} heads of {config.head_dim}{kv},"
    experts = f"{config.n_experts} experts of {config.d_ff}, {config.n_experts_per_token} a token"
    feed_forward = experts if config.n_experts else f"feed-forward {config.d_ff}"
    yield f"  {feed_forward}, context {config.max_seq_len:,}, vocabulary {config.vocab_size:,}"
    yield from _parameters(plan)
    yield from _flops(plan)
    yield from _memory(plan)
    if plan.limits is not None:
        yield from _limits(plan)
    if plan.run is not None:
        yield from _run(plan)
    if plan.compute_optimal is not None:
        yield ""
        yield from _compute_optimal(plan.compute_optimal)


def _parameters(plan: Plan) -> Iterator[str]:
    parameters = plan.parameters
    tied = " (and head)" if plan.config.tie_embeddings else ""
    rows = [
        (f"token embedding{tied}", parameters.token_embedding),
        ("position embedding", parameters.position_embedding),
        ("attention", parameters.attention),
        ("feed-forward", parameters.feed_forward),
        ("router", parameters.router),
        ("norms", parameters.norms),
        ("head", parameters.head),
        ("total", parameters.total),
    ]
    shares = [(name, f"{count:,}", f"{count / parameters.total:.1%}") for name, count in rows if count]
    shares.append(("without embeddings and head", f"{parameters.non_embedding:,}", ""))
    if parameters.active != parameters.total:
        shares.append(("active a token", f"{parameters.active:,}", f"{parameters.active / parameters.total:.1%}"))
    yield from _section("Parameters", shares)


def _flops(plan: Plan) -> Iterator[str]:
    flops = plan.flops
    rows = [("", "forward", "training (× 3)")]
    for name, count in (
        ("attention, projections", flops.attention_projections),
        ("attention, scores", flops.attention_full),
        ("feed-forward", flops.feed_forward),
        ("router", flops.router),
        ("head", flops.head),
        ("total", flops.forward_full),
        ("total, what the mask hides left out", flops.forward_causal),
        ("a token", flops.forward_per_token),
    ):
        if count:
            rows.append((name, _flop(count), _flop(3 * count)))
    yield from _section(f"FLOPs of a sequence of {flops.seq_len:,} tokens (a multiply-add is 2)", rows)


def _memory(plan: Plan) -> Iterator[str]:
    training, kv = plan.training, plan.kv_cache
    sequences = f"{plan.batch_size:,} × {plan.seq_len:,} tokens"
    if training is not None:
        rows = [
            ("weights, fp32", training.masters),
            ("weights, rounded to bf16", training.copies),
            ("gradients", training.gradients),
            (f"optimizer state ({training.optimizer})", training.optimizer_state),
            ("activations", training.activations),
            ("logits", training.logits),
            ("total", training.total),
        ]
        shown = [(name, in_bytes(count)) for name, count in rows if count]
        yield from _section(f"Memory to train in {training.dtype}, {sequences} at a time", shown)
    held = [
        (f"weights, {plan.dtype}", in_bytes(plan.inference.weights)),
        (f"KV cache, {kv.dtype}", in_bytes(plan.inference.kv_cache)),
        ("total", in_bytes(plan.inference.total)),
        ("KV cache of a token", f"{kv.bytes_per_token:,} B"),
    ]
    if kv.bytes_per_token_global != kv.bytes_per_token:
        held.append(("KV cache of a token, windows full", f"{kv.bytes_per_token_global:,} B"))
    yield from _section(f"Memory to run, {sequences}", held)


def _limits(plan: Plan) -> Iterator[str]:
    limits = plan.limits
    assert limits is not None
    on, rows = limits.hardware, []
    if limits.decode_tokens_per_second is not None:
        rows.append(("read at each decoding step", in_bytes(limits.decode_bytes)))
        rows.append((f"decoding at {plan.seq_len:,} tokens", f"{limits.decode_tokens_per_second:,.1f} tokens/s"))
    if limits.prefill_seconds is not None:
        rows.append((f"prefill of {plan.batch_size:,} × {plan.seq_len:,}", _duration(limits.prefill_seconds)))
    if limits.training_tokens_per_second is not None:
        measured = on.tokens_per_second is not None
        how = "as measured" if measured else "at the peak" if limits.mfu is None else f"at an MFU of {limits.mfu:.1%}"
        rows.append((f"training, {how}", f"{limits.training_tokens_per_second:,.0f} tokens/s"))
        if measured and limits.mfu is not None:
            rows.append(("MFU", f"{limits.mfu:.1%}"))
    for what, needed in (("run", limits.devices_to_run), ("train", limits.devices_to_train)):
        if needed is not None:
            rows.append((f"devices whose memory suffices to {what}", f"{needed:,}"))
    figures = [f"{on.peak_flops:.4g} FLOP/s"] if on.peak_flops else []
    figures += [f"{on.bandwidth:.4g} bytes/s"] if on.bandwidth else []
    title = f"At most, on {on.n_devices:,} × {on.device or 'the device'}"
    yield from _section(f"{title} ({', '.join(figures) or 'figures unknown'})", rows)


def _run(plan: Plan) -> Iterator[str]:
    run = plan.run
    assert run is not None
    rows = [
        ("tokens a parameter", f"{run.tokens_per_parameter:.4g}"),
        ("FLOPs", f"{run.flops:.4g}"),
        ("6 × parameters × tokens", f"{run.six_nd:.4g}"),
    ]
    if run.seconds is not None:
        rows.append(("time at that speed", _duration(run.seconds)))
    rows += [(f"loss, {law}", f"{loss:.3f}") for law, loss in run.losses.items()]
    yield from _section(f"Training on {run.tokens:.4g} tokens", rows)
    if run.losses:
        yield "  Losses are nats a token of the laws' own text: no promise for another."


def _compute_optimal(best: ComputeOptimal) -> Iterator[str]:
    yield f"Compute-optimal for {best.flops:.4g} FLOPs = 6 × parameters × tokens"
    rows = [("law", "parameters", "tokens", "tokens/param.", "loss")]

    def row(title: str, parameters: float, tokens: float, ratio: float, loss: float) -> tuple[str, str, str, str, str]:
        return title, f"{parameters:.2e}", f"{tokens:.2e}", f"{ratio:.3g}", f"{loss:.3f}"

    for optimum in best.optima:
        rows.append(row(optimum.law, optimum.parameters, optimum.tokens, optimum.tokens_per_parameter, optimum.loss))
        if band := optimum.band:
            bounds = zip(band.parameters, band.tokens, band.tokens_per_parameter, band.loss, strict=True)
            rows += [row(title, *bound) for title, bound in zip(("  80% band, from", "  to"), bounds, strict=True)]
    yield from (f"  {line}" for line in _aligned(rows))
    for note in best.notes:
        yield from textwrap.wrap(note, 78, initial_indent="  ", subsequent_indent="  ")


def _section(title: str, rows: Rows) -> Iterator[str]:
    yield ""
    yield title
    yield from (f"  {line}" for line in _aligned(rows))


def _aligned(rows: Rows) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def in_bytes(count: int) -> str:
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count:,} B"


def _flop(count: float) -> str:
    for unit, name in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count:,.0f}"


def _duration(seconds: float) -> str:
    for unit, name in ((365.25 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds * 1e6:.1f} µs"
