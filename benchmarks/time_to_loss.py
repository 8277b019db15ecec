"""Time to a validation loss on a text's characters: recipes/shakespeare-char.yaml, beside nanoGPT's CPU recipe.

    python benchmarks/time_to_loss.py --data input.txt [--nanogpt DIR] [--seeds 3]

Each time is that of a whole process, from `python` to its exit, start-up included. Our loss is that of every character
of the validation split (the last tenth); nanoGPT's is its own estimate, printed at its last iteration. DIR is a
checkout of nanoGPT; the data it needs is written to DIR/data/leftward_benchmark. The two take turns, so that a machine
whose speed drifts drifts for both.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
DATASET = "leftward_benchmark"
# nanoGPT's README, "I only have a macbook"; log_interval only spares the terminal.
NANOGPT = (
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=500 "
    "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 "
    f"--dropout=0.0 --dataset={DATASET}"
).split()


def timed(command: list[str], directory: Path) -> tuple[float, str]:
    """Wall seconds and output of a whole process."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return seconds, done.stdout


def run_leftward(data: Path, seed: int, recipe: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        command = [sys.executable, "-m", "leftward.cli.main", "train", str(recipe)]
        seconds, _ = timed([*command, "--data", str(data), "--out", str(out), f"seed={seed}"], ROOT)
        summary = json.loads((out / "summary.json").read_text())
        return {
            "seconds": seconds,
            "loss": summary["val_loss"],
            "tokens": summary["tokens"],
            "params": summary["params"],
        }


def run_nanogpt(checkout: Path, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        # nanoGPT fixes its seed in the source; the order of runs is all that differs between repetitions.
        seconds, output = timed([sys.executable, *NANOGPT, f"--out_dir={directory}/out"], checkout)
        return {"seconds": seconds, "loss": float(re.findall(r"val loss ([\d.]+)", output)[-1]), "seed": seed}


def write_nanogpt_data(data: Path, checkout: Path) -> None:
    """What nanoGPT's data/shakespeare_char/prepare.py writes, for any text."""
    text = data.read_text(encoding="utf-8")
    characters = sorted(set(text))
    ids = {character: index for index, character in enumerate(characters)}
    directory = checkout / "data" / DATASET
    directory.mkdir(exist_ok=True)
    cut = int(len(text) * 0.9)
    for name, part in (("train", text[:cut]), ("val", text[cut:])):
        np.array([ids[character] for character in part], dtype=np.uint16).tofile(directory / f"{name}.bin")
    meta = {"vocab_size": len(characters), "stoi": ids, "itos": dict(enumerate(characters))}
    (directory / "meta.pkl").write_bytes(pickle.dumps(meta))


def show(name: str, runs: list[dict[str, float]]) -> None:
    seconds, losses = [run["seconds"] for run in runs], [run["loss"] for run in runs]
    spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    of = f"median of {len(runs)}: {min(seconds):.1f} to {max(seconds):.1f}"
    print(
        f"{name:9} {statistics.median(seconds):6.1f} s ({of})   validation loss {statistics.mean(losses):.4f}{spread}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "tinyshakespeare" / "input.txt")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to measure in turn")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "shakespeare-char.yaml")
    arguments = parser.parse_args()
    if not arguments.data.is_file():
        parser.error(f"{arguments.data} is missing: give a text file with --data")
    data, nanogpt = arguments.data.resolve(), arguments.nanogpt and arguments.nanogpt.resolve()
    if nanogpt:
        write_nanogpt_data(data, nanogpt)
    ours, theirs = [], []
    for seed in range(1, arguments.seeds + 1):
        ours.append(run_leftward(data, seed, arguments.recipe.resolve()))
        print(f"leftward, seed {seed}: {ours[-1]['seconds']:.1f} s, validation loss {ours[-1]['loss']:.4f}", flush=True)
        if nanogpt:
            theirs.append(run_nanogpt(nanogpt, seed))
            print(f"nanoGPT: {theirs[-1]['seconds']:.1f} s, validation loss {theirs[-1]['loss']:.4f}", flush=True)
    print(f"\n{ours[0]['params']:,.0f} parameters, {ours[0]['tokens']:,.0f} tokens trained on")
    show("leftward", ours)
    if theirs:
        show("nanoGPT", theirs)
        ratio = statistics.median(b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True))
        print(f"leftward takes 1/{ratio:.1f} of nanoGPT's time")


if __name__ == "__main__":
    main()
