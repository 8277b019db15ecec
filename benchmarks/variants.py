"""One forward pass of every variant beside the plain path, in one run: what each costs, as a ratio.

    python benchmarks/variants.py --tokens 2048

Plain is a Decoder of the same size with rotary positions, RMSNorm and causal attention through the kernel alone. A
variant's ratio says what its extra arithmetic costs; a window that is shorter than the text should pay.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from leftward import Config, Decoder

SIZE: dict[str, Any] = {"vocab_size": 1000, "n_layers": 4, "d_model": 512, "n_heads": 8, "n_kv_heads": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "learned positions": {"positions": "learned"},
    "sinusoidal positions": {"positions": "sinusoidal"},
    "no positions": {"positions": "none"},
    "half of each head rotated": {"rope_fraction": 0.5},
    "adjacent pairs": {"rope_pairing": "adjacent"},
    "yarn": {"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 512}},
    "alibi": {"positions": "alibi"},
    "layernorm": {"norm": "layernorm"},
    "norm 1 + w": {"norm_weight": "one_plus"},
    "post": {"block": "post"},
    "sandwich": {"block": "sandwich"},
    "parallel, shared norm": {"block": "parallel_shared"},
    "qk-norm over all heads": {"qk_norm": "whole"},
    "window 256": {"window": 256},
    "window 256, every second layer": {"window": 256, "attention_pattern": "LG"},
    "softcap": {"attn_softcap": 50.0},
    "softcap, window 256": {"attn_softcap": 50.0, "window": 256},
    "sinks": {"attn_sinks": True},
    "sinks, window 256": {"attn_sinks": True, "window": 256},
    "8 experts of a quarter, 4 a token": {"n_experts": 8, "n_experts_per_token": 4, "d_ff": 352},
    "no mask": {"causal": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    arguments = parser.parse_args()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    ids = torch.randint(SIZE["vocab_size"], (1, arguments.tokens), generator=torch.Generator().manual_seed(0))
    documents = torch.arange(arguments.tokens)[None] // 256
    calls = {}
    for name, values in VARIANTS.items():
        decoder = Decoder(Config(**{**SIZE, "max_seq_len": arguments.tokens, **values})).to(dtype).eval()
        calls[name] = lambda decoder=decoder: decoder.hidden(ids)
    plain = Decoder(Config(**{**SIZE, "max_seq_len": arguments.tokens})).to(dtype).eval()
    calls["documents of 256"] = lambda: plain.hidden(ids, documents=documents)
    calls["prefix of a quarter"] = lambda: plain.hidden(ids, prefix_lengths=[arguments.tokens // 4])
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for turn in range(arguments.repeats + 1):  # in turn, so that a noisy minute falls on all
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                if turn:
                    times[name].append(time.perf_counter() - began)
    base = statistics.median(times["plain"])
    threads = torch.get_num_threads()
    print(f"{arguments.tokens} tokens, {arguments.dtype}, {threads} threads, medians of {arguments.repeats}")
    for name, seconds in times.items():
        print(f"{name:36} {1000 * statistics.median(seconds):8.1f} ms  {statistics.median(seconds) / base:5.2f}")


if __name__ == "__main__":
    main()
