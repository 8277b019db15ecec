"""Our GGUF files beside llama.cpp, which they are for: ids of awkward texts, logits and greedy text, for each kind of
number. A table in Markdown.

    pip install llama-cpp-python            # compiles llama.cpp for some minutes
    python benchmarks/llamacpp.py --model MODEL [--kinds F32 F16 Q8_0 Q4_0 Q4_K Q6_K] [--tokens 32]

MODEL is whatever `lw.load` takes. It is written as `leftward convert --to gguf` writes it, and both programs read that
file, so that what is compared is how they compute with the same weights. llama.cpp multiplies quantised weights with
activations that it has rounded to 8 bits, and looks GELU up in a table of 16-bit numbers: that is the rest.
(This file can't be called llama_cpp.py: a script comes before the package of its name.)
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import leftward as lw
from leftward.errors import UserError
from leftward.formats.converting import write_gguf_model
from leftward.formats.loading import open_model
from leftward.generation.decode import decode
from leftward.generation.sampling import Sampling

try:
    import llama_cpp
except ImportError:
    sys.exit("llama.cpp is absent: pip install llama-cpp-python (it is compiled, which takes some minutes)")

KINDS = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
FP32 = 0  # ggml's number of it: of the cache, which llama.cpp keeps in 16 bits otherwise
PROMPTS = ("Once upon a time", "The capital of France is", "def fibonacci(n):\n    ", "1, 2, 3, 4,")
TEXTS = (
    *("", " ", "  ", "   leading", "trailing   ", "a  b   c    d", "\t\ttabs", "\n", "\n\n\n\n", "a\r\nb", " \n \n "),
    *("Hello, world!", "don't I'LL we've", "camelCase HTTPServer", "1234567890 3.14159 1,000", "x=1;y=2", "¿Qué?"),
    *("naïve café", "Größe straße", "Привет, мир", "你好，世界", "こんにちは", "안녕하세요", "שלום", "مرحبا"),
    *("😀🏳️‍🌈👩‍👩‍👧", "𝄞𝔘𝔫𝔦", "½ ² ﬁ Ⅷ", "\u00a0\u3000\u200b\ufeff", "▁▁ ▁", "\x00\x01\x7f", "\ufffd"),
    *("<s></s><unk>", "<|endoftext|>", "<|im_start|>user\n", "<start_of_turn>", "<0x41>", "[PAD5]", "[INST]"),
    *("if (a[i] != b) { return; }\n\n\t}", "https://example.com/?q=1&r=%20", "aaaaaaaaaaaaaaaaaaaaaaaa", "\\n\\t"),
)


def texts_that_differ(tokenizer: Any, llama: Any) -> tuple[int, list[str]]:
    """How many texts the tokenizer can write at all, and those whose ids differ."""
    written = 0
    differ = []
    for text in TEXTS:
        try:
            ids = tokenizer.encode(text)
        except UserError:
            continue
        written += 1
        differ += [text] if llama.tokenize(text.encode(), add_bos=False) != ids else []
    return written, differ


def last_logits(llama: Any, ids: Sequence[int]) -> torch.Tensor:
    """[V]"""
    llama.reset()
    llama.eval(ids)
    values = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
    return torch.tensor([values[i] for i in range(llama.n_vocab())])


def measured(path: Path, n_tokens: int) -> tuple[list[object], list[str]]:
    """The cells of one file's row, and the texts whose ids differ."""
    model = lw.load(path)
    n_ctx = min(model.config.max_seq_len, 128 + n_tokens)
    llama = llama_cpp.Llama(str(path), n_ctx=n_ctx, type_k=FP32, type_v=FP32, verbose=False)
    written, differ = texts_that_differ(model.tokenizer, llama)
    differences, deviations, alike = [], [], []
    for prompt in PROMPTS:
        try:
            ids = model.tokenizer.encode(prompt, add_bos=True)
        except UserError:
            continue
        with torch.inference_mode():
            ours = model.decoder(torch.tensor([ids]))[0, -1].float()
        differences.append((last_logits(llama, ids) - ours).abs().max().item())
        deviations.append(ours.std().item())
        llama.reset()
        theirs = itertools.islice(llama.generate(ids, temp=0.0), n_tokens)
        greedy = decode(model.decoder, model.tokenizer, [ids], [Sampling(temperature=0, max_tokens=n_tokens)])
        pairs = zip((event.token_id for event in greedy), theirs, strict=False)
        alike.append(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    cells: list[object] = [f"{path.stat().st_size / 1e6:.1f}", f"{written - len(differ)} of {written}"]
    cells += [f"{max(differences):.1e}", f"{max(deviations):.1f}", " ".join(map(str, alike))]
    return cells, differ


def rows(model: str, kinds: Sequence[str], n_tokens: int) -> Iterator[str]:
    loaded = open_model(model)
    for kind in kinds:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.gguf"
            write_gguf_model(path, loaded, DTYPES.get(kind, "fp32"), None if kind in DTYPES else kind, "benchmark")
            cells, differ = measured(path, n_tokens)
        yield "| " + " | ".join(map(str, [Path(model).name, kind, *cells])) + " |"
        for text in differ:
            print(f"  the ids of {text!r} differ", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", dest="models", nargs="+", required=True, metavar="MODEL")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--tokens", type=int, default=32, help="of greedy text, for each of the prompts")
    arguments = parser.parse_args()
    print("| model | kind | MB | ids alike | logits differ by | their deviation | greedy tokens alike |")
    print("|---|---|---|---|---|---|---|", flush=True)
    try:
        for model in arguments.models:
            for row in rows(model, arguments.kinds, arguments.tokens):
                print(row, flush=True)
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
