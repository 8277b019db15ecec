"""`check`: the claims, tried one after the other on whatever somebody holds in hands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leftward.config import Config
from leftward.data.batches import Dataset
from leftward.errors import UserError
from leftward.formats.model_directory import load_model
from leftward.language_model import LanguageModel, load
from leftward.model.decoder import Decoder
from leftward.planning import path_of
from leftward.presets import preset
from leftward.proofs import equality, overlap, sight, storing, training
from leftward.proofs.report import Claim, Proof, Report, prove
from leftward.proofs.small import scaled_down
from leftward.proofs.subject import LossFunction, Subject, undisturbed
from leftward.runs import Run

_RUNS, _SOUND, _SAME = ("runs",), ("runs", "finite"), ("runs", "finite", "repeatable")
_LEFT = (*_SAME, "leftward, by change")
_ROWS, _CACHED = (*_LEFT, "alone = in a batch"), (*_LEFT, "cache = full")

# What is claimed, how it is tried, what it builds on, and what it means where it fails.
CLAIMS: list[Claim[Subject]] = [
    Claim("runs", equality.runs, (), "The module doesn't map ids [B, T] to logits [B, T, vocab_size]."),
    Claim(
        "finite",
        equality.is_finite,
        _RUNS,
        "A NaN spreads to all that follows: training diverged, or the file is damaged.",
    ),
    Claim("repeatable", equality.is_repeatable, _SOUND, "Answers are random, so that no two can be compared."),
    # ---- who sees whom
    Claim(
        "leftward, by change",
        sight.by_change,
        _SAME,
        "The model is shown what it has to predict: training loss is low, and the text it writes useless.",
    ),
    Claim(
        "leftward, by gradient",
        sight.by_gradient,
        _SOUND,
        "There is a path from a later token to an earlier output, however little passes through it now.",
    ),
    Claim(
        "each layer's sight",
        sight.by_layer,
        _SOUND,
        "A layer's mask is not what it should be: it leaks the future, or hides or adds a part of the past.",
    ),
    Claim(
        "prefix = beginning",
        sight.of_a_prefix,
        _LEFT,
        "Outputs depend on how long the text will be: what was written would be read otherwise later.",
    ),
    Claim("prompt sees itself", sight.prefix_sees_itself, _LEFT, "A prefix-LM's prompt sees too little, or too much."),
    # ---- two ways to one result
    Claim(
        "alone = in a batch",
        equality.alone_is_in_a_batch,
        _SAME,
        "What one user gets depends on who else is served at the moment.",
    ),
    Claim(
        "padding is unseen",
        equality.padding_is_unseen,
        _ROWS,
        "The shorter rows of a batch get other results than alone.",
    ),
    Claim(
        "documents are apart",
        equality.documents_are_apart,
        _LEFT,
        "In a packed row a document sees those before it, or goes on with their positions.",
    ),
    Claim(
        "cache = full",
        equality.cached_is_full,
        _LEFT,
        "What is generated is not what the model says: behind the cache a slot, a mask or a position is wrong.",
    ),
    Claim("chunks = whole", equality.chunks_are_whole, _CACHED, "A prompt that is read in pieces is misread."),
    Claim("rewound cache", equality.rewound_is_new, _CACHED, "Tokens that were rejected leave something behind."),
    Claim(
        "forked cache",
        equality.forks_are_apart,
        (*_ROWS, *_CACHED),
        "Samples of one prompt write into each other's past.",
    ),
    Claim(
        "rows of unequal length",
        equality.unequal_rows_are_alone,
        (*_ROWS, *_CACHED),
        "Prompts of several lengths, gone on with together, spoil each other.",
    ),
    Claim(
        "rolled window",
        equality.rolled_window_is_full,
        _CACHED,
        "Once a text is longer than the window, its cache holds the wrong tokens.",
    ),
    Claim("greedy = recomputed", equality.greedy_is_recomputed, _CACHED, "Generation is not what the model says."),
    Claim(
        "own precision = fp32",
        equality.own_precision_is_near,
        _SAME,
        "In the numbers that it computes with, the model is another.",
    ),
    Claim("one token", equality.of_one_token, _LEFT, "Something takes a length of 1 for another axis."),
    Claim(
        "too long is an error",
        equality.beyond_the_context,
        _RUNS,
        "Beyond the context the model writes nonsense, and nobody is told.",
    ),
    # ---- learning
    Claim(
        "targets are next tokens",
        training.targets_are_next,
        _ROWS,
        "The model is trained for something else than to predict the next token.",
    ),
    Claim(
        "padding is not counted",
        training.padding_is_not_counted,
        _ROWS,
        "The loss depends on how rows are padded, and teaches to predict padding.",
    ),
    Claim(
        "learns the next token",
        training.learns_the_next,
        _RUNS,
        "Somewhere between a text and a loaded model, training teaches something else.",
    ),
    Claim("first loss", training.first_loss, _RUNS, "Weights are drawn too large or too small, or the loss is wrong."),
    Claim("gradients reach all", training.gradients_reach_all, _SOUND, "A part of the model never learns."),
    Claim("optimizer groups", training.groups_are_whole, _RUNS, "Weights are never moved, or moved twice a step."),
    # ---- keeping
    Claim("head is tied", storing.head_is_tied, (), "One of two heads is trained, and the other one is saved."),
    Claim("saved = loaded", storing.loads_as_saved, (), "What is used later is not what was trained."),
    Claim("text comes back", storing.text_comes_back, (), "The model reads and writes other text than it seems."),
    Claim("control tokens are text", storing.control_tokens_stay_text, (), "Whoever writes a text can end documents."),
    # ---- data
    Claim("batches are shifted", overlap.batches_are_shifted, (), "The run's own batches ask for the wrong tokens."),
    Claim("documents not shared", overlap.documents_are_not_shared, (), "Validation measures what is remembered."),
    Claim("windows not shared", overlap.windows_are_not_shared, (), "Validation measures what is remembered."),
    Claim("passages not near", overlap.passages_are_not_near, (), "Validation measures what is nearly remembered."),
]


def check(
    target: LanguageModel | Decoder | Run | Config | nn.Module | Path | str,
    *,
    tokens: Sequence[int] | Tensor | None = None,
    loss_fn: LossFunction | None = None,
    pad_id: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    seed: int = 0,
    on_proof: Callable[[Proof], None] | None = None,
) -> Report:
    """Prove, on a model and its data, what people get silently wrong.

    Args:
        target: a LanguageModel or Decoder; a Run, whose data is looked at too; a Config, tried as a scaled-down random
            Decoder; any module from ids [B, T] to logits [B, T, V], of transformers (whose cache is tried too) or not;
            the path of a run or model directory; or the name of a preset. It is left as it was.
        tokens: ids of your own text to ask the model about. None: those of the run's validation, or random ones.
        loss_fn: (model, ids [B, T]) → the loss that the model is trained with.
        pad_id: the id that loss_fn takes for padding.
        optimizer: the one that is to move the model's weights.
        seed: of everything random.
        on_proof: is told each proof as it is made.

    Raises:
        UserError: the target is not there, or none of these; tokens that it has no embedding for.
    """
    if type(seed) is not int or not 0 <= seed < 1 << 32:
        raise UserError(f"seed is {seed!r}: it must be a whole number, at least 0 and below 2^32")
    what, subject = _subject(target, seed)
    subject.loss_fn, subject.pad_id, subject.optimizer = loss_fn, pad_id, optimizer
    proofs = []
    with undisturbed(subject.model, seed):
        if tokens is not None:
            subject.tokens = _checked(tokens, subject)
        for proof in prove(CLAIMS, subject):
            proofs.append(proof)
            if on_proof is not None:
                on_proof(proof)
    return Report(what, tuple(proofs))


def _subject(target: Any, seed: int) -> tuple[str, Subject]:
    """What the target is called, and what of it is tried."""
    if isinstance(target, Path | str):
        return _named(target, seed)
    if isinstance(target, Run):
        return _of_run(target, seed)
    if isinstance(target, LanguageModel):
        return _sized(target.decoder), Subject(target.decoder, seed, language_model=target)
    if isinstance(target, nn.Module):
        return _sized(target), Subject(target, seed)
    if isinstance(target, Config):
        return _of_config("the Config", target, seed)
    raise UserError(
        f"cannot check a {type(target).__name__}: give a model, a run, a Config, any torch module from ids to logits, "
        "or the name of one of them"
    )


def _named(name: Path | str, seed: int) -> tuple[str, Subject]:
    path = path_of(name)
    if path is None:
        return _of_config(str(name), preset(str(name)), seed)
    if (path / "tokens").is_dir():
        what, subject = _of_run(Run(path), seed)
    elif path.is_dir() and not (path / "tokenizer.json").exists():
        what, subject = _subject(load_model(path)[0], seed)
    else:
        what, subject = _subject(load(path), seed)
    return f"{name}: {what}", subject


def _of_run(run: Run, seed: int) -> tuple[str, Subject]:
    val = Dataset.open(run.directory / "tokens").val
    tokens = torch.from_numpy(val.slice(0, min(len(val), 1 << 16)).astype("int64"))
    model = run.model
    return _sized(model.decoder), Subject(model.decoder, seed, tokens, language_model=model, run=run)


def _of_config(name: str, config: Config, seed: int) -> tuple[str, Subject]:
    with torch.random.fork_rng(devices=[]):
        decoder = Decoder(scaled_down(config))
    subject = Subject(decoder, seed)
    subject.redraw()
    return f"{name}, scaled down: {_sized(decoder)}", subject


def _sized(model: nn.Module) -> str:
    shape = ""
    if isinstance(model, Decoder):
        shape = f", {model.config.n_layers} layers of {model.config.d_model}"
    return f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters{shape}"


def _checked(tokens: Sequence[int] | Tensor, subject: Subject) -> Tensor:
    """`tokens` as a tensor [N]. Raises: UserError, where they are no ids that the model knows."""
    try:
        ids = torch.as_tensor(tokens).flatten()
    except (TypeError, ValueError) as error:
        raise UserError(f"tokens must be ids ({error})") from None
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise UserError(f"tokens must be ids, which are integers; these are {ids.dtype}")
    try:
        limit = subject.vocab_size
    except Exception:  # the model doesn't run, which will be the first proof's failure
        return ids.long()
    if wrong := [i for i in (int(ids.min()), int(ids.max())) if not 0 <= i < limit] if len(ids) else []:
        raise UserError(f"token id {wrong[0]} is not in the model's vocabulary of {limit} (ids from 0)")
    return ids.long()
