"""Texts → token ids and what is to be known of each text, on all cores.

The cores are kept busy by processes, each of which encodes by itself: threads would take turns wherever Python handles
what the library gives. A process reads texts from its standard input and answers on its standard output, so that a
program that calls us need not be one that can be imported a second time, and a process whose parent was killed ends.
Which texts, and what becomes of the answers, is prepare.py's.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from leftward.data.duplicates import signatures
from leftward.data.scripts import letters_by_script
from leftward.data.sources import cut_place
from leftward.errors import UserError
from leftward.text.tokenizer import Tokenizer

BY_KEY, TRAIN, VAL = range(3)
"""The side that a text is for: as its document's key decides, or settled from the start."""

ROW = np.dtype(
    [
        ("tokens", "<u4"),  # with the separator before a document
        ("characters", "<u4"),
        ("bytes", "<u4"),
        ("side", "u1"),
        ("starts", "?"),
        ("ends", "?"),
        ("key", "<u8"),
        ("digest", "<u8", (2,)),
    ]
)
"""What is kept of a text."""

_KEYS = 1 << 64
_SHORT = 4096  # characters: the library takes twice as long for a text of 256 K, which is in no cache any more
# Ordinary text, in which a tokenizer that merges over spaces or lines would do so.
_PROBE = """It was one of the first, and there is a lot of it: "New York" (in the U.S.), 3.5 % of 1 234 567 people.
If you don't, it's not I'm, we'll see.\tTabs,  two  spaces; such as a = [1, 2] and so on.
    def f(x):
        return x  # the end of the line

Über die Straße; où ça? Это не то, что я имею в виду. 日本語の文 と 中文。 한국어 입니다 😀 é of the year 2024-01-01."""


class Text(NamedTuple):
    """A document, or a part of one that is too long to be held whole."""

    text: str
    side: int
    starts: bool
    """Whether a document begins with it; then a separator goes before."""
    ends: bool


@dataclass(frozen=True)
class Encoded:
    """Some texts as tokens."""

    tokens: NDArray[Any]
    """[N], of all texts, in the type of the dataset."""
    rows: NDArray[Any]
    """[texts] of `ROW`."""
    letters: collections.Counter[str]
    """By script."""
    signatures: NDArray[np.uint32]
    """[texts, PERMUTATIONS], or [texts, 0] where near copies are not looked for."""


class Encoder:
    """What is done to a text, wherever that is."""

    def __init__(self, tokenizer: Tokenizer, seed: int, near: bool) -> None:
        self._tokenizer = tokenizer
        self._salt = (seed % _KEYS).to_bytes(8, "little")
        self._near = near
        self._dtype = smallest_type(tokenizer.vocab_size)
        self._can_cut = tokenizer.kind != "char" and self._parts_at_cuts()
        ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        # What ends the document before it, then what begins one, where that is another token: Llama's </s> <s>.
        self._separator = np.array(ends + (tokenizer.before if tokenizer.before != ends else []), dtype=np.uint32)

    def __call__(self, texts: Sequence[Text]) -> Encoded:
        """Raises: UserError where the vocabulary can't write a text."""
        plain = [text.text for text in texts]
        short = [self._cut(text) for text in plain]
        starts = [text.starts and i == 0 for text, parts in zip(texts, short, strict=True) for i in range(len(parts))]
        encoded = iter(self._tokenizer.encode_batch([part for parts in short for part in parts], starts=starts))
        parts, rows = [], np.zeros(len(texts), dtype=ROW)
        for row, text, of_text in zip(rows, texts, short, strict=True):
            data = text.text.encode()
            before = self._separator if text.starts else self._separator[:0]
            tokens_of_text = [before, *itertools.islice(encoded, len(of_text))]
            parts += tokens_of_text
            row["tokens"] = sum(map(len, tokens_of_text))
            row["characters"], row["bytes"] = len(text.text), len(data)
            row["side"], row["starts"], row["ends"] = text.side, text.starts, text.ends
            # A random number that depends on the seed and on the beginning of a document only: copies share it.
            row["key"] = int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=self._salt).digest(), "little")
            row["digest"] = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), dtype="<u8")
        tokens = np.concatenate(parts).astype(self._dtype) if parts else np.empty(0, self._dtype)
        return Encoded(tokens, rows, letters_by_script(plain), signatures(plain if self._near else []))

    def _cut(self, text: str) -> list[str]:
        """A text in parts whose tokens are those of the text."""
        parts, start = [], 0
        if self._can_cut:
            for stop in range(_SHORT, len(text), _SHORT // 2):
                if stop - start >= _SHORT and (place := cut_place(text, start, stop)) is not None:
                    parts.append(text[start:place])
                    start = place
        return [*parts, text[start:]]

    def _parts_at_cuts(self) -> bool:
        """Whether the tokenizer parts a text where `cut_place` would, so that no token is lost by cutting there."""
        ends = range(2, len(_PROBE))
        places = {place for end in ends if (place := cut_place(_PROBE, max(0, end - 80), end)) is not None}
        texts = [part for place in sorted(places) for part in (_PROBE[:place], _PROBE[place:])]
        try:
            whole, *parts = self._tokenizer.encode_batch([_PROBE, *texts], starts=[True, *[True, False] * len(places)])
        except UserError:  # a vocabulary that can't write all of it
            return False
        return all(np.array_equal(whole, np.concatenate(two)) for two in zip(parts[::2], parts[1::2], strict=True))


def smallest_type(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    highest = vocab_size - 1
    return np.uint8 if highest < 1 << 8 else np.uint16 if highest < 1 << 16 else np.uint32


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Job = TypeVar("Job")
Encode = Callable[[Iterable[tuple[Job, Sequence[Text]]]], Iterator[tuple[Job, Encoded]]]


@contextlib.contextmanager
def encoders(tokenizer: Tokenizer, directory: Path, seed: int, near: bool, processes: int) -> Iterator[Encode[Any]]:
    """A function from jobs and their texts to jobs and what became of them, in the same order. It reads some ahead.

    Args:
        directory: holds `tokenizer`, for the processes to load.
        processes: how many. 0: encode in this one, with the library's threads.

    Raises:
        UserError: what `Encoder` raises; a process was ended by somebody.
    """
    if not processes:
        encoder = Encoder(tokenizer, seed, near)
        yield lambda jobs: ((job, encoder(texts)) for job, texts in jobs)
        return
    started: list[_Process] = []
    try:
        started += [_Process(directory, seed, near) for _ in range(processes)]
        free: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in started:
            free.put(process)

        def encode(texts: Sequence[Text]) -> Encoded:
            process = free.get()
            try:
                return process.encode(texts)
            finally:
                free.put(process)

        with ThreadPoolExecutor(processes) as pool:

            def encode_all(jobs: Iterable[tuple[Job, Sequence[Text]]]) -> Iterator[tuple[Job, Encoded]]:
                waiting: collections.deque[tuple[Job, Future[Encoded]]] = collections.deque()
                for job, texts in jobs:
                    waiting.append((job, pool.submit(encode, texts)))
                    if len(waiting) > 2 * processes:
                        job, future = waiting.popleft()
                        yield job, future.result()
                while waiting:
                    job, future = waiting.popleft()
                    yield job, future.result()

            try:
                yield encode_all
            except BaseException:
                for process in started:  # so that nothing has to be waited for
                    process.kill()
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        for process in started:
            process.close()


class _Process:
    """An `Encoder` in a process of its own."""

    def __init__(self, directory: Path, seed: int, near: bool) -> None:
        # Each encodes on one core; and it finds what this process finds, whatever that changed in sys.path.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()", str(directory), str(seed), str(int(near))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def encode(self, texts: Sequence[Text]) -> Encoded:
        """One call at a time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            _send(self._process.stdin, texts)
            answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise UserError(
                f"a process that encodes ended (exit code {self._process.wait()}; a negative one is a signal): where "
                "memory is short take fewer (--processes), and give the same command again"
            ) from ChildProcessError()
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Encoded)
        return answer

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()


def serve() -> None:
    """What a process of `encoders` does until its standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everything on the terminal; the parent answers it
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    directory, seed, near = sys.argv[1:]
    encode = Encoder(Tokenizer.load(directory), int(seed), bool(int(near)))
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            texts = pickle.load(requests)
            try:
                answer: Encoded | Exception = encode(texts)
            except UserError as error:
                answer = error
            except Exception:
                answer = RuntimeError(f"in a process that encodes:\n{traceback.format_exc()}")
            _send(answers, answer)


def _send(pipe: IO[bytes], value: object) -> None:
    pickle.dump(value, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.flush()
