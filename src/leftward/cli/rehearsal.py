"""What many ranks would hold and send, for people (`leftward train RECIPE --dry-run --ranks N`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from leftward.cli.plan import in_bytes
from leftward.cli.table import Column, table

if TYPE_CHECKING:
    from leftward.training.rehearsal import Rehearsal


def lines(rehearsal: Rehearsal) -> Iterator[str]:
    grid, memory = rehearsal.grid, rehearsal.memory
    yield (
        f"{rehearsal.parameters:,} parameters on {math.prod(grid):,} ranks: replicate {grid.replicate} × shard "
        f"{grid.shard} × tensor {grid.tensor}, computing in {rehearsal.dtype}"
    )
    yield (
        f"{rehearsal.tokens:,} tokens a step; {rehearsal.rows:,} rows of the batch for a rank, in "
        f"{rehearsal.micro_batches:,} micro-batches"
    )
    sizes = {**dataclasses.asdict(memory), "total": memory.total}
    yield ""
    yield table(
        [
            Column("memory of a rank", [*sizes], left=True),
            Column("", [in_bytes(size) for size in sizes.values()]),
        ]
    )
    each = rehearsal.collectives
    yield ""
    yield table(
        [
            Column("sent by a rank in a step", [one.kind for one in each], left=True),
            Column("of", [one.purpose for one in each], left=True),
            Column("ranks", [f"{one.ranks:,}" for one in each]),
            Column("times", [f"{one.count:,}" for one in each]),
            Column("in all", [in_bytes(one.bytes) for one in each]),
        ]
    )
    shapes = rehearsal.shapes
    yield ""
    yield table(
        [
            Column("the first rank's part of", [*shapes], left=True),
            Column("shape", [" × ".join(map(str, shape)) for shape in shapes.values()], left=True),
        ]
    )
