"""Which rows training takes, in which order: a pure function of the position, which is how many it has taken.

So the whole state is one integer, and a run that goes on takes exactly the rows that it would have taken, with any
batch size and on any number of ranks.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal, NamedTuple

from leftward.data.batches import Batch, Dataset, Split, Windows
from leftward.data.packing import Documents
from leftward.errors import UserError

Packing = Literal["concatenate", "documents"]


class Source(NamedTuple):
    """One of the datasets that training draws from."""

    name: str
    share: Fraction
    """Of the tokens."""
    rows: Windows | Documents


class Order:
    """The rows of a dataset's training split, or of several in proportion to their weights."""

    def __init__(self, dataset: Dataset, seq_len: int, seed: int, packing: Packing = "concatenate") -> None:
        """Raises: UserError where a split is too short, or doesn't say where its documents end."""
        parts = [(str(part.dataset.directory), part.weight, part.dataset) for part in dataset.parts]
        parts = parts or [(dataset.directory.name, 1.0, dataset)]
        weights = [Fraction(str(weight)) for _, weight, _ in parts]
        self._dataset = dataset
        self._seq_len = seq_len
        self._apart = packing == "documents"
        self.sources = [
            Source(
                name,
                weight / sum(weights),
                # Two datasets of one size would take their rows in one order.
                Documents(part.train.apart(), seq_len, seed + number)
                if self._apart
                else Windows(part.train, seq_len, seed + number),
            )
            for number, ((name, _, part), weight) in enumerate(zip(parts, weights, strict=True))
        ]
        # Of what the datasets before it leave; the last one takes it all.
        self._shares_of_rest = [weight / sum(weights[number:]) for number, weight in enumerate(weights)]

    def batch(self, position: int, size: int) -> tuple[Batch, int]:
        """The next `size` rows after `position` rows, and the position after them.

        Raises:
            UserError: the files hold an id that no token has.
        """
        batch = Batch.empty(size, self._seq_len, self._apart)
        taken = self._taken(position)
        for row in range(size):
            after = self._taken(position + row + 1)
            source = next(i for i, (a, b) in enumerate(zip(taken, after, strict=True)) if a != b)
            self.sources[source].rows.fill(taken[source], batch, row)
            taken = after
        self._dataset.train.check_ids(batch.inputs)
        self._dataset.train.check_ids(batch.targets)
        return batch, position + size

    def epochs(self, position: int) -> dict[str, float]:
        """How often each dataset was gone through after `position` rows."""
        taken = self._taken(position)
        return {source.name: n / source.rows.per_epoch for source, n in zip(self.sources, taken, strict=True)}

    @property
    def filling(self) -> float:
        """The share of places in rows that hold a token."""
        fillings = (source.rows.filling if isinstance(source.rows, Documents) else 1.0 for source in self.sources)
        return sum(float(source.share) * filling for source, filling in zip(self.sources, fillings, strict=True))

    def _taken(self, position: int) -> list[int]:
        """How many of the first `position` rows are of each source: its share of them, and never a few rows more or
        less. Each source takes its share, rounded down, of what those before it leave; so at every position exactly one
        takes the next row."""
        left, taken = position, []
        for share_of_rest in self._shares_of_rest:
            taken.append(left * share_of_rest.numerator // share_of_rest.denominator)
            left -= taken[-1]
        return taken


def validation(dataset: Dataset, packing: Packing) -> Split:
    """What a run is validated on, with documents apart where it is trained so. Raises: UserError, as `Order`."""
    return dataset.val.apart() if packing == "documents" else dataset.val


def share(position: int, size: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows of the batch of `size` at `position` that are for `rank` of `ranks`: their position, and how many.

    All ranks together take the rows of one rank alone, so that their number doesn't change what is learned from.

    Raises:
        UserError: the batch can't be shared out evenly.
    """
    rows, rest = divmod(size, ranks)
    if rest:
        raise UserError(
            f"training.batch_size {size} is not divisible by {ranks} ranks: take a multiple of {ranks}, or fewer ranks"
        )
    return position + rank * rows, rows
