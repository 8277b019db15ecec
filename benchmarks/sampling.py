"""What it costs to choose a token: ours beside transformers' processors and a draw, in one run, on one thread.

    python benchmarks/sampling.py

Logits as a language model's: likelihoods that fall with a power of the rank, and ones so flat that a third of the
vocabulary is in the nucleus. Milliseconds of CPU for the whole batch, medians; the ratio is transformers' over ours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import transformers

from leftward.generation.rules import Row
from leftward.generation.sampling import choose
from leftward.generation.settings import Sampling

SETTINGS: dict[str, tuple[dict[str, float], list[Callable[..., torch.Tensor]]]] = {
    "greedy": ({"temperature": 0.0}, []),
    "temperature": ({"temperature": 0.8, "top_p": 1.0}, [transformers.TemperatureLogitsWarper(0.8)]),
    "top_k 40": (
        {"temperature": 0.8, "top_p": 1.0, "top_k": 40},
        [transformers.TemperatureLogitsWarper(0.8), transformers.TopKLogitsWarper(40)],
    ),
    "top_p 0.95": (
        {"temperature": 0.8, "top_p": 0.95},
        [transformers.TemperatureLogitsWarper(0.8), transformers.TopPLogitsWarper(0.95)],
    ),
    "min_p 0.05": (
        {"temperature": 0.8, "top_p": 1.0, "min_p": 0.05},
        [transformers.TemperatureLogitsWarper(0.8), transformers.MinPLogitsWarper(0.05)],
    ),
    "typical_p 0.95": (
        {"temperature": 0.8, "top_p": 1.0, "typical_p": 0.95},
        [transformers.TemperatureLogitsWarper(0.8), transformers.TypicalLogitsWarper(0.95)],
    ),
}


def random_logits(batch: int, vocab_size: int, power: float) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(0)
    by_rank = -power * torch.arange(1, vocab_size + 1).log()
    noise = torch.randn(batch, vocab_size, generator=numbers) * 0.5
    return torch.stack([row[torch.randperm(vocab_size, generator=numbers)] for row in by_rank + noise])


def theirs(logits: torch.Tensor, processors: list[Callable[..., torch.Tensor]], ids: torch.Tensor) -> torch.Tensor:
    for process in processors:
        logits = process(ids, logits)
    return logits.softmax(-1).multinomial(1)[:, 0] if processors else logits.argmax(-1)


def cpu_ms(function: Callable[[], object], turns: int = 7) -> float:
    function()
    times = []
    for _ in range(turns):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times) * 1000


def main() -> None:
    torch.set_num_threads(1)
    for vocab_size in (49_152, 262_144):
        for batch in (1, 16):
            for name, power in (("peaked", 1.8), ("flat", 1.0)):
                logits = random_logits(batch, vocab_size, power)
                ids = torch.zeros(batch, 1, dtype=torch.long)
                for rule, (settings, processors) in SETTINGS.items():
                    sampling = Sampling.of(settings)
                    rows = [Row(sampling=sampling, ids=[0], n_prompt=1, draw=(i + 0.5) / batch) for i in range(batch)]
                    ours = cpu_ms(lambda logits=logits, rows=rows: choose(logits, rows))  # type: ignore[misc]
                    peer = cpu_ms(lambda x=logits, p=processors, ids=ids: theirs(x, p, ids))  # type: ignore[misc]
                    print(
                        f"{batch:3} x {vocab_size:,} {name:7} {rule:15} "
                        f"ours {ours:8.2f} ms  transformers {peer:8.2f} ms  ratio {peer / ours:5.1f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
