"""How fast a model generates on this machine: beside what its memory allows, and beside other programs with the same
file, which take turns with it."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from leftward.errors import UserError
from leftward.formats.kinds import Weights
from leftward.generation.engine import Engine
from leftward.generation.program import weights_of
from leftward.generation.requests import Request
from leftward.generation.settings import Sampling
from leftward.kernels.packed import Packed
from leftward.language_model import LanguageModel, load
from leftward.text.tokenizer import Tokenizer
from leftward.training.precision import choose_dtype

Rival = Literal["transformers", "llama.cpp"]
RIVALS: tuple[Rival, ...] = ("transformers", "llama.cpp")
PROMPT, OUTPUT, LONG_PROMPT, ROWS = 32, 128, 512, 16
"""Tokens of the prompt and the output whose speed is measured, of the prompt that is only read, all of them fewer where
the context is short; sequences at once."""
_COLD = "The quick brown fox jumps over the lazy dog. " * 4
_ARRAY = 1 << 26  # fp32 numbers, 256 MB: more than any cache holds


@dataclass(frozen=True)
class Lengths:
    """In tokens."""

    prompt: int
    output: int
    long_prompt: int

    @classmethod
    def of(cls, context: int) -> Lengths:
        prompt = min(PROMPT, context // 4)
        return cls(prompt, min(OUTPUT, context - prompt), min(LONG_PROMPT, context - 1))


@dataclass
class Contender:
    """A program with the model loaded, and what was measured of it."""

    name: str
    path: str
    """What computes."""
    write: Callable[[Sequence[Sequence[int]], int], None]
    """Continue prompts by so many tokens, greedily."""
    takes_several: bool = True
    """At once."""
    prefill: list[float] = field(default_factory=list)
    """Tokens/s of each repetition; the same of the next two."""
    decode: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Speed:
    """Medians, in tokens/s."""

    name: str
    path: str
    prefill: float
    decode: float
    together: float | None


@dataclass(frozen=True)
class Report:
    model: str
    threads: int
    bandwidth: float
    """Bytes/s at which this machine reads a large array, the best of five."""
    bytes_per_token: int
    """Of weights, which every token of one sequence reads."""
    lengths: Lengths
    first_token_seconds: float
    """From the start of a process to the first token behind a short prompt; median of three."""
    speeds: list[Speed]
    """Ours first."""

    @property
    def decode_limit(self) -> float:
        """Tokens/s, if reading the weights were all there is to do."""
        return self.bandwidth / self.bytes_per_token


def measure(
    path: Path | str,
    *,
    dtype: Weights = "stored",
    rivals: Sequence[str] = (),
    repeats: int = 5,
) -> Report:
    """Measure `path`, and with the same file each of `rivals`, in turns.

    Args:
        dtype: of our weights, as `load` takes it. The rivals have what they make of the file.

    Raises:
        UserError: the model can't be read, a rival is not installed or can't take it, or the context has fewer than
            four tokens.
    """
    if unknown := [rival for rival in rivals if rival not in RIVALS]:
        raise UserError(f"--vs {unknown[0]}: it can be {' or '.join(RIVALS)}")
    model = load(path, dtype=dtype)
    if model.config.max_seq_len < 4:
        raise UserError(f"the model's context is {model.config.max_seq_len}: 4 tokens are needed to measure")
    lengths = Lengths.of(model.config.max_seq_len)
    contenders = [_ours(model)]
    for rival in dict.fromkeys(rivals):
        contenders.append({"transformers": _transformers, "llama.cpp": _llama_cpp}[rival](Path(path)))
    draw = torch.Generator().manual_seed(0)

    def prompt(length: int) -> list[int]:
        return torch.randint(min(1000, model.config.vocab_size), (length,), generator=draw).tolist()

    text = _writable(model.tokenizer)
    bandwidth = 0.0
    for repeat in range(repeats + 1):  # the first warms up
        for contender in contenders:
            found = _measured(contender, prompt, lengths)
            if repeat:
                for speeds, speed in zip((contender.prefill, contender.decode, contender.together), found, strict=True):
                    if speed is not None:
                        speeds.append(speed)
        bandwidth = max(bandwidth, read_bandwidth())
    return Report(
        model=str(path),
        threads=torch.get_num_threads(),
        bandwidth=bandwidth,
        bytes_per_token=bytes_per_token(model),
        lengths=lengths,
        first_token_seconds=statistics.median(_cold_start(path, dtype, text) for _ in range(3)),
        speeds=[
            Speed(
                name=contender.name,
                path=contender.path,
                prefill=statistics.median(contender.prefill),
                decode=statistics.median(contender.decode),
                together=statistics.median(contender.together) if contender.together else None,
            )
            for contender in contenders
        ],
    )


def _measured(
    contender: Contender, prompt: Callable[[int], list[int]], lengths: Lengths
) -> tuple[float, float, float | None]:
    """Prefill, decode, and several at once, in tokens/s."""
    n = lengths.output
    prefill = lengths.long_prompt / _seconds(contender.write, [prompt(lengths.long_prompt)], 1)

    def decode(rows: int) -> float:
        prompts = [prompt(lengths.prompt) for _ in range(rows)]
        read, written = _seconds(contender.write, prompts, 1), _seconds(contender.write, prompts, n)
        return rows * (n - 1) / max(written - read, 1e-9)

    return prefill, decode(1), decode(ROWS) if contender.takes_several else None


def _seconds(work: Callable[..., object], *arguments: Any) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def read_bandwidth() -> float:
    """Bytes/s of summing up a large array, the best of five."""
    array = torch.ones(_ARRAY)
    return array.nbytes / min(_seconds(lambda: array.sum()) for _ in range(5))


def bytes_per_token(model: LanguageModel) -> int:
    """Of all matrices whose products every token takes part in."""
    total = 0
    for part, numel in weights_of(model.decoder):
        total += part.nbytes if isinstance(part, Packed) else numel * part.itemsize
    return total


def _writable(tokenizer: Tokenizer) -> str:
    """A short text, of the tokenizer's first characters where it knows no English."""
    try:
        tokenizer.encode(_COLD)
    except UserError:
        ids = (token_id for token_id in range(tokenizer.vocab_size) if token_id not in tokenizer.holes)
        return tokenizer.decode(ids)[:PROMPT]
    return _COLD


def _cold_start(path: Path | str, dtype: str, text: str) -> float:
    command = [sys.executable, "-m", "leftward.cli.main", "generate", str(path), "--dtype", dtype]
    command += ["--max-tokens", "1", "--truncate", "left"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as given, tempfile.TemporaryFile("w+") as said:
        given.write(text)
        given.seek(0)
        began = time.perf_counter()
        with subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=said) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            seconds = time.perf_counter() - began
        if process.returncode:
            said.seek(0)
            raise UserError(f"{' '.join(command)} failed: {said.read().strip()}")
    return seconds


def _ours(model: LanguageModel) -> Contender:
    engine = Engine(model.decoder, model.tokenizer, max_rows=ROWS, share_prefixes=False)

    def write(prompts: Sequence[Sequence[int]], n: int) -> None:
        sampling = Sampling(max_tokens=n, temperature=0)
        for ids in prompts:
            engine.submit(Request(ids=ids, sampling=sampling, eos_ids=()))
        for _ in engine.run():
            pass

    return Contender("leftward", engine.reader.path, write)


def _transformers(path: Path) -> Contender:
    """In the dtype in which this machine multiplies faster."""
    try:
        import transformers
    except ImportError:
        raise UserError("--vs transformers: it is not installed (pip install transformers gguf)") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[choose_dtype("auto", torch.device("cpu"))]
    where = (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (str(path), {})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(where[0], dtype=dtype, **where[1]).eval()

    @torch.inference_mode()
    def write(prompts: Sequence[Sequence[int]], n: int) -> None:
        ids = torch.tensor(prompts)
        theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            pad_token_id=0,
        )

    name = str(dtype).removeprefix("torch.")
    return Contender("transformers", f"transformers {transformers.__version__}, {name}", write)


def _llama_cpp(path: Path) -> Contender:
    try:
        import llama_cpp
    except ImportError:
        raise UserError("--vs llama.cpp: it is not installed (pip install llama-cpp-python)") from None
    if path.suffix != ".gguf":
        raise UserError(f"--vs llama.cpp: it reads .gguf files, and {path} is none")
    threads = torch.get_num_threads()
    theirs = llama_cpp.Llama(
        str(path),
        n_ctx=LONG_PROMPT + OUTPUT,
        n_batch=LONG_PROMPT,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def write(prompts: Sequence[Sequence[int]], n: int) -> None:
        (ids,) = prompts
        theirs.reset()
        theirs.eval(list(ids))
        for left in range(n - 1, -1, -1):
            token = theirs.sample(temp=0.0)
            if left:
                theirs.eval([token])

    name = f"llama-cpp-python {llama_cpp.__version__}"
    return Contender("llama.cpp", name, write, takes_several=False)
