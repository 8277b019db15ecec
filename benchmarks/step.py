"""A training step of GPT-2 124M in our loop, beside nanoGPT's model and AdamW: eager, and with torch.compile.

    python benchmarks/step.py [--nanogpt DIR] [--dtype fp32|bf16] [--steps 10] [--batch-size 4] [--seq-len 256]

DIR is a checkout of nanoGPT. Ours is the path of `leftward bench train`: the loop whole, with its data. nanoGPT's is
what its train.py does in a step: a batch from a file of random tokens, its model under autocast (for bf16), clipping,
its own choice of AdamW. Same architecture, decay, rate and betas; its vocabulary is padded to 50,304 as it does itself.

Each has a process of its own, which waits while another one's step is measured: they take turns step by step, so that
a machine whose speed drifts drifts for all. Each warms up before it is measured, which is when torch.compile compiles.
The peak is that of a product of 2048 x 2048 matrices, measured in ours before and after; all are held against the same
FLOPs (planner.count_flops of GPT-2, forward and backward).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANSWERS = sys.stdout
VOCAB_SIZE = 50_257
WEIGHT_DECAY, LR, BETAS, GRAD_CLIP = 0.1, 6e-4, (0.9, 0.95), 1.0
NANOGPT_WARM_UP = 5


class Taking(argparse.Namespace):
    """What is measured."""

    nanogpt: Path | None
    dtype: str
    steps: int
    batch_size: int
    seq_len: int
    compiled: bool


# ---- in the processes that are measured


def answer(seconds: float) -> None:
    """Say how long the last step took (0: none was asked for), and wait until the next one is to begin."""
    print(json.dumps(seconds), file=ANSWERS, flush=True)
    sys.stdin.readline()


def leftward(what: Taking) -> dict[str, Any]:
    from leftward.training.measuring import WARM_UP, measure
    from leftward.training.progress import Observer, Progress

    class Turns(Observer):
        began = 0.0

        def note(self, text: str) -> None:
            if "torch.compile failed" in text:
                print(text, file=sys.stderr)

        def stepped(self, progress: Progress) -> None:
            if progress.step >= WARM_UP:
                answer(time.perf_counter() - self.began if progress.step > WARM_UP else 0.0)
                self.began = time.perf_counter()

    recipe = {
        "model": {"preset": "gpt2", "dropout": 0.0},
        "training": {
            "batch_size": what.batch_size,
            "seq_len": what.seq_len,
            "dtype": what.dtype,
            "compile": what.compiled,
        },
        "optimizer": {"name": "adamw", "adamw_lr": LR, "weight_decay": WEIGHT_DECAY, "betas": [*BETAS]}
        | {"grad_clip": GRAD_CLIP},
    }
    found = measure(recipe, steps=what.steps, vocab_size=VOCAB_SIZE, observer=Turns())
    return found.to_dict()


def nanogpt(what: Taking) -> dict[str, Any]:
    import contextlib

    import numpy as np
    import torch

    assert what.nanogpt is not None
    sys.path.insert(0, str(what.nanogpt))
    from model import GPT, GPTConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(GPTConfig(dropout=0.0)).to(device)
    optimizer = model.configure_optimizers(WEIGHT_DECAY, LR, BETAS, device)
    parameters = sum(p.numel() for p in model.parameters())
    run: Callable[..., Any] = torch.compile(model) if what.compiled else model
    bf16 = torch.amp.autocast(device_type=device, dtype=torch.bfloat16)
    with tempfile.NamedTemporaryFile() as file:
        tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 1 << 20, dtype=np.uint16)
        tokens.tofile(file.name)
        for step in range(NANOGPT_WARM_UP + what.steps):
            began = time.perf_counter()
            data = np.memmap(file.name, dtype=np.uint16, mode="r")
            starts = torch.randint(len(data) - what.seq_len, (what.batch_size,)).tolist()
            x, y = (
                torch.stack([torch.from_numpy(data[i + k : i + k + what.seq_len].astype(np.int64)) for i in starts])
                for k in (0, 1)
            )
            with bf16 if what.dtype == "bf16" else contextlib.nullcontext():
                _, loss = run(x.to(device), y.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()  # waits for the device
            if step >= NANOGPT_WARM_UP - 1:
                answer(time.perf_counter() - began if step >= NANOGPT_WARM_UP else 0.0)
    on_device = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"memory_bytes": on_device or largest_so_far(), "parameters": parameters}


def largest_so_far() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- in the process that measures


class Taker:
    """A process that is measured, warmed up."""

    def __init__(self, name: str, options: list[str], compiled: bool) -> None:
        self.name = f"{name}, compiled" if compiled else name
        self.seconds: list[float] = []
        self._process = subprocess.Popen(
            [sys.executable, __file__, *options, "--take", name, *(["--compiled"] if compiled else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            sys.exit(f"{self.name} ended with {self._process.wait()}")
        return json.loads(line)

    def _go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def step(self) -> None:
        self._go()
        self.seconds.append(self._read())

    def end(self) -> dict[str, Any]:
        """What it found out about itself."""
        self._go()
        return dict(self._read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to measure in turn")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--mode", choices=["both", "eager", "compiled"], default="both")
    parser.add_argument("--take", choices=["leftward", "nanoGPT"], help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    what = parser.parse_args(namespace=Taking())
    if what.take is not None:
        sys.stdout = sys.stderr  # whatever else is printed is no answer
        found = leftward(what) if what.take == "leftward" else nanogpt(what)
        print(json.dumps(found), file=ANSWERS, flush=True)
        return
    names = ["leftward", *(["nanoGPT"] if what.nanogpt else [])]
    modes = {"both": (False, True), "eager": (False,), "compiled": (True,)}[what.mode]
    takers = [Taker(name, sys.argv[1:], compiled) for compiled in modes for name in names]
    for _ in range(what.steps):
        for taker in takers:
            taker.step()
    found = {taker.name: taker.end() for taker in takers}
    show(what, takers, found)


def show(what: Taking, takers: list[Taker], found: dict[str, dict[str, Any]]) -> None:
    ours, tokens = next(iter(found.values())), what.batch_size * what.seq_len
    peak = max(facts["peak_flops"] for name, facts in found.items() if name.startswith("leftward"))
    print(
        f"{what.batch_size} x {what.seq_len} tokens a step, {what.dtype} on {ours['device']}, {ours['threads']} "
        f"threads; a product of 2048 x 2048 matrices: {peak / 1e9:,.0f} GFLOP/s; medians of {what.steps}\n"
    )
    medians = {taker.name: statistics.median(taker.seconds) for taker in takers}
    for taker in takers:
        seconds, facts = medians[taker.name], found[taker.name]
        flops = ours["flops_per_step"] / seconds
        kernels = f" ({facts['kernels']} kernels)" if "kernels" in facts else ""
        print(
            f"{taker.name:19} {tokens / seconds:7,.0f} tokens/s   {flops / 1e9:6,.0f} GFLOP/s   {flops / peak:4.0%} of "
            f"the peak   {seconds:.3f} s ({min(taker.seconds):.3f} to {max(taker.seconds):.3f})   "
            f"{facts['memory_bytes'] / 1e9:.2f} GB   {facts['parameters']:,} parameters{kernels}"
        )
    for name in ("leftward", "leftward, compiled"):
        for other in ("nanoGPT", "nanoGPT, compiled"):
            if name in medians and other in medians:
                print(f"{name} does {medians[other] / medians[name]:.2f} times the tokens/s of {other}")


if __name__ == "__main__":
    main()
