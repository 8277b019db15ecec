"""How fast a recipe trains on this machine, against what the machine can do: measured in the real loop, on real or
random tokens, with the peak taken in the same minute and not from a table of devices."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leftward.errors import UserError
from leftward.training.progress import Observer, Progress
from leftward.training.recipe import Recipe

WARM_UP = 3  # steps in which memory is taken and kernels are chosen
_PEAK_SIZE = 2048


@dataclass(frozen=True)
class Measurement:
    """Medians over the steps after the first three."""

    steps: int
    tokens_per_step: int
    step_seconds: float
    data_seconds: float
    """Of a step, spent waiting for its tokens."""
    flops_per_step: float
    """Of the products with weights and of attention's visible half, forward and backward (planner.count_flops)."""
    peak_flops: float
    """FLOP/s of a product of two 2048² matrices in this dtype, measured before and after the steps: the better."""
    memory_bytes: int
    """The process's largest so far; on a GPU what PyTorch allocated at most."""
    parameters: int
    device: str
    dtype: str
    threads: int
    kernels: str
    """native, compiled or plain."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def flops_per_second(self) -> float:
        return self.flops_per_step / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (Chowdhery et al. 2022, arXiv 2204.02311, section 4.1)."""
        return self.flops_per_second / self.peak_flops

    def to_dict(self) -> dict[str, Any]:
        derived = ("tokens_per_second", "flops_per_second", "mfu")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


def measure(
    recipe: Mapping[str, Any], *, steps: int = 10, vocab_size: int = 50_304, observer: Observer | None = None
) -> Measurement:
    """Train for some steps in a temporary directory, and tell how long they took.

    Args:
        recipe: its fields as plain data. Without data.path the tokens are random, of a vocabulary of `vocab_size`.
        observer: is told of the run, and may take its time between steps: that is not counted.

    Raises:
        UserError: the recipe is none, or its data can't be read.
        Interrupted: a signal ended it.
    """
    if steps < 1:
        raise UserError(f"steps is {steps}: it must be at least 1")
    with tempfile.TemporaryDirectory(prefix="leftward-bench-") as directory:
        values = dict(recipe)
        data = values.get("data") or {}
        if isinstance(data, Mapping) and not (data.get("path") or data.get("mix")):
            text = Path(directory) / "random.txt"
            _random_text(text, vocab_size)
            values["data"] = {**data, "path": str(text)}
            if values.get("init_from") is None:  # which brings its tokenizer
                values["tokenizer"] = {"kind": "word", "vocab_size": vocab_size}
        whole = Recipe.from_dict(values)
        short = Recipe.from_dict(
            whole.model_dump(exclude={"logging"})
            | {
                "out": str(Path(directory) / "run"),
                "training": whole.training.model_dump()
                | {"max_steps": WARM_UP + steps, "minutes": None, "max_epochs": None, "eval_interval": 0}
                | {"save_interval": 10**9, "keep_every": None, "patience": None, "sample_prompts": []},
                "schedule": {**whole.schedule.model_dump(), "warmup_steps": 0},
            }
        )
        return _measured(short, steps, observer or Observer())


def _measured(recipe: Recipe, steps: int, observer: Observer) -> Measurement:
    import torch

    from leftward import files
    from leftward.formats.hf import config_from_hf
    from leftward.kernels import native
    from leftward.planner import count_flops, count_parameters
    from leftward.training import directory, loop
    from leftward.training.precision import choose_device, choose_dtype, product_seconds

    device = choose_device(recipe.training.device)
    dtype = choose_dtype(recipe.training.dtype, device)
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"dtype": dtype})})
    seconds = [product_seconds(_PEAK_SIZE, device, [dtype])[dtype]]
    watcher = _Watcher(WARM_UP + steps, observer)
    with directory.new(recipe) as made:
        with contextlib.suppress(_Enough):
            loop.run(recipe, made, watcher)
        config = config_from_hf(files.read_json(made / "config.json"))
        recipe = directory.read(made)  # with what it began from settled
    seconds.append(product_seconds(_PEAK_SIZE, device, [dtype])[dtype])
    with native.in_use() if device.type == "cpu" else contextlib.nullcontext("plain") as which:
        kernels = "compiled" if recipe.training.compile else which.partition(":")[0]
    tokens = recipe.training.batch_size * recipe.seq_len
    return Measurement(
        steps=steps,
        tokens_per_step=tokens,
        step_seconds=statistics.median(watcher.step_seconds[WARM_UP:]),
        data_seconds=statistics.median(watcher.data_seconds[WARM_UP:]),
        flops_per_step=count_flops(config, recipe.seq_len).training_per_token * tokens,
        peak_flops=2 * _PEAK_SIZE**3 / min(seconds),
        memory_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else _largest_so_far(),
        parameters=count_parameters(config).total,
        device=device.type,
        dtype=dtype,
        threads=torch.get_num_threads(),
        kernels=kernels,
    )


class _Enough(Exception):
    """All steps are done; what would come is an evaluation."""


class _Watcher(Observer):
    def __init__(self, steps: int, shown: Observer) -> None:
        self.step_seconds: list[float] = []
        self.data_seconds: list[float] = []
        self._steps, self._shown = steps, shown
        self._last = 0.0

    def note(self, text: str) -> None:
        self._shown.note(text)

    def starting(self, step: int) -> None:
        self._last = time.perf_counter()

    def stepped(self, progress: Progress) -> None:
        now = time.perf_counter()
        self.step_seconds.append(now - self._last)
        self.data_seconds.append(progress.data_seconds)
        self._shown.stepped(progress)
        if progress.step == self._steps:
            raise _Enough
        self._last = time.perf_counter()


def _largest_so_far() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _random_text(path: Path, vocab_size: int) -> None:
    """Words in random order, each as often as any other."""
    words, draw = [f"w{i}" for i in range(vocab_size)], random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(max(4, 200_000 // vocab_size)):
            draw.shuffle(words)
            file.writelines(" ".join(words[i : i + 1000]) + "\n" for i in range(0, vocab_size, 1000))
