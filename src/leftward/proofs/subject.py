"""What is on trial: any module from ids to logits, with as much more as is known about it."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leftward.config import Config
from leftward.language_model import LanguageModel
from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder
from leftward.proofs.report import Fails, Skips
from leftward.runs import Run

LossFunction = Callable[[Any, Tensor], Tensor]
"""(model, ids [B, T]) → the loss that it is trained with."""

_FEW = 30_000_000  # parameters up to which a pass costs next to nothing
_WORK = 4e11  # multiply-adds that one proof may take: some 10 s on one core
_LENGTHS = (24, 16, 12, 8, 6, 4, 2, 1)


@dataclass(eq=False)
class Subject:
    """A model on trial. `model` is in evaluation mode and is never changed."""

    model: nn.Module
    seed: int = 0
    tokens: Tensor | None = None
    """[N] ids of the user's own text; None: random ones."""
    loss_fn: LossFunction | None = None
    optimizer: torch.optim.Optimizer | None = None
    pad_id: int | None = None
    """The id that `loss_fn` takes for padding."""
    language_model: LanguageModel | None = None
    run: Run | None = None

    @property
    def decoder(self) -> Decoder | None:
        return self.model if isinstance(self.model, Decoder) else None

    @property
    def config(self) -> Config | None:
        return None if self.decoder is None else self.decoder.config

    def the_decoder(self, otherwise: str = "only our Decoder has this, and the model is another module") -> Decoder:
        """`exact`, where it is one of ours. Raises: Skips, saying what would help."""
        if not isinstance(self.exact, Decoder):
            raise Skips(otherwise)
        return self.exact

    @functools.cached_property
    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @functools.cached_property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """What the model computes with."""
        floating = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return next(floating, torch.float32)

    @functools.cached_property
    def awake(self) -> nn.Module:
        """The model, or, where matrices of it are all zeros, a copy in which these are random: a fresh model's blocks
        often add nothing yet, and what adds nothing hides every leak."""
        asleep = [name for name, p in self.model.named_parameters() if p.ndim >= 2 and not p.any()]
        if not asleep:
            return self.model
        woken = copy.deepcopy(self.model)
        parameters = dict(woken.named_parameters())
        for name in asleep:
            self._draw(parameters[name], parameters[name].shape[-1] ** -0.5)
        return woken

    @functools.cached_property
    def exact(self) -> nn.Module:
        """What logits are compared on: `awake`, or a copy of it in fp32 where it has fewer digits than that. A bf16
        number has 8 bits, and behind a few layers its roundings are as large as many a fault."""
        return self.awake if self.digits_suffice else copy.deepcopy(self.awake).float()

    @property
    def digits_suffice(self) -> bool:
        return torch.finfo(self.dtype).eps <= torch.finfo(torch.float32).eps

    def redraw(self) -> None:
        """Give every weight of `model` a say: for one that was only made to be tried."""
        for name, parameter in self.model.named_parameters():
            is_matrix = parameter.ndim >= 2
            self._draw(parameter, parameter.shape[-1] ** -0.5 if is_matrix else 0.1)
            if "norm" in name and name.endswith("weight"):
                parameter.data.add_(1)

    @torch.no_grad()
    def _draw(self, tensor: Tensor, std: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=self.generator(tensor.numel())) * std)

    def generator(self, salt: int = 0) -> torch.Generator:
        """Randomness of the proofs' own, so that the user's is left alone."""
        return torch.Generator().manual_seed((self.seed + 1) * 1_000_003 + salt)

    # ---- asking the model

    def ask(self, ids: Tensor, **options: Any) -> Tensor:
        """Logits [B, T, V] of `ids` [B, T] from `exact`, without gradients."""
        with torch.no_grad():
            return self.logits_of(self.exact(ids, **options), ids)

    def logits_of(self, output: Any, ids: Tensor) -> Tensor:
        """The logits in what a module returned: a tensor, the first of several, or the field of that name.

        Raises:
            Fails: there are none of the right shape.
        """
        logits = getattr(output, "logits", None)
        if logits is None:
            logits = output[0] if isinstance(output, tuple | list) else output
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[0] != ids.shape[0]:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise Fails(f"ids {tuple(ids.shape)} give {found}, where logits [B, T, vocab_size] should be")
        return logits

    @functools.cached_property
    def vocab_size(self) -> int:
        config = getattr(self.model, "config", None)
        given = getattr(config, "vocab_size", None)
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        return given if isinstance(given, int) else self.ask(one).shape[-1]

    @functools.cached_property
    def context(self) -> int | None:
        """The longest sequence, where it is known."""
        config = getattr(self.model, "config", None)
        names = ("max_seq_len", "max_position_embeddings", "n_positions", "max_sequence_length", "block_size")
        found = (getattr(config, name, None) for name in names)
        return next((length for length in found if isinstance(length, int)), None)

    @functools.cached_property
    def ids(self) -> Tensor:
        """[1, T] that the model is asked about most: 24 tokens, 16 for a large model, fewer where it takes no more."""
        refusal = None
        for length in _LENGTHS:
            if length > (24 if self.n_parameters <= _FEW else 16) or length > (self.context or length):
                continue
            ids = self.draw(1, length)
            if self.context is not None:
                return ids
            try:
                self.ask(ids)
                return ids
            except (IndexError, ValueError, RuntimeError, AssertionError) as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    @functools.cached_property
    def long_ids(self) -> Tensor:
        """[1, T] long enough for the window of local layers to have an outside, where that can be afforded."""
        config, short = self.config, self.ids
        if config is None or config.window is None:
            return short
        length = min(config.window + 8, config.max_seq_len)
        affordable = 4 * self.n_parameters * length * len(self.some_places(length)) <= _WORK
        return self.draw(1, length) if affordable and length > short.shape[1] else short

    def some_places(self, length: int) -> list[int]:
        """All of a short sequence, or a dozen spread over a long one with both ends."""
        if length <= _LENGTHS[0]:
            return list(range(length))
        return sorted({0, 1, 2, length - 3, length - 2, length - 1, *range(0, length, -(-length // 7))})

    def draw(self, rows: int, length: int, salt: int = 0) -> Tensor:
        """[rows, length] ids: of the user's own tokens where there are enough of them, or random.

        Id 0 is left out where possible, and the padding id: models may treat them in ways of their own.
        """
        if self.tokens is not None and len(self.tokens) > length + rows + salt:
            step = max(1, (len(self.tokens) - length - salt) // rows)
            starts = [salt + step * row for row in range(rows)]
            return torch.stack([self.tokens[start : start + length] for start in starts]).to(self.device)
        limit = self.vocab_size  # of the model, which may have more ids than its tokenizer
        if self.language_model is not None:
            limit = min(limit, self.language_model.tokenizer.vocab_size)
        kept = [i for i in range(min(limit, 4096)) if i not in (0, self.pad_id)] or [0]
        places = torch.randint(len(kept), (rows, length), generator=self.generator(17 * length + salt))
        return torch.tensor(kept, device=self.device)[places.to(self.device)]

    def another(self, ids: Tensor) -> Tensor:
        """Other ids than `ids`, everywhere. Raises: Skips, where there are none."""
        if self.vocab_size < 2:
            raise Skips("with one token in the vocabulary there is nothing to change")
        return (ids + max(1, self.vocab_size // 3)) % self.vocab_size

    def need(self, length: int) -> Tensor:
        """`ids`. Raises: Skips, where they are shorter than that."""
        if self.ids.shape[1] < length:
            raise Skips(f"the model takes {self.ids.shape[1]} tokens, and this needs {length}")
        return self.ids

    # ---- how far two ways to the same logits may lie apart

    @functools.cached_property
    def tolerance(self) -> float:
        """What rounding explains: 16 times the most that logits move when every number of the embedding is rounded up
        or down by one unit in its last place, and no less than 8 such units of the largest logit.

        Measured, because a bound for all models would be too loose for most: it follows what this model makes of a
        rounding. 16: each of the layers rounds a few times, in different directions.
        """
        before = self.ask(self.ids)
        unit = torch.finfo(before.dtype).eps
        moved = [0.0]
        for salt in range(3):
            generator = self.generator(salt)

            def rounded(output: Tensor, generator: torch.Generator = generator) -> Tensor:
                signs = torch.randint(0, 2, output.shape, generator=generator).to(output) * 2 - 1
                return output * (1 + unit * signs)

            with embeddings_through(self.exact, self.ids, rounded):
                moved.append(distance(self.ask(self.ids), before))
        return max(16 * max(moved), 8 * unit * float(before.abs().max()))

    def compare(self, what: str, ours: Tensor, wanted: Tensor) -> float:
        """The largest difference of two logits. Raises: Fails, where rounding does not explain it."""
        difference = distance(ours, wanted)
        if not difference <= self.tolerance:
            raise Fails(f"{what}: logits differ by {difference:.1e}, where rounding explains {self.tolerance:.0e}")
        return difference

    # ---- through a cache

    def read_through_cache(self, parts: list[Tensor], cache: Any = None) -> tuple[list[Tensor], Any]:
        """The logits of each of `parts` [1, t], read one after the other, and the cache that holds them.

        Raises:
            Skips: the model has no cache that is known here.
        """
        logits = []
        for part in parts:
            result, cache = self.read(part, cache)
            logits.append(result)
        return logits, cache

    def read(self, ids: Tensor, cache: Any, model: nn.Module | None = None) -> tuple[Tensor, Any]:
        """The logits of `ids` [1, T] behind what `cache` holds (None: nothing yet), and the cache that holds both.

        Args:
            model: None: `exact`.
        """
        model = self.exact if model is None else model
        if isinstance(model, Decoder):
            cache = self.new_cache(1, dtype=model.dtype) if cache is None else cache
            with torch.no_grad():
                return model(ids, cache), cache
        parameters = inspect.signature(model.forward).parameters
        if "use_cache" not in parameters:
            raise Skips("the model takes no cache that is known here")
        name = "cache" if "cache" in parameters else "past_key_values"  # as transformers called it before 5.20
        with torch.no_grad():
            output = model(ids, use_cache=True, **({} if cache is None else {name: cache}))
        held = output.get(name)
        if held is None:
            raise Skips("the model gives no cache back")
        return self.logits_of(output, ids), held

    def new_cache(
        self, rows: int, capacity: int | None = None, rewindable: int = 16, dtype: torch.dtype | None = None
    ) -> KVCache:
        """An empty cache for our Decoder. Raises: Skips, where the model is none, or sees the future."""
        decoder = self.the_decoder()
        if not decoder.config.causal:
            raise Skips("a model that sees the future can keep nothing of the past: causal is false")
        capacity = capacity or min(decoder.config.max_seq_len, self.long_ids.shape[1] + 8)
        dtype = dtype or decoder.dtype
        return KVCache(decoder.config, rows, capacity, dtype, self.device, rewindable=rewindable)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors; infinite where a number is not finite."""
    if not (a.isfinite().all() and b.isfinite().all()):
        return float("inf")
    return float((a.float() - b.float()).abs().max()) if a.numel() else 0.0


@contextlib.contextmanager
def embeddings_through(model: nn.Module, ids: Tensor, change: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
    """While it lasts, what an `nn.Embedding` gives for `ids` goes through `change`. Yields the list of the results."""
    changed: list[Tensor] = []

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        # Positions have an embedding too; only one of them is asked for the ids.
        if changed or not inputs or inputs[0].shape != ids.shape or not torch.equal(inputs[0], ids):
            return None
        changed.append(change(output))
        return changed[0]

    handles = [module.register_forward_hook(hook) for module in model.modules() if isinstance(module, nn.Embedding)]
    try:
        yield changed
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def undisturbed(model: nn.Module, seed: int) -> Iterator[None]:
    """Evaluation mode, randomness of our own, and for a small model one thread (more only wait for each other) while it
    lasts; then everything is as it was."""
    threads = torch.get_num_threads()
    modes = {module: module.training for module in model.modules()}
    cudas = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=cudas):
        torch.manual_seed(seed)
        try:
            model.eval()
            if sum(p.numel() for p in model.parameters()) <= _FEW:
                torch.set_num_threads(1)
            yield
        finally:
            torch.set_num_threads(threads)
            for module, mode in modes.items():
                module.training = mode
