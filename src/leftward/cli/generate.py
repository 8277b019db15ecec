"""`leftward generate`: a model directory and a prompt to text on stdout.

In a pipe, stdout holds the new text and nothing else; on a terminal the prompt stands before it. Remarks go to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from leftward.cli import INTERRUPTED
from leftward.cli.prompts import read_prompts, read_stdin
from leftward.cli.sampling import WeightsOption, with_sampling_options
from leftward.errors import UserError, nearest
from leftward.formats.directory import check_model
from leftward.formats.kinds import Weights
from leftward.generation.settings import CONSTRAINTS

if TYPE_CHECKING:
    from leftward.generation.completions import Completion
    from leftward.generation.requests import Event
    from leftward.generation.sampling import TokenLogprobs
    from leftward.text.tokenizer import Tokenizer


SpeculativeOption = Annotated[
    str | None,
    typer.Option(metavar="prompt-lookup", help="Guess what stood in the text before: faster where it repeats."),
]
DraftOption = Annotated[Path | None, typer.Option(help="A smaller model that guesses, with the same tokenizer.")]


@with_sampling_options()
def generate(
    model: Annotated[Path, typer.Argument(help="A run or model directory, a .gguf file, or owner/name on the hub.")],
    sampling: dict[str, Any],
    prompt: Annotated[
        str | None, typer.Argument(help="What to continue. Absent or -: read from stdin. Empty: a new text.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Continue every line of it, many at once; of a .jsonl file every text, or object with a prompt. Gives "
            "JSON lines, in the same order.",
        ),
    ] = None,
    truncate: Annotated[
        str | None, typer.Option(metavar="left", help="left: drop the beginning of a prompt that is too long.")
    ] = None,
    speculative: SpeculativeOption = None,
    draft: DraftOption = None,
    at_context: Annotated[
        str | None, typer.Option(metavar="stop|roll", help="roll: write on behind the newer half of a full context.")
    ] = None,
    n_keep: Annotated[int | None, typer.Option(help="Of a context that rolls: so many first tokens stay.")] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="fp32|bf16|int8", help="Of keys and values. Default: as the weights; bf16 beside 4 or 8 bits."
        ),
    ] = None,
    num_beams: Annotated[
        int | None, typer.Option(help="Search with so many beams for what is likeliest as a whole; draw nothing.")
    ] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Of beams: above 0 long outputs gain.")] = None,
    early_stopping: Annotated[
        str | None, typer.Option(metavar="true|false|never", help="Of beams: when the search ends.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a sample, one a line.")] = False,
    dtype: WeightsOption = "stored",
) -> None:
    """Continue a prompt, token by token.

    Example: leftward generate runs/my-run "Once upon a time" --max-tokens 100 --seed 1
    """
    _check_choice("truncate", truncate, ["left"])
    _check_choice("early-stopping", early_stopping, ["true", "false", "never"])
    _check_choice("at-context", at_context, ["stop", "roll"])
    _check_choice("kv-dtype", kv_dtype, ["fp32", "bf16", "int8"])
    check_guesses(speculative, draft)
    of_memory: dict[str, Any] = {"at_context": at_context, "n_keep": n_keep, "kv_dtype": kv_dtype}
    of_memory = {name: value for name, value in of_memory.items() if value is not None}
    of_beams: dict[str, Any] = {
        "length_penalty": length_penalty,
        "early_stopping": {"true": True, "false": False}.get(early_stopping or "", early_stopping),
    }
    of_beams = {name: value for name, value in of_beams.items() if value is not None}
    if num_beams is None and of_beams:
        raise UserError(f"{' and '.join(of_beams)} are for beams: give --num-beams too")
    if num_beams is not None and (truncate or speculative or draft or of_memory):
        raise UserError(
            "--num-beams goes without --truncate, --speculative, --draft, --at-context, --n-keep and --kv-dtype"
        )
    if prompts is not None and prompt is not None:
        raise UserError("a prompt and --prompts are both given: put the prompt into the file")
    as_json = as_json or prompts is not None
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling and not as_json:
            raise UserError(f"--{name.replace('_', '-')} is shown with --json only: add it")
    check_model(model)
    if prompts is not None:
        records = read_prompts(prompts)
    else:
        if prompt is None or prompt == "-":  # without the newline that `echo` and editors add
            prompt = read_stdin("prompt").removesuffix("\n").removesuffix("\r")
        records = [{"prompt": prompt}]
    texts: list[str] = [record["prompt"] for record in records]

    from leftward.generation.completions import Completion, check_any
    from leftward.generation.decode import of_row  # torch takes a second or two, which no mistake above waits for
    from leftward.language_model import load

    language_model = load(model, dtype=cast(Weights, dtype))
    settled = language_model.sampling(sampling).seeded()
    how = {"truncate": truncate, **of_memory, **guesses(speculative, draft, dtype)}
    ends: list[Event | Completion] = []
    try:
        if num_beams is not None or as_json or settled.best_of is not None:  # a prompt is shown once all of it is there
            of_prompts: Iterable[list[Completion]]
            if num_beams is not None:
                found = language_model.beam_search(texts, num_beams=num_beams, **of_beams, **sampling)
                of_prompts = [found[i : i + settled.n] for i in range(0, len(found), settled.n)]
            else:
                of_prompts = language_model.completions(texts, **how, **(sampling | {"seed": settled.seed}))
            for record, completed in zip(records, of_prompts, strict=True):
                ends += completed
                if as_json:
                    _print_json(completed, record, language_model.tokenizer)
                    continue
                check_any(completed)
                _print_text(((i, each.text, True) for i, each in enumerate(completed)), record["prompt"], settled.n)
            for row, each in enumerate(ends):
                if isinstance(each, Completion) and each.error is not None:
                    if prompts is not None:
                        raise UserError(of_row(row // settled.n, len(records), each.error, "prompt"))
                    raise UserError(of_row(row, len(ends), each.error))
        else:
            events = _noting_ends(language_model.events(texts, settled, **how), ends)
            _print_text(events, texts[0], settled.n)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except KeyboardInterrupt:
        if not as_json:
            typer.echo("")
        raise SystemExit(INTERRUPTED) from None
    reasons = {end.finish_reason for end in ends}
    if "context" in reasons:
        context = language_model.config.max_seq_len
        typer.echo(f"[the context is full: prompt and output have {context} tokens, the model's most]", err=True)
    if any(getattr(settled, name) is not None for name in CONSTRAINTS) and reasons & {"length", "context"}:
        typer.echo("[the output was cut before it was complete: raise --max-tokens]", err=True)
    if n_guessed := sum(end.n_guessed for end in ends):
        typer.echo(f"[{n_guessed} tokens guessed, {sum(end.n_accepted for end in ends)} of them right]", err=True)
    if "seed" not in sampling and settled.temperature > 0 and not as_json and num_beams is None:
        typer.echo(f"[seed {settled.seed}]", err=True)


def check_guesses(speculative: str | None, draft: Path | None) -> None:
    """Raises: UserError."""
    _check_choice("speculative", speculative, ["prompt-lookup"])
    if speculative is not None and draft is not None:
        raise UserError("--speculative and --draft are both given: tokens are guessed in one way or the other")
    if draft is not None:
        check_model(draft)


def guesses(speculative: str | None, draft: Path | None, dtype: str) -> dict[str, Any]:
    """The same as arguments of a LanguageModel's methods."""
    from leftward.language_model import load

    return {
        "speculative": None if speculative is None else "prompt_lookup",
        "draft": None if draft is None else load(draft, dtype=cast(Weights, dtype)),
    }


def _check_choice(name: str, value: str | None, valid: Sequence[str]) -> None:
    if value is not None and value not in valid:
        raise UserError(f"{name} is {value!r}: {nearest(value, valid)}")


def _noting_ends(events: Iterator[Event], ends: list[Event | Completion]) -> Iterator[tuple[int, str, bool]]:
    """Of each event the sample, what may be shown now, and whether that was all."""
    for event in events:
        if event.finish_reason is not None:
            ends.append(event)
        yield event.row, event.text, event.finish_reason is not None


def _print_text(pieces: Iterable[tuple[int, str, bool]], prompt: str, samples: int) -> None:
    """Show the first unfinished sample as it grows, and the others, which grow beside it, when their turn comes."""
    lead = typer.style(prompt, bold=True) if sys.stdout.isatty() else ""
    waiting = [""] * samples
    finished = [False] * samples
    shown = -1

    def begin(sample: int) -> None:
        title = f"--- sample {sample + 1} of {samples} ---\n" if samples > 1 else ""
        _write(("\n" if sample and title else "") + title + lead + waiting[sample])

    try:
        for row, text, is_whole in pieces:
            if shown < 0:
                begin(shown := 0)
            if row == shown:
                _write(text)
            else:
                waiting[row] += text
            finished[row] = finished[row] or is_whole
            while finished[shown] and shown + 1 < samples:
                _write("\n")
                begin(shown := shown + 1)
    except UserError:  # what was written stands, and the error is a line of its own
        if shown >= 0:
            _write("\n")
        raise
    _write("\n")


_ANSWER = frozenset(["sample", "seed", "text", "tokens", "finish_reason", "error", "score"])
_ANSWER |= {"n_guessed", "n_accepted", "prompt_logprobs", "logprobs"}
"""Fields that are never what a record had."""


def _print_json(completed: Sequence[Completion], record: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """A line for each sample, in their order; what else stands in the prompt's record stays there."""
    own = {name: value for name, value in record.items() if name not in _ANSWER}
    for i, each in enumerate(completed):
        result: dict[str, Any] = {
            **own,
            "sample": i,
            "seed": each.seed,
            "text": each.text,
            "tokens": len(each.ids),
            "finish_reason": each.finish_reason,
        }
        if each.error is not None:
            result["error"] = each.error
        if each.score is not None:
            result["score"] = each.score
        if each.n_guessed:
            result |= {"n_guessed": each.n_guessed, "n_accepted": each.n_accepted}
        for name, ids, logprobs in (
            ("prompt_logprobs", each.prompt_ids[1:], each.prompt_logprobs),
            ("logprobs", each.ids, each.logprobs),
        ):
            if logprobs is not None:
                pairs = zip(ids, logprobs, strict=True)
                result[name] = [_of_token(token_id, found, tokenizer) for token_id, found in pairs]
        _write(json.dumps(result, ensure_ascii=False) + "\n")


def _of_token(token_id: int, found: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    """Log-probabilities under the model itself and, of an output, in the distribution that the token was drawn from."""

    def named(token_id: int, logprob: float | None) -> dict[str, Any]:
        token = tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
        return {"id": token_id, "token": token, "logprob": logprob}

    result = named(token_id, found.logprob) | {"top": [named(*of_token) for of_token in found.top]}
    if found.ruled_logprob is not None:
        result |= {
            "ruled_logprob": found.ruled_logprob,
            "ruled_top": [named(*of_token) for of_token in found.ruled_top],
        }
    return result


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
