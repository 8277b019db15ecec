"""Where a dataset comes to be: a directory that outlives a kill, and that several machines may fill.

    OUT.partial/shard-2-of-8/plan.json      what was asked for; the same command goes on, another one is refused
                             survey.json    what was learned before encoding, with tokenizer.json beside it
                             parts/000007-000000/  a part: some 64 MB of text as tokens; whole or absent
                             done           when all parts of the shard are there

Parts are numbered by unit of the sources and by their order in it, so that all shards together are the text in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leftward import files
from leftward.data.npy import read_npy
from leftward.data.settings import Settings
from leftward.data.sources import Source, Unit
from leftward.errors import UserError

VERSION = 1
_SHARD = re.compile(r"shard-(\d+)-of-(\d+)")
_PLAN, _DONE, _PARTS = "plan.json", "done", "parts"
SURVEY, PART = "survey.json", "part.json"


@dataclass(frozen=True)
class Plan:
    """What a command is to do. Equal plans on equal files give equal datasets."""

    settings: dict[str, Any]
    seed: int
    tokenizer_fingerprint: str | None
    """Of a ready one."""
    sources: list[list[Any]]
    """Path and size of each file."""
    modified: list[int]
    """When each was changed, in ns since 1970. Not compared between machines, whose copies may differ in it."""
    unit_sizes: list[int]
    """Bytes on disk of each unit of work."""
    skipped_files: int
    version: int = VERSION

    @classmethod
    def of(
        cls,
        settings: Settings,
        seed: int,
        tokenizer_fingerprint: str | None,
        sources: Sequence[Source],
        units: Sequence[Unit],
        skipped_files: int,
    ) -> Plan:
        return cls(
            settings=json.loads(json.dumps(dataclasses.asdict(settings))),  # as it will be read again
            seed=seed,
            tokenizer_fingerprint=tokenizer_fingerprint,
            sources=[[str(source.path), source.size()] for source in sources],
            modified=[0 if source.is_builtin else source.path.stat().st_mtime_ns for source in sources],
            unit_sizes=[unit.size for unit in units],
            skipped_files=skipped_files,
        )

    def fingerprint(self) -> str:
        """Equal for the same command on the same files, on whatever machine."""
        values = {**dataclasses.asdict(self), "modified": None, "skipped_files": None}
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()

    def check_same(self, begun: Plan, where: Path, *, same_machine: bool = True) -> None:
        """Raises: UserError, saying in what `begun` is another plan."""
        remedy = f"give that command again, or remove {where}"
        ours, theirs = (dataclasses.asdict(plan) | plan.settings for plan in (self, begun))
        for name in (*self.settings, "seed", "tokenizer_fingerprint", "version"):
            if ours[name] != theirs.get(name):
                raise UserError(f"{where} was begun with {name} {theirs.get(name)!r}, not {ours[name]!r}: {remedy}")
        for before, now, then, changed in zip(begun.sources, self.sources, begun.modified, self.modified, strict=False):
            if before != now or (same_machine and then != changed):
                raise UserError(f"{now[0]} changed since {where} was begun: remove {where} and begin anew")
        if self.sources != begun.sources:
            raise UserError(
                f"there are {len(self.sources)} files to read, and were {len(begun.sources)} when {where} was begun: "
                f"remove {where} and begin anew"
            )
        assert self.unit_sizes == begun.unit_sizes


@dataclass(frozen=True)
class Shard:
    """One of the directories in which one process works."""

    directory: Path
    number: int
    """From 1."""
    of: int

    @classmethod
    def at(cls, out: Path, number: int, of: int) -> Shard:
        return cls(partial(out) / f"shard-{number}-of-{of}", number, of)

    @property
    def is_begun(self) -> bool:
        return (self.directory / _PLAN).exists()

    def clear(self) -> None:
        """Forget all that was done here."""
        for path in self.directory.iterdir():
            if path.name != files.LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def remove(self) -> None:
        """Leave nothing of this shard."""
        shutil.rmtree(self.directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # other shards are there
            (self.directory.parent / files.LOCK).unlink(missing_ok=True)
            self.directory.parent.rmdir()

    def begin(self, plan: Plan) -> None:
        """Raises: UserError where another plan was begun here."""
        path = self.directory / _PLAN
        if self.is_begun:
            plan.check_same(self.plan(), self.directory.parent)
            files.sweep(self.directory / _PARTS)
            return
        with files.writing(self.directory):
            (self.directory / _PARTS).mkdir(exist_ok=True)
        files.write_json(path, dataclasses.asdict(plan))

    def plan(self) -> Plan:
        """Raises: UserError where the shard was not begun, or its plan is damaged."""
        path = self.directory / _PLAN
        values = files.read_json(path)
        try:
            return Plan(**values)
        except TypeError:
            raise UserError(f"{path} is damaged, or of another version: remove {self.directory.parent}") from None

    def units(self, sizes: Sequence[int]) -> range:
        """The units of work that are this shard's: a stretch of them, with as many bytes as any other's."""
        total = max(1, sum(sizes))
        before, mine = 0, []
        for unit, size in enumerate(sizes):
            middle = (2 * before + size) * self.of // (2 * total)  # of the unit; one without bytes may be at the end
            if min(middle, self.of - 1) == self.number - 1:
                mine.append(unit)
            before += size
        return range(mine[0], mine[-1] + 1) if mine else range(0)

    def part_path(self, unit: int, number: int) -> Path:
        return self.directory / _PARTS / part_name(unit, number)

    def parts(self) -> list[Part]:
        """Those that are there, in the order of the text."""
        paths = (self.directory / _PARTS).iterdir()
        return [Part(path) for path in sorted(paths) if not path.name.endswith(files.TEMPORARY)]

    def mark_done(self) -> None:
        files.write_text(self.directory / _DONE, "")

    @property
    def is_done(self) -> bool:
        return (self.directory / _DONE).exists()


@dataclass(frozen=True)
class Part:
    """Some text of a unit as tokens."""

    directory: Path

    @property
    def unit(self) -> int:
        return int(self.directory.name.split("-")[0])

    def info(self) -> dict[str, Any]:
        """What prepare.py says of it: bytes, documents, letters, report, fingerprint, is_last. Raises: UserError."""
        info: dict[str, Any] = files.read_json(self.directory / PART)
        return info

    def rows(self) -> Any:
        """[texts] of `encoding.ROW`"""
        return read_npy(self.directory / "rows.npy")

    def tokens(self) -> Any:
        """[N]"""
        return read_npy(self.directory / "tokens.npy")

    def signatures(self) -> Any:
        """[texts, PERMUTATIONS]"""
        return read_npy(self.directory / "signatures.npy")


def part_name(unit: int, number: int) -> str:
    """In the order of the text, as names are sorted."""
    return f"{unit:06d}-{number:06d}"


def partial(out: Path) -> Path:
    """Where the parts of a dataset are until it is whole."""
    return out.with_name(out.name + ".partial")


def shards(out: Path) -> list[Shard]:
    """Those that were begun, in order."""
    found = []
    for path in partial(out).glob("shard-*"):
        if match := _SHARD.fullmatch(path.name):
            found.append(Shard(path, int(match[1]), int(match[2])))
    return sorted(found, key=lambda shard: (shard.of, shard.number))
