"""Speculative decoding beside plain decoding, in turn, on text that repeats itself and on text that doesn't.

    python benchmarks/speculative.py MODEL [--draft MODEL] [--tokens 128] [--turns 3] [--dtype fp32]

A line a case: tokens a second with and without, medians of the turns, their ratio, the same ratio for a second of
processor time, which other work on the machine changes less, and the share of guesses that were right. Greedy, so that
the two must write the same text, which is checked.
"""

from __future__ import annotations

import argparse
import statistics
import time

import leftward as lw

_TEXT = (
    "The harbour master wrote down every ship that came in: the Mary Ann with coal from Newcastle, the Swallow with "
    "oranges and salt, the old Providence with nothing but her crew, and two fishing boats without a name.\n\n"
)
PROMPTS = {
    "a text that repeats": _TEXT * 3 + "The harbour master",
    "a story": "Once upon a time, in a small village by the sea, there lived an old fisherman who",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="fp32")
    asked = parser.parse_args()
    model = lw.load(asked.model, dtype=asked.dtype)
    ways = {"prompt_lookup": {"speculative": "prompt_lookup"}}
    if asked.draft is not None:
        ways["draft"] = {"draft": lw.load(asked.draft, dtype=asked.dtype)}
    print(f"{'':20} {'':14} plain  guessed  ratio    cpu  right")
    for name, prompt in PROMPTS.items():
        for way, settings in ways.items():
            plain, guessed = [], []
            for _ in range(asked.turns):
                plain.append(run(model, prompt, asked.tokens))
                guessed.append(run(model, prompt, asked.tokens, **settings))
            assert {text for text, *_ in plain} == {text for text, *_ in guessed}, "another text"
            wall, cpu = ([statistics.median(of[i] for of in runs) for runs in (plain, guessed)] for i in (1, 2))
            speeds = f"{wall[0]:5.1f} {wall[1]:8.1f} {wall[1] / wall[0]:6.2f} {cpu[1] / cpu[0]:6.2f}"
            print(f"{name:20} {way:14} {speeds} {guessed[0][3]:6.0%}", flush=True)


def run(model: lw.LanguageModel, prompt: str, n: int, **settings: object) -> tuple[str, float, float, float]:
    """The text, tokens a second behind the first and a second of processor time, and the share of guesses that were
    right."""
    sampling = model.sampling({"temperature": 0, "max_tokens": n})
    text, first, of_cpu, n_tokens = "", 0.0, 0.0, 0
    for event in model.events([prompt], sampling, **settings):  # type: ignore[arg-type]
        if not first:
            first, of_cpu = time.perf_counter(), time.process_time()
        text += event.text
        n_tokens += event.token_id is not None
    wall, cpu = time.perf_counter() - first, time.process_time() - of_cpu
    return text, (n_tokens - 1) / wall, (n_tokens - 1) / cpu, event.n_accepted / max(1, event.n_guessed)


if __name__ == "__main__":
    main()
