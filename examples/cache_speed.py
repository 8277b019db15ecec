"""How much faster a KV cache makes generation, as lengths and batches grow: a measured table.

    python examples/cache_speed.py [--plot FILE]

Recomputing the prefix at every step makes n tokens cost 1 + 2 + … + n = n (n + 1) / 2 passes of a position through the
model; a cache makes it n. The quotient, (n + 1) / 2, bounds what can be gained. How close one comes is a matter of
what else a step costs: Python and the launching of small operations cost the same in both, and in small models at
short lengths they are most of it. Predict before you run: does a larger batch help, or hurt?
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch
from counting_positions import recompute, with_cache
from pictures import add_plot_option

from leftward import Config, Decoder

LENGTHS, BATCHES = (9, 32, 64, 128, 256), (1, 8, 64, 512)


class Row(NamedTuple):
    batch: int
    length: int
    recomputing_ms: float
    cached_ms: float
    same: bool
    """The same tokens came out."""

    @property
    def speedup(self) -> float:
        return self.recomputing_ms / self.cached_ms

    @property
    def bound(self) -> float:
        """Positions read recomputing, over positions read with a cache."""
        return (self.length + 1) / 2


def small_model(max_seq_len: int) -> Decoder:
    torch.manual_seed(0)
    config = Config(vocab_size=64, max_seq_len=max_seq_len, n_layers=2, d_model=64, n_heads=4)
    decoder = Decoder(config).eval()
    for parameter in decoder.parameters():  # fresh blocks add nothing yet: give every weight a say
        torch.nn.init.normal_(parameter, std=0.2)
    return decoder


def measure(
    lengths: Iterable[int] = LENGTHS, batches: Iterable[int] = BATCHES, repeats: int = 3, limit: int = 1 << 20
) -> list[Row]:
    """Each from one token to `length` more; the median of `repeats`, the two ways in turn, so that a machine whose
    speed drifts drifts for both. Left out: what recomputing would read more than `limit` positions for."""
    lengths = list(lengths)
    decoder = small_model(max(lengths) + 1)
    rows = []
    for batch in batches:
        begin = torch.randint(64, (batch, 1))
        for loop in (recompute, with_cache):  # what is done once is not measured
            loop(decoder, begin, 2)
        for length in lengths:
            if batch * length * (length + 1) / 2 > limit:
                continue
            seconds: dict[str, list[float]] = {"recompute": [], "with_cache": []}
            for _ in range(repeats):
                outputs = []
                for loop in (recompute, with_cache):
                    start = time.perf_counter()
                    outputs.append(loop(decoder, begin, length))
                    seconds[loop.__name__].append(time.perf_counter() - start)
            milliseconds = (1000 * statistics.median(times) for times in seconds.values())
            rows.append(Row(batch, length, *milliseconds, same=torch.equal(*outputs)))
    return rows


def plot(rows: list[Row], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    lengths = sorted({row.length for row in rows})
    axes.plot(
        lengths, [(n + 1) / 2 for n in lengths], color="0.6", linestyle="--", label="positions saved: (n + 1) / 2"
    )
    for batch in sorted({row.batch for row in rows}):
        of_batch = [row for row in rows if row.batch == batch]
        axes.plot(
            [row.length for row in of_batch], [row.speedup for row in of_batch], marker="o", label=f"batch {batch}"
        )
    axes.set(xscale="log", yscale="log", xlabel="tokens generated, n", ylabel="times faster with a cache")
    axes.axhline(1, color="0.8", linewidth=1)
    axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_plot_option(parser)
    arguments = parser.parse_args()
    print(f"{torch.get_num_threads()} threads; the model: {small_model(257).n_parameters:,} parameters")
    rows = measure()
    print(f"{'batch':>5} {'tokens':>7} {'recomputing':>13} {'cached':>11} {'faster':>8} {'bound':>7}  same tokens")
    for row in rows:
        times = f"{row.recomputing_ms:10.1f} ms {row.cached_ms:8.1f} ms"
        print(f"{row.batch:5} {row.length:7} {times} {row.speedup:7.2f}× {row.bound:6.1f}×  {row.same}")
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
