"""An engine's memory: one budget of bytes for keys and values of sequences, what a draft holds of them, and stored
beginnings, which make room for the others.

There are two kinds. `Growing`: a sequence has a cache of its own, which grows; where there is no room, somebody is put
off. `Slotted`: memory for a number of sequences of one capacity is there from the start, at addresses that stay, and a
sequence that is admitted has room for all that it can need.
"""

from __future__ import annotations

import bisect
import heapq
from abc import ABC, abstractmethod

import torch

from leftward.errors import UserError
from leftward.generation.prefixes import Node, Prefixes
from leftward.generation.requests import Job, Request
from leftward.generation.speculative import Speculator
from leftward.model.cache import KVCache, row_bytes
from leftward.model.decoder import Decoder
from leftward.model.slots import Pool, pool_row_bytes

_LEAST_KV_BYTES = 1 << 30
_BLOCK = 64  # tokens by which a sequence's memory grows


class Memory(ABC):
    """What both kinds have: the budget.

    Args:
        kv_bytes: None: on a GPU half of what is free there; elsewhere 1 GiB, or what one sequence of the whole context
            takes where that is more.

    Raises:
        UserError: not even one token fits.
    """

    def __init__(
        self, decoder: Decoder, dtype: torch.dtype, kv_bytes: int | None, speculator: Speculator | None
    ) -> None:
        self.config, self.device, self.dtype = decoder.config, decoder.device, dtype
        self.prefixes = Prefixes()
        self._speculator = speculator
        self._rewindable = 0 if speculator is None else speculator.most
        self._jobs: list[Job] = []  # that hold memory
        if kv_bytes is None:
            kv_bytes = _default_bytes(self.device, self._bytes(self.config.max_seq_len, drafts=True))
        self.kv_bytes = kv_bytes

    @abstractmethod
    def most_places(self, request: Request) -> int:
        """Tokens of one such sequence that can be held, if it is alone."""

    @abstractmethod
    def take(self, job: Job) -> bool:
        """Give the job a cache for what it reads first, if there is room."""

    @abstractmethod
    def extend(self, job: Job) -> bool:
        """Make the job's cache hold what it needs now, if there is room."""

    def release(self, job: Job) -> None:
        """Take back what the job has, if anything."""
        if job.cache is not None:
            self._jobs.remove(job)
            job.cache = None
        if self._speculator is not None:
            self._speculator.release(job)

    @property
    def used(self) -> int:
        """Bytes. What a draft is going to hold of a sequence is used from the beginning on."""
        of_drafts = (
            self._draft_bytes(job.cache.capacity, self._drafts(job.request))
            for job in self._jobs
            if job.cache is not None
        )
        return self._rows_bytes() + sum(of_drafts) + self.prefixes.nbytes

    def fits(self, n_bytes: int, but: Node | None = None) -> bool:
        """Whether so many bytes are free, for which beginnings may have to be forgotten, `but` this one."""
        while self.used + n_bytes > self.kv_bytes:
            if not self.prefixes.drop_oldest(but):
                return False
        return True

    @abstractmethod
    def _rows_bytes(self) -> int:
        """Of the sequences' keys and values."""

    @abstractmethod
    def _row_bytes(self, n_places: int) -> int:
        """Of one sequence's."""

    def _bytes(self, n_places: int, drafts: bool) -> int:
        """Of one sequence, with what a draft holds of it."""
        return self._row_bytes(n_places) + self._draft_bytes(n_places, drafts)

    def _draft_bytes(self, n_places: int, drafts: bool) -> int:
        return self._speculator.row_bytes(n_places) if drafts and self._speculator is not None else 0

    def _drafts(self, request: Request) -> bool:
        return self._speculator is not None and self._speculator.drafts(request)

    def _places_of_one(self, drafts: bool) -> int:
        """That all of the memory holds of one sequence, at most."""
        places = range(1, self.config.max_seq_len + 1)
        most = bisect.bisect_right(places, self.kv_bytes, key=lambda n: self._bytes(n, drafts))
        if not most:
            raise UserError(f"kv_bytes is {self.kv_bytes:,}: one token of this model takes {self._bytes(1, drafts):,}")
        return most


class Growing(Memory):
    """Each sequence has what it needs now, in blocks."""

    def __init__(
        self, decoder: Decoder, dtype: torch.dtype, kv_bytes: int | None, speculator: Speculator | None
    ) -> None:
        super().__init__(decoder, dtype, kv_bytes, speculator)
        self._most_places = {drafts: self._places_of_one(drafts) for drafts in (False, True)}

    def most_places(self, request: Request) -> int:
        return self._most_places[self._drafts(request)]

    def take(self, job: Job) -> bool:
        capacity = self._capacity(job)
        if not self.fits(self._bytes(capacity, self._drafts(job.request))):
            return False
        job.cache = KVCache(self.config, 1, capacity, self.dtype, self.device, rewindable=self._rewindable)
        self._jobs.append(job)
        return True

    def extend(self, job: Job) -> bool:
        assert job.cache is not None
        if job.places <= job.cache.capacity:
            return True
        capacity, drafts = self._capacity(job), self._drafts(job.request)
        if not self.fits(self._bytes(capacity, drafts) - self._bytes(job.cache.capacity, drafts)):
            return False
        job.cache.grow(capacity)
        return True

    def _capacity(self, job: Job) -> int:
        """In whole blocks, and no more than the job can ever need."""
        rounded = -(-job.places // _BLOCK) * _BLOCK
        return max(job.places, min(rounded, job.most_places, self.most_places(job.request)))

    def _rows_bytes(self) -> int:
        return sum(job.cache.nbytes for job in self._jobs if job.cache is not None)

    def _row_bytes(self, n_places: int) -> int:
        return row_bytes(self.config, n_places, self.dtype, self._rewindable)


class Slotted(Memory):
    """A `Pool`, which is used whole from the start: as many rows of the whole context as there is room for, at most
    `max_rows`, or one shorter row. Where a draft may be asked for, it has room beside each row. What is left is for
    stored beginnings.

    Raises:
        UserError: as `Memory`; the device has no such memory.
    """

    def __init__(
        self,
        decoder: Decoder,
        dtype: torch.dtype,
        kv_bytes: int | None,
        speculator: Speculator | None,
        max_rows: int,
    ) -> None:
        super().__init__(decoder, dtype, kv_bytes, speculator)
        capacity = self._places_of_one(drafts=True)
        n_rows = min(max_rows, self.kv_bytes // self._bytes(capacity, drafts=True))
        try:
            self.pool = Pool(self.config, n_rows, capacity, dtype, self.device, self._rewindable)
        except torch.OutOfMemoryError:
            raise UserError(
                f"kv_bytes is {self.kv_bytes:,}: {self.device} has no room for {n_rows} sequences of {capacity} "
                f"tokens, {n_rows * self._row_bytes(capacity):,} bytes; say less"
            ) from None
        self._free = list(range(n_rows))  # a heap: the lowest first, so that steps read few rows

    def most_places(self, request: Request) -> int:
        return self.pool.capacity

    def take(self, job: Job) -> bool:
        if not self._free or not self.fits(self._draft_bytes(self.pool.capacity, self._drafts(job.request))):
            return False
        number = heapq.heappop(self._free)
        self.pool.clear(number)
        job.cache = self.pool.rows[number]
        self._jobs.append(job)
        return True

    def extend(self, job: Job) -> bool:
        return job.places <= self.pool.capacity

    def release(self, job: Job) -> None:
        if job.cache is not None:
            heapq.heappush(self._free, self.pool.rows.index(job.cache))
        super().release(job)

    def _rows_bytes(self) -> int:
        return self.pool.nbytes

    def _row_bytes(self, n_places: int) -> int:
        return pool_row_bytes(self.config, n_places, self.dtype, self._rewindable)


def _default_bytes(device: torch.device, whole: int) -> int:
    if device.type != "cuda":
        return max(_LEAST_KV_BYTES, whole)
    free, _ = torch.cuda.mem_get_info(device)
    # What PyTorch keeps for later, of engines before this one, is free too.
    return (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) // 2
