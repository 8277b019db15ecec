"""Generation on a CPU: how fast every kind of weights is beside what memory allows and beside peers, and what it costs
in perplexity.

    python benchmarks/generate.py model.gguf --text input.txt [--vs transformers] [--vs llama.cpp] [--dtypes stored q8]

Speeds are those of `leftward bench generate`: medians, the programs in turns. The perplexity is that of the first
--characters of the text, with keys and values in fp32, and its ratio to the perplexity of the file's numbers in fp32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import leftward as lw
from leftward.speed import RIVALS, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, help="a text whose perplexity is compared")
    parser.add_argument("--characters", type=int, default=20_000)
    parser.add_argument("--dtypes", nargs="+", default=["stored", "q8", "q4", "bf16", "fp32"])
    parser.add_argument("--vs", action="append", default=[], choices=RIVALS)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    exact = None
    if arguments.text:
        text = arguments.text.read_text(encoding="utf-8")[: arguments.characters]
        exact = lw.load(arguments.model).evaluate([text]).perplexity
        print(f"perplexity of {len(text):,} characters, in fp32: {exact:.3f}")
    print(
        "\n| weights | MB a token | written, tokens/s | of the limit | read | 16 at once | first token | perplexity |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for number, dtype in enumerate(arguments.dtypes):
        found = measure(
            arguments.model, dtype=dtype, rivals=arguments.vs if not number else (), repeats=arguments.repeats
        )
        ours, *others = found.speeds
        quality = ""
        if exact is not None:
            ratio = lw.load(arguments.model, dtype=dtype).evaluate([text]).perplexity / exact
            quality = f"{ratio - 1:+.2%}"
        share = ours.decode / found.decode_limit
        print(
            f"| {dtype} | {found.bytes_per_token / 1e6:.0f} | {ours.decode:.1f} | {share:.0%} "
            f"| {ours.prefill:.0f} | {ours.together:.0f} | {found.first_token_seconds:.2f} s | {quality} |",
            flush=True,
        )
        for other in others:
            together = "" if other.together is None else f"{other.together:.0f}"
            print(f"| {other.path} | | {other.decode:.1f} | | {other.prefill:.0f} | {together} | | |", flush=True)
    print(f"\n{found.threads} threads; {found.bandwidth / 1e9:.1f} GB/s in reading a large array")


if __name__ == "__main__":
    main()
