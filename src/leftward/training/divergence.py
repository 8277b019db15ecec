"""What is said and kept of a step whose loss or gradient is no number: which batch it was, whole, and its text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from leftward import files
from leftward.data.batches import IGNORED, Batch
from leftward.errors import UserError
from leftward.formats.tensors import write_tensors
from leftward.model.decoder import Decoder
from leftward.text.tokenizer import Tokenizer
from leftward.training.loss import head_loss, tensors
from leftward.training.progress import Diverged

_HEAD_TOKENS, _HEAD_CHARACTERS = 200, 300  # of a row's text, in the file
_SHOWN_ROWS, _SHOWN_CHARACTERS = 5, 60  # in the message


def of_step(
    directory: Path,
    decoder: Decoder,
    tokenizer: Tokenizer,
    batch: Batch,
    *,
    step: int,
    position: int,
    loss: float,
    part_losses: Sequence[float],
    micro: int,
    grad_norm: float,
    rank: int | None,
) -> Diverged:
    """The end of a run at a step that made no numbers, with its batch kept in the run directory.

    Args:
        decoder: with the weights that the step began with.
        position: how many rows of the training order came before the batch.
        loss: of the step.
        part_losses: what each `micro` rows of the batch add to it.
        grad_norm: of the whole step.
        rank: whose part of the step's batch this is, where several train. None: it is all of it.
    """
    # Weights that are spread over ranks give no row's loss by itself.
    of_rows = row_losses(decoder, batch) if rank is None else []
    suspects = _suspects(of_rows, part_losses, micro, len(batch.inputs))
    heads = [tokenizer.decode(row[:_HEAD_TOKENS].tolist())[:_HEAD_CHARACTERS] for row in batch.inputs]
    named = {"ids": batch.inputs, "targets": batch.targets, "documents": batch.documents}
    kept = {name: torch.from_numpy(part) for name, part in named.items() if part is not None}
    kept |= {"losses": torch.tensor(of_rows)} if of_rows else {}
    told = [{"row": row, "text": head} for row, head in enumerate(heads)]
    description = {
        "step": step,
        "loss": _plain(loss),
        "grad_norm": _plain(grad_norm),
        "position": position,
        "suspects": suspects,
        "rows": [row | {"loss": _plain(loss)} for row, loss in zip(told, of_rows, strict=True)] if of_rows else told,
    }
    path = directory / f"bad-batch-{step:08d}{'' if rank is None else f'-rank-{rank}'}.safetensors"
    try:
        write_tensors(path, kept)
        files.write_json(path.with_suffix(".json"), description)
        what = "Its batch" if rank is None else f"The part of rank {rank}"
        where = (
            f"{what} is kept: {path.with_suffix('.json')} has its text, and safetensors.torch.load_file({str(path)!r}) "
            f"gives {', '.join(kept)}, each by row"
        )
    except UserError as error:
        where = f"Its batch could not be kept ({error})"
    return Diverged(
        f"the loss became {loss} and its gradient's norm {grad_norm} at step {step}, {_place(suspects, heads)}; what "
        f"{directory} holds was saved before. {where}. Lower optimizer.lr and optimizer.adamw_lr, or lengthen "
        "schedule.warmup_steps"
    )


def row_losses(decoder: Decoder, batch: Batch) -> list[float]:
    """The mean loss of each row by itself, in nats a token and without dropout; 0 where a row has no target."""
    was_training = decoder.training
    decoder.eval()
    losses = []
    with torch.inference_mode():
        inputs, targets, documents = tensors(batch, decoder.device)
        for row in range(len(inputs)):
            only = slice(row, row + 1)
            hidden = decoder.hidden(inputs[only], documents=None if documents is None else documents[only])
            n_targets = max(1, int((targets[only] != IGNORED).sum()))
            losses.append(head_loss(decoder, hidden, targets[only], n_targets).item())
    decoder.train(was_training)
    return losses


def _suspects(of_rows: Sequence[float], of_parts: Sequence[float], micro: int, n_rows: int) -> list[int]:
    """The rows whose own loss is no number; where none is, those of the micro-batches whose loss was none."""
    rows = [row for row, loss in enumerate(of_rows) if not math.isfinite(loss)]
    return rows or [row for row in range(n_rows) if not math.isfinite(of_parts[row // micro])]


def _place(suspects: Sequence[int], heads: Sequence[str]) -> str:
    """Rows count from 0, as in the files."""
    if not suspects:
        return f"with a finite loss in each of {len(heads)} rows"
    rows = ", ".join(map(str, suspects[:_SHOWN_ROWS])) + (" …" if len(suspects) > _SHOWN_ROWS else "")
    begins = " ".join(heads[suspects[0]][:_SHOWN_CHARACTERS].split())
    return f"in row {rows} of 0 to {len(heads) - 1}, which begins {begins!r}"


def _plain(number: float) -> float | str:
    """JSON has no infinite numbers."""
    return number if math.isfinite(number) else str(number)
