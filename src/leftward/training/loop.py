"""The training loop: one recipe, one run directory, from its first step or from its last checkpoint.

The order around a step is fixed so that a kill at any moment loses nothing but time: checkpoint, then evaluate, then
put the best weights into the run directory; a resumed run repeats what was after its checkpoint, bit for bit on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from leftward import files
from leftward.config import Config
from leftward.data.batches import IGNORED, Dataset, is_dataset, link
from leftward.data.order import Order, validation
from leftward.data.prepare import prepare
from leftward.errors import UserError
from leftward.formats import hf
from leftward.formats.model_directory import save_model, save_weights
from leftward.formats.tensors import DTYPES
from leftward.generation.decode import decode
from leftward.generation.settings import Sampling
from leftward.kernels import native
from leftward.model.decoder import Decoder
from leftward.planner import count_parameters
from leftward.text.tokenizer import Tokenizer
from leftward.training import checkpoint, current, divergence
from leftward.training.checkpoint import State
from leftward.training.directory import write as write_recipe
from leftward.training.finetuning import Base
from leftward.training.loss import bits_per_byte, evaluate, head_loss, tensors
from leftward.training.optim import Optimizer, parameter_groups
from leftward.training.parallel import World, joined, recompute_blocks
from leftward.training.precision import check_fits, choose_device, choose_dtype
from leftward.training.progress import Diverged, Interrupted, Observer, Progress
from leftward.training.recipe import Recipe
from leftward.training.schedule import Plan, lr_fraction
from leftward.training.size import TOLERANCE, parse_size

if TYPE_CHECKING:
    from leftward.training.sharding import Sharding

SUMMARY = "summary.json"
_SAVE_SECONDS = 120.0
_EVALUATIONS = 10  # over a run, where no interval is given
_SAMPLE_TOKENS = 60


def run(
    recipe: Recipe,
    directory: Path,
    observer: Observer,
    started: float | None = None,
    rate: Callable[[int, Plan, Recipe], float] = lr_fraction,
) -> dict[str, Any]:
    """Train `recipe` in `directory`, from the newest checkpoint there if there is one, to the end.

    Args:
        directory: exists, belongs to this run alone and is locked (see directory.py).
        started: the `time.perf_counter()` that wall_s counts from.
        rate: the learning rate of a step as a fraction of its peak; another than the recipe's schedule to look for one.

    Returns:
        What summary.json holds. Where the run took several sessions, wall_s is the training of the earlier ones and the
        whole of the last.

    Raises:
        Interrupted: SIGINT or SIGTERM came, and all is saved; or SIGINT came again before it was.
        UserError: the data or the disk make going on impossible, or the numbers (Diverged).
    """
    started = time.perf_counter() if started is None else started
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(joined())
        stack.enter_context(world.telling())
        device = choose_device(recipe.training.device)
        base = None
        if recipe.lora.rank is not None and world.size > 1:
            raise UserError(
                f"LoRA trains in one process, and torchrun has started {world.size}: begin without torchrun, or leave "
                "lora.rank out to train all weights over the ranks"
            )
        if recipe.init_from is not None:
            base = Base.open(recipe)
            recipe = base.recipe
            if world.is_first:
                write_recipe(recipe, directory)
        world.arrange(recipe)
        tokenizer, dataset = world.after_first(functools.partial(_open_data, recipe, directory, observer, base))
        kernels = "PyTorch's"
        if device.type == "cpu":
            kernels = stack.enter_context(native.in_use())
            native.keep_freed_memory()
        received = stack.enter_context(_interruptible(directory))
        interrupted = lambda: world.any(received())  # noqa: E731
        answers = stack.enter_context(current.answering(directory, world.is_first))
        training = _Training(
            *(recipe, directory, observer, world, device, tokenizer, dataset, base, interrupted, answers, rate, kernels)
        )
        if world.from_first((directory / SUMMARY).exists):
            observer.note(f"the run in {directory} has finished: there is nothing to go on with")
            return dict(files.read_json(directory / SUMMARY))
        before = training.state.elapsed
        training.go_on()
        summary = training.summary(before + time.perf_counter() - started)
        if world.is_first:
            files.write_json(directory / SUMMARY, summary)
        world.wait()
    return summary


class _Training:
    """A run in progress: everything that a step changes."""

    def __init__(
        self,
        recipe: Recipe,
        directory: Path,
        observer: Observer,
        world: World,
        device: torch.device,
        tokenizer: Tokenizer,
        dataset: Dataset,
        base: Base | None,
        interrupted: Callable[[], bool],
        answers: current.Answers,
        rate: Callable[[int, Plan, Recipe], float],
        kernels: str,
    ) -> None:
        self.recipe, self.directory, self.observer = recipe, directory, observer
        self.world, self.device = world, device
        self.dataset, self.base, self.rate = dataset, base, rate
        self.interrupted, self.answers = interrupted, answers
        self.seq_len = recipe.seq_len
        self.order = Order(dataset, self.seq_len, recipe.seed, recipe.data.packing)
        self.val = validation(dataset, recipe.data.packing)
        self.config = recipe.config(tokenizer.vocab_size) if base is None else base.config
        self.n_parameters = count_parameters(self.config).total
        if base is None:
            check_fits(recipe, self.n_parameters * world.on_this_machine // world.size)
        saved = checkpoint.latest_state(directory)
        dtype = saved.dtype if saved else world.from_first(lambda: choose_dtype(recipe.training.dtype, device))
        self.decoder, self.sharding = _build(recipe, self.config, base, world, device, dtype)
        self.tokenizer = tokenizer
        self.prompts = {text: _prompt(text, tokenizer, self.config) for text in recipe.training.sample_prompts}
        self.native = kernels == "native"
        self.metrics = _Lines(directory / "metrics.jsonl", saved, world)
        self.samples = _Lines(directory / "samples.jsonl", saved, world) if self.prompts else None
        self.optimizer = Optimizer(self.decoder, recipe.optimizer, DTYPES[dtype], self.sharding)
        if found := checkpoint.load_latest(directory, self.sharding):
            self._restore(*found)
        else:
            self.state = State(
                step=0,
                position=0,
                tokens=0,
                elapsed=0.0,
                dtype=dtype,
                threads=torch.get_num_threads(),
                native=self.native,
                data_fingerprint=dataset.fingerprint,
                recipe_fingerprint=recipe.fingerprint(),
                base_fingerprint=None if base is None else base.fingerprint,
                # Of a mixture, those of the dataset that comes round first.
                plan=Plan.of(recipe, float(min(part.rows.per_epoch / part.share for part in self.order.sources))),
            )
            weights = self._whole_weights()
            if world.is_first:
                self._save_model(directory, weights)
        self.hidden: Callable[..., torch.Tensor] = self.decoder.hidden
        if recipe.training.compile and self.sharding is None:  # that has its blocks compiled
            self.hidden = self._compiled()
        self.evaluation_seconds = self.data_seconds = 0.0
        self.clock = time.perf_counter() - self.state.elapsed
        self.saved_at = self.elapsed
        self._announce()

    @property
    def elapsed(self) -> float:
        """Seconds of training, over all sessions, by the first rank's clock: all ranks ask together."""
        return self.world.agree(time.perf_counter() - self.clock)

    def go_on(self) -> None:
        """Train until the plan's last step, or until patience runs out, saving and evaluating on the way."""
        self.observer.starting(self.state.step)
        budget = (self.recipe.training.minutes or 0.0) * 60
        while True:
            plan = self.state.plan.settle(self.state.step, self.elapsed, budget, self.recipe)
            self.state = replace(self.state, plan=plan)
            is_last = self.state.step == plan.max_steps
            if (is_last or self._evaluation_is_due()) and self.state.evaluated_step != self.state.step:
                self._save()
                self._evaluate()
                self._save()
            elif self._save_is_due():
                self._save()
            if self.interrupted():
                self._save()
                raise Interrupted(self.directory)
            if self.world.any(self.answers.is_due()):
                self._answer()
            patience = self.recipe.training.patience
            if is_last or (patience is not None and self.state.stale >= patience):
                return
            self._step()

    def _step(self) -> None:
        recipe, state = self.recipe, self.state
        training = recipe.training
        if self.config.dropout or recipe.lora.dropout:
            of_step = [recipe.seed, state.step, *([self.world.rank] if self.world.rank else [])]
            torch.manual_seed(int(np.random.SeedSequence(of_step).generate_state(1)[0]))
        began = time.perf_counter()
        first, n_rows = self.world.share(state.position, training.batch_size)
        batch, _ = self.order.batch(first, n_rows)
        self.data_seconds = time.perf_counter() - began
        inputs, targets, documents = tensors(batch, self.device)  # [n_rows, seq_len]
        targets = self.world.own_tokens(targets)
        n_targets = max(1, round(self.world.sum(int((targets != IGNORED).sum()))[0]))
        balance = torch.zeros((), device=self.device)
        losses: list[torch.Tensor] = []
        micro = min(training.micro_batch_size or n_rows, n_rows)
        for start in range(0, n_rows, micro):
            rows = slice(start, start + micro)
            hidden = self.hidden(inputs[rows], documents=None if documents is None else documents[rows])
            loss = head_loss(self.decoder, hidden, targets[rows], n_targets)
            charged = loss
            if self.config.n_experts:
                unevenness = self.decoder.balance_loss() * (len(inputs[rows]) / training.batch_size)
                charged = loss + training.balance_loss * unevenness
                balance += unevenness.detach()
            charged.backward()
            self.optimizer.accumulate()
            losses.append(loss.detach())
        fraction = self.rate(state.step, state.plan, recipe)
        mean, of_experts = self.world.sum(torch.stack(losses).sum().item(), balance.item())
        grad_norm = self.optimizer.grad_norm()
        if not (math.isfinite(mean) and math.isfinite(grad_norm)):
            parts = [loss.item() for loss in losses]
            diverged = divergence.of_step(
                *(self.directory, self.decoder, self.tokenizer, batch),
                step=state.step + 1,
                position=first,
                loss=mean,
                part_losses=parts,
                micro=micro,
                grad_norm=grad_norm,
                rank=None if self.world.size == 1 else self.world.rank,
            )
            self.world.leave_it_to(not all(map(math.isfinite, parts)))
            raise diverged
        spikes, spike = state.spikes, None
        if training.skip_spikes is not None:
            spikes, spike = spikes.judge(mean, grad_norm, training.skip_spikes)
        if spike:
            self.optimizer.forget()
            self.observer.note(f"step {state.step + 1:,} is left out (training.skip_spikes): {spike}")
        else:
            self.optimizer.step(fraction, grad_norm)
        position, tokens = state.position + training.batch_size, state.tokens + n_targets
        self.state = replace(state, step=state.step + 1, position=position, tokens=tokens, spikes=spikes)
        self._report(mean, fraction, grad_norm, of_experts if self.config.n_experts else None)

    def _report(self, loss: float, fraction: float, grad_norm: float, balance: float | None) -> None:
        state, elapsed, train = self.state, self.elapsed, self.dataset.train
        budget = (self.recipe.training.minutes or 0.0) * 60
        to_come = None if state.plan.max_steps is None else state.plan.max_steps - state.step
        progress = Progress(
            step=state.step,
            max_steps=state.plan.max_steps,
            loss=loss,
            bits_per_byte=bits_per_byte(loss * len(train), train.bytes),
            lr_fraction=fraction,
            grad_norm=grad_norm,
            tokens=state.tokens,
            tokens_per_second=state.tokens / elapsed,
            elapsed=elapsed,
            data_seconds=self.data_seconds,
            eta=max(0.0, budget - elapsed) if to_come is None else to_come * elapsed / state.step,
        )
        if state.step % self.recipe.training.log_interval == 0 or to_come == 0:
            self.metrics.write(
                step=state.step,
                loss=loss,
                bits_per_byte=progress.bits_per_byte,
                lr_fraction=fraction,
                grad_norm=grad_norm,
                tokens=state.tokens,
                elapsed_s=round(elapsed, 3),
                **({} if balance is None else {"balance_loss": balance}),
                **({} if self.recipe.training.skip_spikes is None else {"skipped_steps": state.spikes.skipped}),
            )
        self.observer.stepped(progress)

    def _evaluation_is_due(self) -> bool:
        step, training = self.state.step, self.recipe.training
        if step == 0:  # what a run begins from may be better than all that comes
            return self.base is not None
        if training.eval_interval == 0:
            return False
        if training.eval_interval is not None:
            return step % training.eval_interval == 0
        if training.minutes is None:
            assert self.state.plan.max_steps is not None
            return step % max(1, self.state.plan.max_steps // _EVALUATIONS) == 0
        # A tenth of the budget apart, and where the validation text is long never more than a fifth of the time.
        apart = max(training.minutes * 60 / _EVALUATIONS, 4 * self.evaluation_seconds)
        return self.elapsed - self.state.evaluated_at >= apart

    def _save_is_due(self) -> bool:
        step, training = self.state.step, self.recipe.training
        if any(each is not None and step > 0 == step % each for each in (training.save_interval, training.keep_every)):
            return True
        return training.save_interval is None and self.elapsed - self.saved_at > _SAVE_SECONDS

    def _save(self) -> None:
        self.state = replace(self.state, elapsed=self.elapsed)
        if self.world.any(not all(weight.isfinite().all() for weight in self.optimizer.masters.values())):
            raise Diverged(
                f"weights became infinite at step {self.state.step}; what {self.directory} holds was saved before. "
                "Lower optimizer.lr, optimizer.adamw_lr or optimizer.weight_decay"
            )
        training = self.recipe.training
        checkpoint.save(
            *(self.directory, self.state, self.optimizer.weights(), self.optimizer.state()),
            keep=training.keep,
            keep_every=training.keep_every,
            sharding=self.sharding,
        )
        if self.state.best_loss is None:  # nothing is known to be better
            self._publish()
        self.saved_at = self.elapsed

    def _evaluate(self) -> None:
        began = self.elapsed
        evaluation = evaluate(self.decoder, self.val, self.seq_len, self.device, self.interrupted, self.world)
        if evaluation is None:
            return
        step, best = self.state.step, self.state.best_loss
        self.evaluation_seconds = self.elapsed - began
        if not math.isfinite(evaluation.loss):
            raise Diverged(f"the validation loss is {evaluation.loss} at step {step}; what was best before stays")
        is_best = best is None or evaluation.loss < best
        self.state = replace(
            self.state,
            evaluated_at=self.elapsed,
            evaluated_step=step,
            last_loss=evaluation.loss,
            stale=0 if is_best else self.state.stale + 1,
        )
        if is_best:
            self.state = replace(self.state, best_step=step, best_loss=evaluation.loss)
            self._publish()
        self.metrics.write(
            step=step,
            val_loss=evaluation.loss,
            val_bits_per_byte=evaluation.bits_per_byte,
            tokens=self.state.tokens,
            elapsed_s=round(self.elapsed, 3),
        )
        self.observer.evaluated(step, evaluation, is_best)
        self._sample()

    def _sample(self) -> None:
        """Let the model go on with the recipe's prompts. Seeded by the run, and apart from its other randomness."""
        if self.samples is None:
            return
        self.decoder.eval()
        sampling = [Sampling(max_tokens=_SAMPLE_TOKENS, seed=self.recipe.seed)] * len(self.prompts)
        eos = [] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id]
        texts = [""] * len(self.prompts)
        for event in decode(self.decoder, self.tokenizer, [*self.prompts.values()], sampling, eos_ids=eos):
            texts[event.row] += event.text
        self.decoder.train()
        for prompt, text in zip(self.prompts, texts, strict=True):
            self.samples.write(step=self.state.step, prompt=prompt, text=text)
            self.observer.sampled(self.state.step, prompt, text)

    def _publish(self) -> None:
        """Put the weights as they are now into the run directory, which is a model directory."""
        if self.state.step == 0:  # as when it was begun
            return
        if self.base is not None:
            self.base.save_adapter(self.directory, self.optimizer.weights())
        model_type = None if self.base is None else self.base.model_type
        weights = self._whole_weights()
        if self.world.is_first:
            save_weights(self.directory, self.config, weights, model_type)

    def _answer(self) -> None:
        """Give the weights as they are now to whoever looks at the run."""
        with self.answers.counted():
            weights = self._whole_weights()
            if self.world.is_first:
                self.answers.write(self.state.step, lambda directory: self._save_model(directory, weights))

    def _save_model(self, directory: Path, weights: dict[str, torch.Tensor]) -> None:
        """A model directory with all that came with the model which the run began from."""
        generation, model_type = (None, None) if self.base is None else (self.base.generation, self.base.model_type)
        save_model(directory, self.config, weights, self.tokenizer, generation, model_type)

    def _whole_weights(self) -> dict[str, torch.Tensor]:
        """The model's, of which the optimizer may have adapters only. Of several ranks, the first gets them."""
        weights = self.optimizer.weights()
        if self.sharding is not None:
            return dict(self.sharding.whole(weights))
        return weights if self.base is None else self.base.whole(weights)

    def _restore(self, state: State, weights: dict[str, Any], optimizer: dict[str, Any]) -> None:
        if state.data_fingerprint != self.dataset.fingerprint:
            raise UserError(
                f"{self.dataset.directory} does not hold the tokens that this run was trained on "
                f"(fingerprint {self.dataset.fingerprint}, expected {state.data_fingerprint})"
            )
        if state.recipe_fingerprint != self.recipe.fingerprint():
            raise UserError(
                f"recipe.yaml in {self.directory} is not the recipe that this run was begun with: put it back, or "
                "train anew with --out"
            )
        if state.base_fingerprint != (None if self.base is None else self.base.fingerprint):
            raise UserError(
                f"{self.recipe.init_from or 'nothing'} is not what this run began from: weights, architecture or "
                f"tokenizer are others. Put the model back (init_from in {self.directory / 'recipe.yaml'} says where), "
                "or begin a new run"
            )
        self.optimizer.restore(weights, optimizer)
        self.state = state
        self.observer.note(f"going on after step {state.step:,}")
        if state.threads != torch.get_num_threads():
            self.observer.note(
                f"this run computed with {state.threads} CPU threads, now there are {torch.get_num_threads()}: "
                "results can differ in the last bits (OMP_NUM_THREADS sets the number)"
            )
        if state.native != self.native:
            self.observer.note(
                "this run was begun " + ("with" if state.native else "without") + " native kernels, and "
                f"goes on {'with' if self.native else 'without'}: results can differ in the last bits"
            )

    def _compiled(self) -> Callable[..., torch.Tensor]:
        """`Decoder.hidden` through torch.compile, or plain where that fails."""
        compiled = torch.compile(self.decoder.hidden)
        training = self.recipe.training
        shape = (training.micro_batch_size or training.batch_size, self.seq_len)
        sample = torch.zeros(shape, dtype=torch.int64, device=self.device)
        documents = sample if self.val.is_apart else None
        try:
            head_loss(self.decoder, compiled(sample, documents=documents), sample).backward()
        except Exception as error:  # whatever a compiler back end may raise
            self.observer.note(f"torch.compile failed ({type(error).__name__}); training without it")
            return self.decoder.hidden
        finally:
            self.decoder.zero_grad()
        return compiled

    def _announce(self) -> None:
        recipe, note = self.recipe, self.observer.note
        groups = parameter_groups(self.decoder)
        decayed = self.optimizer.count(groups["matrices"])
        config = self.config
        note(
            f"model: {self.n_parameters:,} parameters: {config.n_layers} layers × {config.d_model} wide, "
            f"{config.n_heads} heads, context {config.max_seq_len}, vocabulary {config.vocab_size:,}"
        )
        if recipe.size is not None and abs(self.n_parameters / parse_size(recipe.size) - 1) > TOLERANCE:
            note(
                f"that is not the size of {recipe.size} for which the recipe was made, since its vocabulary was not "
                f"known: set tokenizer.vocab_size={config.vocab_size} beside the size"
            )
        if self.base is not None:
            note(f"begun from {recipe.init_from}, fingerprint {self.base.fingerprint}")
            for line in self.base.describe_lora(self.optimizer):
                note(line)
        rule = "Muon" if recipe.optimizer.name == "muon" else f"weight decay {recipe.optimizer.weight_decay}"
        note(f"optimizer: {rule} for {decayed:,} of them in matrices, AdamW without decay for the rest")
        train, val = self.dataset.train, self.dataset.val
        note(
            f"data: {len(train):,} tokens of {train.documents:,} documents to train on, {len(val):,} of "
            f"{val.documents:,} to validate; {recipe.training.batch_size * self.seq_len:,} tokens a step"
        )
        if self.val.is_apart:
            note(f"packing: whole documents fill {self.order.filling:.1%} of the sequences")
        steps, asked = self.state.plan.max_steps, recipe.training.max_steps
        if steps is not None and recipe.training.minutes is None:
            epochs = self.order.epochs(steps * recipe.training.batch_size)
            times = [f"{times:.1f} times through {name}" for name, times in epochs.items()]
            if len(times) == 1:
                times = [f"{next(iter(epochs.values())):.1f} times through the training data"]
            fewer = f", where max_epochs ends it; max_steps is {asked:,}" if asked and asked > steps else ""
            note(f"plan: {steps:,} steps, {', '.join(times)}{fewer}")
        note(
            f"computing in {self.state.dtype} on {self.device.type}, {torch.get_num_threads()} threads, "
            f"{'native' if self.state.native else 'plain'} kernels"
        )
        if self.world.size > 1:
            replicate, shard, tensor = self.world.grid
            note(
                f"on {self.world.size:,} ranks: replicate {replicate} × shard {shard} × tensor {tensor}, each with "
                f"{self.world.share(0, recipe.training.batch_size)[1]:,} sequences of the batch"
            )
        if hf.family_of(self.config) is None:
            note("no Hugging Face class has this architecture: the run directory will load in leftward only")

    def summary(self, wall_s: float) -> dict[str, Any]:
        state, val = self.state, self.val
        assert state.best_loss is not None
        return {
            "val_loss": state.best_loss,
            "val_bits_per_byte": bits_per_byte(state.best_loss * val.n_targets, val.bytes),
            "best_step": state.best_step,
            "final_val_loss": state.last_loss,
            "steps": state.step,
            "stopped_early": state.step != state.plan.max_steps,
            "skipped_steps": state.spikes.skipped,
            "tokens": state.tokens,
            "epochs": self.order.epochs(state.position),
            "params": self.n_parameters,
            "trained_params": self.n_parameters if self.base is None else self.base.n_learning,
            "wall_s": round(wall_s, 3),
            "training_s": round(self.elapsed, 3),
            "dtype": state.dtype,
            "device": self.device.type,
            "seed": self.recipe.seed,
        }


class _Lines:
    """metrics.jsonl, a line a logged step and a line an evaluation, or samples.jsonl: appended by the first rank, never
    beyond what is saved and redone."""

    def __init__(self, path: Path, state: State | None, world: World) -> None:
        """Keep the lines up to `state`; what an interrupted run wrote after its checkpoint will come again.

        Raises:
            UserError: there is no state, yet lines of evaluations, which come only after a checkpoint.
        """
        self._path, self._writes = path, world.is_first
        if not self._writes:
            return
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        if state is None and any('"val_loss"' in line for line in lines):
            raise UserError(
                f"{path.parent} holds a trained model, but its checkpoints are gone: there is nothing to go on from. "
                "Train anew with --out"
            )
        kept = [line for line in lines if state is not None and _is_before(line, state)]
        files.write_text(path, "".join(f"{line}\n" for line in kept))

    def write(self, **values: Any) -> None:
        if not self._writes:
            return
        with files.writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def _is_before(line: str, state: State) -> bool:
    """Whether a run that goes on from `state` will not write this line again."""
    try:
        values = json.loads(line)
        last = state.step if "loss" in values else state.evaluated_step
        return last is not None and bool(values["step"] <= last)
    except (ValueError, KeyError, TypeError):  # cut short by a kill
        return False


def _prompt(text: str, tokenizer: Tokenizer, config: Config) -> list[int]:
    """The ids of one of the recipe's sample_prompts. Raises: UserError, before training begins."""
    try:
        ids = tokenizer.encode(text, add_bos=True)
    except UserError as error:
        raise UserError(f"training.sample_prompts: {error}") from None
    if not 0 < len(ids) < config.max_seq_len:
        raise UserError(
            f"training.sample_prompts: {text[:40]!r} has {len(ids)} tokens; there must be 1 at least, and fewer than "
            f"the context of {config.max_seq_len}"
        )
    return ids


def _build(
    recipe: Recipe, config: Config, base: Base | None, world: World, device: torch.device, dtype: str
) -> tuple[Decoder, Sharding | None]:
    """The Decoder to train, and how it is spread where there are several ranks."""
    torch.manual_seed(recipe.seed)
    recomputes = recipe.parallel.recompute == "blocks"
    if world.size == 1:
        decoder = (Decoder(config) if base is None else base.decoder).to(device)
        if recomputes:
            recompute_blocks(decoder)
        return decoder, None
    from leftward.training.sharding import Sharding  # FSDP takes a second to import

    sharding = Sharding(config, device, world)
    value = None if base is None else base.decoder.state_dict().__getitem__
    compiles = recipe.training.compile and world.compiles(device)
    return sharding.build(DTYPES[dtype], recompute=recomputes, compiled=compiles, value=value), sharding


def _open_data(recipe: Recipe, directory: Path, observer: Observer, base: Base | None) -> tuple[Tokenizer, Dataset]:
    """The run's tokens, prepared if they are not there yet, and their tokenizer: that of the `base` if there is one."""
    tokenizer, dataset = _find_data(recipe, directory, observer, None if base is None else base.tokenizer)
    if base is None:
        return tokenizer, dataset
    if dataset.tokenizer_fingerprint != base.tokenizer.fingerprint():
        raise UserError(
            f"{', '.join(recipe.data_settings().paths)} was prepared with another tokenizer than that of "
            f"{recipe.init_from}: give the text, or prepare it with that one (leftward data prepare … --tokenizer)"
        )
    return base.tokenizer, dataset


def _find_data(
    recipe: Recipe, directory: Path, observer: Observer, given: Tokenizer | None
) -> tuple[Tokenizer, Dataset]:
    tokens = directory / "tokens"
    if tokens.exists():
        tokenizer, dataset = Tokenizer.load(tokens), Dataset.open(tokens)
        if tokenizer.fingerprint() != dataset.tokenizer_fingerprint:
            raise UserError(
                f"{tokens / 'tokenizer.json'} is not the tokenizer that the tokens beside it were made with"
            )
        return tokenizer, dataset
    settings = recipe.data_settings()
    if recipe.data.mix is not None or any(map(is_dataset, settings.paths)):
        recipe.check_takes_prepared(settings.paths[0])
        if recipe.data.mix is None and len(settings.paths) > 1:
            raise UserError("data.path names prepared data and more: give each directory a weight with data.mix")
        dataset = link(recipe.data.mix or {settings.paths[0]: 1.0}, tokens)
        return Tokenizer.load(tokens), dataset
    tokenizer, dataset = prepare(
        settings, tokens, seed=recipe.split_seed, tokenizer=given, on_progress=observer.preparing
    )
    for note in dataset.notes:
        observer.note(note)
    return tokenizer, dataset


@contextlib.contextmanager
def _interruptible(directory: Path) -> Iterator[Callable[[], bool]]:
    """Let SIGINT and SIGTERM be asked for instead of raising; a second SIGINT ends the run at once."""
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and received:
            raise Interrupted(directory, saved=False)
        received.append(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield lambda: False
        return
    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
