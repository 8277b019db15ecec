"""What a proof says, and how a claim becomes one. No torch in here."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from leftward.errors import UserError

Outcome = Literal["pass", "fail", "skip"]
MARKS: dict[Outcome, str] = {"pass": "✓", "fail": "✗", "skip": "–"}

T = TypeVar("T")


class Fails(Exception):
    """The claim is false; the message names the fault, with its number."""


class Skips(Exception):
    """The claim can't be tried on this subject; the message says why."""


@dataclass(frozen=True)
class Claim(Generic[T]):
    """Something that ought to hold of a subject T."""

    name: str
    measure: Callable[[T], str]
    """Returns what was found where it holds, and raises `Fails` or `Skips` otherwise."""
    needs: tuple[str, ...]
    """Names of claims without which this one fails too, or says nothing."""
    meaning: str
    """What it means where it doesn't hold."""


@dataclass(frozen=True)
class Proof:
    """A claim that was tried."""

    name: str
    outcome: Outcome
    measured: str
    """What was found, with its number; the fault by name; or why the claim was skipped."""
    meaning: str
    """What a failure means."""


@dataclass(frozen=True)
class Report:
    """All proofs of one subject, in the order in which they were tried."""

    subject: str
    proofs: tuple[Proof, ...]

    @property
    def passed(self) -> bool:
        """Whether no proof failed; those that were skipped don't count."""
        return not self.count("fail")

    def count(self, outcome: Outcome) -> int:
        return sum(proof.outcome == outcome for proof in self.proofs)

    def __getitem__(self, name: str) -> Proof:
        """The proof of that name. Raises: KeyError."""
        for proof in self.proofs:
            if proof.name == name:
                return proof
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        proofs = [dataclasses.asdict(proof) for proof in self.proofs]
        return {"subject": self.subject, "passed": self.passed, "proofs": proofs}

    @property
    def summary(self) -> str:
        """The last line."""
        counts = [(self.count("pass"), "hold"), (self.count("fail"), "fail"), (self.count("skip"), "skipped")]
        return ", ".join(f"{count} {what}" for count, what in counts if count or what == "fail")

    def __str__(self) -> str:
        return "\n".join([*map(show, self.proofs), f"{self.subject}: {self.summary}"])


def show(proof: Proof, width: int | None = None) -> str:
    """A proof on one line; where it failed, what that means is indented below. Longer lines than `width` are broken."""
    indent = " " * (_COLUMN + 3)
    parts = [proof.measured, proof.meaning] if proof.outcome == "fail" else [proof.measured]
    if width is not None and width > 2 * len(indent):
        parts = [line for part in parts for line in textwrap.wrap(part, width - len(indent))]
    return f"{MARKS[proof.outcome]} {proof.name:<{_COLUMN}} " + f"\n{indent}".join(parts)


_COLUMN = 24  # the longest name of a claim


def prove(claims: list[Claim[T]], subject: T) -> Iterator[Proof]:
    """Try each claim. Whatever goes wrong in one is its failure, and the others go on."""
    causes: dict[str, str] = {}  # of each claim that failed or couldn't be tried for one that did: the latter
    for claim in claims:
        cause = next((causes[name] for name in claim.needs if name in causes), None)
        outcome: Outcome = "pass"
        try:
            if cause is not None:
                causes[claim.name] = cause
                raise Skips(f'"{cause}" fails, and with it this')
            measured = claim.measure(subject)
        except Skips as reason:
            outcome, measured = "skip", str(reason)
        except (Fails, UserError) as fault:
            outcome, measured = "fail", str(fault)
        except Exception as error:
            words = " ".join(str(error).split())
            outcome, measured = "fail", f"{type(error).__name__}: {words[:300]}"
        if outcome == "fail":
            causes[claim.name] = claim.name
        yield Proof(claim.name, outcome, measured, claim.meaning)
