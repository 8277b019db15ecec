"""Other people's models: how exactly they load, what quantising costs, how long loading takes. Tables in Markdown.

    python benchmarks/checkpoints.py                                    # every family beside transformers' own class
    python benchmarks/checkpoints.py --perplexity MODEL --text FILE     # every kind of number that can be written
    python benchmarks/checkpoints.py --load MODEL.gguf                  # a process from its start to its first logits

The families are the tiny random models of tests/formats/test_families.py. MODEL is whatever `lw.load` takes; the text
is the first --tokens of FILE, the same for all kinds.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import leftward as lw
from leftward.errors import UserError
from leftward.formats.converting import write_gguf_model
from leftward.formats.gguf import GGUF
from leftward.formats.gguf_models import to_gguf
from leftward.formats.hf import family_of, meta_state
from leftward.formats.kinds import KINDS
from leftward.formats.loading import open_model
from leftward.formats.model_directory import load_model, save_model
from leftward.formats.quants import quantise
from leftward.model.cache import KVCache
from leftward.presets import PRESETS

ROOT = Path(__file__).parents[1]


def print_table(header: str, rows: Iterable[Iterable[object]]) -> None:
    print(header + "\n" + "|".join(["", *["---"] * (header.count("|") - 1), ""]), flush=True)
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


# ---- families


class Measured(NamedTuple):
    """One case. Differences are the largest of a logit."""

    logits: float
    """From transformers' own."""
    largest: float
    """Of transformers' logits, to judge the differences by."""
    cached: float
    """With a cache, in chunks, from one pass."""
    padded: float
    """A row beside a longer one, from the row alone."""
    greedy: bool
    """64 tokens are those of transformers' generate."""
    back: bool
    """Written as a Hugging Face directory, transformers has it back: every tensor to the bit."""
    gguf: str | None
    """The architecture of llama.cpp that it is written as."""


def gguf_architecture(config: lw.Config) -> str | None:
    try:
        return to_gguf(config, meta_state(config))[0]["general.architecture"]
    except UserError:
        return None


@torch.inference_mode()
def measure(case: str) -> tuple[str, Measured]:
    """The model_type of a case, and what was found."""
    import transformers
    from test_families import CASES, greedy, ids_of, make

    theirs = make(*CASES[case])
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(Path(directory) / "theirs")
        ours, _, _ = load_model(Path(directory) / "theirs")
        model_type = theirs.config.model_type
        save_model(Path(directory) / "ours", ours.config, ours.state_dict(), model_type=model_type)
        back = transformers.AutoModelForCausalLM.from_pretrained(Path(directory) / "ours").state_dict()
    ids = ids_of(2, 96)  # as long as the model goes, and longer than its windows
    expected, logits = theirs(ids).logits, ours(ids)
    cache = KVCache(ours.config, 2, 96, rewindable=0)
    chunks = torch.cat([ours(chunk, cache) for chunk in ids.split([20, 1, 39, 36], dim=1)], dim=1)
    padded = ours(ids[:, :30], lengths=[30, 11])[1, :11]
    prompt = ids_of(1, 30)
    generated = theirs.generate(prompt, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    state = theirs.state_dict()
    return model_type, Measured(
        logits=float((logits - expected).abs().max()),
        largest=float(expected.abs().max()),
        cached=float((chunks - logits).abs().max()),
        padded=float((padded - ours(ids[1:, :11])[0]).abs().max()),
        greedy=greedy(ours, prompt, 64) == generated[0, 30:].tolist(),
        back=state.keys() == back.keys() and all(torch.equal(state[name], back[name]) for name in state),
        gguf=gguf_architecture(ours.config),
    )


def print_families() -> None:
    import transformers

    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "formats")]
    from test_families import CASES

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    families: dict[str, list[Measured]] = defaultdict(list)
    for case in CASES:
        model_type, measured = measure(case)
        families[model_type].append(measured)

    # Some tiny models have a window or a scale that no published one has, and llama.cpp does not.
    published = {(family_of(config), gguf_architecture(config)) for config in map(lw.preset, PRESETS)}

    def rows() -> Iterator[list[object]]:
        for model_type, cases in families.items():
            logits, largest, cached, padded, greedy, back, gguf = zip(*cases, strict=True)
            of = [f"{sum(found)} of {len(cases)}" for found in (greedy, back)]
            worst = [f"{max(found):.0e}" for found in (logits, cached, padded)]
            names = {*gguf} - {None} or {name for family, name in published if family == model_type} - {None}
            names = ", ".join(sorted(names)) or "–"
            yield [f"`{model_type}`", len(cases), worst[0], f"{max(largest):.1f}", *worst[1:], *of, names]

    print(f"transformers {transformers.__version__}, torch {torch.__version__}, fp32, {len(CASES)} models")
    header = "| family | models | logits differ | of up to | cache | padding | greedy text | back there | GGUF |"
    print_table(header, rows())


# ---- quantising


def can_be_written(kind: str) -> bool:
    try:
        quantise(kind, torch.zeros(256))
    except UserError:
        return False
    return kind[0] not in "I" and kind != "F64"  # integers are no weights


def print_perplexity(model: Path, text_file: Path, tokens: int) -> None:
    loaded = open_model(model)
    if loaded.tokenizer is None:
        sys.exit(f"{model} has no tokenizer")
    text = loaded.tokenizer.decode(loaded.tokenizer.encode(text_file.read_text(encoding="utf-8"))[:tokens])
    plain = lw.LanguageModel(loaded.decoder, loaded.tokenizer).score(text)
    print(f"{model.name}: {len(plain.ids):,} tokens of {text_file.name}, {plain.n_bytes:,} bytes")

    def rows() -> Iterator[list[object]]:
        for kind in sorted(filter(can_be_written, KINDS), key=lambda kind: -KINDS[kind].nbytes / KINDS[kind].block):
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "model.gguf"
                write_gguf_model(path, loaded, "fp32", kind, model.stem)
                score, infos = lw.load(path).score(text), GGUF.open(path).tensors.values()
                bits = 8 * sum(info.nbytes for info in infos) / loaded.decoder.n_parameters
                size = path.stat().st_size
            weights: Counter[str] = Counter()
            for info in infos:
                weights[info.kind] += info.nbytes * KINDS[info.kind].block // KINDS[info.kind].nbytes
            shares = ((name, round(100 * count / weights.total())) for name, count in weights.most_common())
            yield [
                kind,
                "none" if KINDS[kind].block == 1 else "ours" if kind.endswith("_K") else "ggml's",
                f"{bits:.2f}",
                f"{size / 1e6:.1f}",
                ", ".join(f"{name} {share} %" for name, share in shares if share),
                f"{score.perplexity:.4f}",
                f"{100 * (score.perplexity / plain.perplexity - 1):+.2f} %",
                f"{score.bits_per_byte:.4f}",
            ]

    header = "| --quantize | rounding | bits a weight | MB | weights are | perplexity | change | bits/byte |"
    print_table(header, rows())


# ---- loading

OURS = """
import resource, sys, torch, leftward as lw
model = lw.load(sys.argv[1])
with torch.inference_mode():
    logits = model.decoder(torch.tensor([model.tokenizer.encode(sys.argv[2], add_bos=True)]))
"""
THEIRS = """
import pathlib, resource, sys, torch, transformers
path = pathlib.Path(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
with torch.inference_mode():
    logits = model(**tokenizer(sys.argv[2], return_tensors="pt")).logits
"""
SAYS = "print(int(logits[0, -1].argmax()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"


def time_first_logits(model: Path) -> None:
    found: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
    for _ in range(3):  # in turn, so that a noisy minute falls on both
        for name, code in {"leftward": OURS, "transformers": THEIRS}.items():
            began = time.perf_counter()
            command = [sys.executable, "-c", code + SAYS, str(model.resolve()), "The capital of France is"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr}")
            token, memory = done.stdout.split()[-2:]
            found[name].append((time.perf_counter() - began, token, int(memory)))
    if len({token for runs in found.values() for _, token, _ in runs}) > 1:
        print("the two disagree on the next token", file=sys.stderr)

    def rows() -> Iterator[list[object]]:
        for name, runs in found.items():
            seconds = sorted(run[0] for run in runs)
            of = f"{statistics.median(seconds):.1f} ({seconds[0]:.1f} to {seconds[-1]:.1f})"
            yield [name, of, f"{max(run[2] for run in runs) / 1024**2:.1f}"]

    print(f"{model.name}, {model.stat().st_size / 1e6:.0f} MB: fp32, a process from its start to its end, median of 3")
    print_table("| | s | GiB at most |", rows())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--perplexity", type=Path, metavar="MODEL")
    parser.add_argument("--text", type=Path, metavar="FILE", help="for --perplexity")
    parser.add_argument("--tokens", type=int, default=2048, help="how many of the text's first tokens")
    parser.add_argument("--load", type=Path, metavar="MODEL.gguf")
    arguments = parser.parse_args()
    if bool(arguments.perplexity) != bool(arguments.text):
        parser.error("--perplexity and --text belong together")
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    if arguments.perplexity:
        print_perplexity(arguments.perplexity, arguments.text, arguments.tokens)
    if arguments.load:
        time_first_logits(arguments.load)
    if not arguments.perplexity and not arguments.load:
        print_families()


if __name__ == "__main__":
    main()
