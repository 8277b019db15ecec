"""`leftward data prepare` beside what it is made of: the encode_batch of the tokenizers library, on the same text.

    python benchmarks/prepare.py [--data input.txt] [--megabytes 100] [--turns 3]

The text is that of --data and of Python's own reference, repeated. It is prepared in three shapes: as .jsonl of many
small documents, the same compressed, and as one .txt. The library is given the small documents in memory, in calls of
4 MB, which suits it best of all shapes and sizes, and only its calls are timed; ours is the whole process from `python`
to its exit, reading, writing and start-up included. The two take turns. Processor time (of all processes) says what a
busy machine hides from the clock.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tokenizers

from leftward.data import sources
from leftward.data.encoding import cores
from leftward.text.tokenizer import Tokenizer

_CALL = 4_000_000  # characters
_DOCUMENT = 2_500  # characters of a small document, about


def documents_of(paths: list[Path], megabytes: float) -> Iterator[str]:
    """Paragraphs joined to small documents, again and again until it is enough."""
    report = sources.Report()
    texts = [path.read_text(encoding="utf-8") for path in paths]
    texts += [piece.text for piece in sources.read(sources.find([sources.BUILTIN], report), report)]
    size = 0
    while True:
        for text in texts:
            held = ""
            for paragraph in text.split("\n\n"):
                held += paragraph + "\n\n"
                if len(held) >= _DOCUMENT:
                    size += len(held)
                    yield held
                    held = ""
            if size >= megabytes * 1e6:
                return


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of processors, children's included."""

    def processors() -> float:
        usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    clock, used = time.perf_counter(), processors()
    work()
    return time.perf_counter() - clock, processors() - used


def encode(library: tokenizers.Tokenizer, documents: list[str]) -> None:
    held: list[str] = []
    size = 0
    for document in documents:
        held.append(document)
        size += len(document)
        if size >= _CALL:
            library.encode_batch(held, add_special_tokens=False)
            held, size = [], 0
    library.encode_batch(held, add_special_tokens=False)


def write_shapes(documents: list[str], directory: Path) -> dict[str, Path]:
    lines = "".join(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents)
    shapes = {
        "many small documents, .jsonl": directory / "many.jsonl",
        "the same, .jsonl.gz": directory / "many.jsonl.gz",
        "one document, .txt": directory / "one.txt",
    }
    many, packed, one = shapes.values()
    many.write_text(lines, encoding="utf-8")
    packed.write_bytes(gzip.compress(lines.encode(), compresslevel=1))
    one.write_text("".join(documents), encoding="utf-8")
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="text files")
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=8192)
    arguments = parser.parse_args()
    documents = list(documents_of(arguments.data, arguments.megabytes))
    megabytes = sum(len(document.encode()) for document in documents) / 1e6
    print(f"{len(documents):,} documents, {megabytes:.1f} MB, {cores()} cores")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        Tokenizer.train(documents[:2000], vocab_size=arguments.vocab_size).save(directory / "tokenizer")
        library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer" / "tokenizer.json"))
        for shape, path in write_shapes(documents, directory).items():
            raw, ours = [], []
            for turn in range(arguments.turns):
                out = directory / f"{path.name}-{turn}"
                command = [sys.executable, "-m", "leftward.cli.main", "data", "prepare", str(path), "--out", str(out)]
                command += ["--tokenizer", str(directory / "tokenizer")]
                raw.append(timed(lambda: encode(library, documents)))
                ours.append(timed(lambda command=command: subprocess.run(command, check=True, capture_output=True)))
            (wall, used), (our_wall, our_used) = (
                map(statistics.median, zip(*times, strict=True)) for times in (raw, ours)
            )
            print(
                f"{shape}: encode_batch {megabytes / wall:.2f} MB/s ({used:.1f} processor s), leftward data prepare "
                f"{megabytes / our_wall:.2f} MB/s ({our_used:.1f} processor s): {wall / our_wall:.1%} of its speed, "
                f"{used / our_used:.1%} by processor time",
                flush=True,
            )


if __name__ == "__main__":
    main()
