"""Many requests at once: they come and go at any step, share one budget of memory, and none changes another's text.

A step reads one token of every sequence that is being written, and a chunk or some of the prompts that wait to be read;
then each sequence that is read to its end gets its next token. Sequences are admitted first come, first served. Where
memory is short (memory.py), stored beginnings are forgotten, then the youngest sequence is put off: it loses what it
has, keeps its place in the queue, and later reads all again, as it was read before.

An engine is an object for one thread, and `step` works until it has events: threads, clocks and connections are their
owner's business.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Hashable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from leftward.errors import UserError, nearest
from leftward.generation.graphs import Steps, can_be_recorded
from leftward.generation.memory import Growing, Memory, Slotted
from leftward.generation.program import Reader
from leftward.generation.requests import Event, Job, Request
from leftward.generation.sampling import choose
from leftward.generation.speculative import Speculator
from leftward.model.decoder import Decoder
from leftward.text.tokenizer import Tokenizer

KVDtype = Literal["fp32", "bf16", "int8"]
_KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
MAX_ROWS = 64


class Engine:
    """Requests to events, step by step.

    Args:
        decoder: in evaluation mode.
        eos_ids: tokens that end a sequence, where its request says nothing else; they are not shown.
        excluded: [V], True for ids that must not be chosen.
        max_rows: sequences in work at once; the others wait.
        kv_bytes: memory for keys and values, of sequences in work, what a draft holds of them too, and of stored
            beginnings. None: on a GPU half of what is free there; elsewhere 1 GiB, or what one sequence of the whole
            context takes where that is more.
        kv_dtype: of keys and values: fp32, bf16, or int8 with a scale for each token and head. None: as the weights, or
            bf16 where these are in 4 or 8 bits.
        chunk: tokens of a prompt that are read together. Prompts are divided at its multiples whatever else there is to
            do, so that their numbers don't depend on it.
        step_tokens: of prompts, padding included, that a step reads at most, or one chunk.
        share_prefixes: whether what was read of one prompt serves others that begin with the same chunks.
        speculator: guesses next tokens for requests that ask for it; several are then checked in one pass.
        static: whether all memory is there from the start, in rows of the whole context, so that a step of one token a
            sequence has fixed shapes and is recorded as a CUDA graph (docs/generation.md). None: on a GPU, where the
            model allows it.
        compile: whether torch.compile makes kernels of such steps.

    Raises:
        UserError: options that cannot be; `kv_bytes` doesn't hold one token.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        *,
        eos_ids: Collection[int] = (),
        excluded: Tensor | None = None,
        max_rows: int = MAX_ROWS,
        kv_bytes: int | None = None,
        kv_dtype: KVDtype | None = None,
        chunk: int = 128,
        step_tokens: int = 256,
        share_prefixes: bool = True,
        speculator: Speculator | None = None,
        static: bool | None = None,
        compile: bool = False,
    ) -> None:
        if decoder.training:
            raise ValueError("the decoder is in training mode: call decoder.eval() first")
        if kv_dtype is not None and kv_dtype not in _KV_DTYPES:
            raise UserError(f"kv_dtype is {kv_dtype!r}: {nearest(str(kv_dtype), _KV_DTYPES)}")
        for name, value in (("max_rows", max_rows), ("chunk", chunk), ("step_tokens", step_tokens)):
            if type(value) is not int or value < 1:
                raise UserError(f"{name} is {value!r}: it must be a whole number, at least 1")
        self.decoder, self.tokenizer, self.config = decoder, tokenizer, decoder.config
        self.eos_ids = frozenset(eos_ids)
        self.excluded = None if excluded is None else excluded.to(decoder.device)
        self.max_rows, self.chunk, self.step_tokens = max_rows, chunk, step_tokens
        self.speculator = speculator
        dtype = decoder.kv_dtype if kv_dtype is None else _KV_DTYPES[kv_dtype]
        self.memory: Memory
        steps = None
        if static or (static is None and decoder.device.type == "cuda" and can_be_recorded(decoder)):
            self.memory = Slotted(decoder, dtype, kv_bytes, speculator, max_rows)
            steps = Steps(decoder, self.memory.pool, compile=compile)
        elif compile:
            raise UserError("compile is for static steps, which this engine has not: they are a GPU's (static=True)")
        else:
            self.memory = Growing(decoder, dtype, kv_bytes, speculator)
        self.reader = Reader(decoder, steps)
        self._shares = share_prefixes
        self._waiting: deque[Job] = deque()  # by number
        self._running: list[Job] = []  # by number, all before those that wait
        self._events: list[Event] = []  # that were not told yet
        self._n_submitted = 0

    # ---- what its owner calls

    def submit(self, request: Request) -> int:
        """Queue a request. Gives its number, which its events bear.

        Raises:
            UserError: it can never be served: its prompt is empty, too long for the context or for `kv_bytes`, or holds
                unknown ids; or its settings name such. The engine is as it was.
        """
        kinds = () if self.speculator is None else self.speculator.kinds
        if request.speculative not in (None, *kinds):
            what = f"this engine can have {' or '.join(kinds)}" if kinds else "this engine has no speculator"
            raise UserError(f"speculative is {request.speculative!r}: {what}")
        # The last token needs no memory.
        limit = min(self.config.max_seq_len, self.memory.most_places(request) + 1)
        job = Job(self._n_submitted, request, self.tokenizer, self.config, self.eos_ids, limit)
        self._n_submitted += 1
        if job.left == 0:
            self._events.append(Event(job.number, None, "", job.end))
        else:
            self._waiting.append(job)
        return job.number

    def cancel(self, number: int) -> bool:
        """Forget a request and free its memory now; no more events come of it. False: there is no such request, or no
        longer."""
        found = [job for job in (*self._running, *self._waiting) if job.number == number]
        for job in found:
            self._end(job)
        n_events = len(self._events)
        self._events = [event for event in self._events if event.row != number]
        return bool(found) or len(self._events) < n_events

    def step(self) -> list[Event]:
        """Go on by a step; nothing happens where there is nothing to do. A sequence's events are in their order, its
        last one has a finish reason. A step that an exception breaks off can be taken again."""
        try:
            with torch.inference_mode():
                ready = self._decode()
                self._admit()
                ready += self._prefill()
                ready.sort(key=lambda pair: pair[0].number)
                if ready:
                    self._choose(ready)
        except BaseException:  # of a sampler of the user's, or Ctrl-C
            self._put_all_off()
            raise
        events, self._events = self._events, []
        return events

    def run(self) -> Iterator[Event]:
        """Step until all requests have ended."""
        while self.n_requests:
            yield from self.step()

    @property
    def n_requests(self) -> int:
        """That have not ended, or whose end was not told yet."""
        untold = {event.row for event in self._events if event.finish_reason is not None}
        return len(self._running) + len(self._waiting) + len(untold)

    @property
    def n_running(self) -> int:
        """Sequences that have memory."""
        return len(self._running)

    @property
    def kv_bytes(self) -> int:
        """The most that keys and values may take."""
        return self.memory.kv_bytes

    @property
    def kv_bytes_used(self) -> int:
        """Of `kv_bytes`. What a draft is going to hold of a sequence is used from the beginning on, and where memory is
        static the rows are, whoever has them."""
        return self.memory.used

    # ---- memory

    def _admit(self) -> None:
        """First come, first served: where the first has no room yet, nobody behind it is asked."""
        while self._waiting and len(self._running) < self.max_rows and self.memory.take(self._waiting[0]):
            job = self._waiting.popleft()
            self._running.append(job)
            job.node = self.memory.prefixes.root if self._shares and not job.has_rolled else None

    def _has_room(self, job: Job) -> bool:
        """Make its memory large enough. False: the job itself was put off."""
        while not self.memory.extend(job):
            if self._put_youngest_off() is job:
                return False
        return True

    def _put_youngest_off(self) -> Job:
        youngest = self._running.pop()
        self._free(youngest)
        self._waiting.appendleft(youngest)
        return youngest

    def _put_all_off(self) -> None:
        """Where a step was broken off: whatever was read is read again, and what was chosen stays."""
        while self._running:
            job = self._put_youngest_off()
            job.n_guessed -= len(job.guesses) - job.n_right
            job.guesses, job.n_right = [], 0
            job.roll_if_full()

    def _free(self, job: Job) -> None:
        self.memory.release(job)
        job.node = None

    def _end(self, job: Job) -> None:
        (self._running if job in self._running else self._waiting).remove(job)
        self._free(job)
        if self.speculator is not None:
            self.speculator.forget(job)

    # ---- reading

    def _read(self, jobs: list[Job], new: list[list[int]], **asked: Any) -> Tensor:
        """The next tokens of each; what the head reads at them, row after row, [N, D]. The one call of the model."""
        return self.reader.hidden(new, [job.cache for job in jobs if job.cache is not None], **asked)

    def _asked(self, job: Job, n_tokens: int) -> dict[str, Any]:
        """What a special prompt is read with."""
        vectors = job.request.prefix_embeddings
        asked: dict[str, Any] = {} if vectors is None else {"prefix_embeddings": vectors[None].to(self.decoder.device)}
        return asked | ({"prefix_lengths": [job.n_before + n_tokens]} if job.request.prefix_lm else {})

    def _decode(self) -> list[tuple[Job, Tensor]]:
        """One token of each sequence that is being written, or several with those that are guessed to follow. Gives
        those that are read to their end, with what the head reads there, [tokens, D]."""
        jobs = [job for job in self._running if not job.is_chunked]
        jobs = [job for job in jobs if job.cache is not None and self._has_room(job)]
        jobs = [job for job in jobs if job.cache is not None]  # nobody put it off later
        if not jobs:
            return []
        self._propose(jobs)
        new = [[job.context[job.n_read], *(guess.token_id for guess in job.guesses)] for job in jobs]
        hidden = self._read(jobs, new)
        parts = [hidden] if len(jobs) == 1 else hidden.split([len(tokens) for tokens in new])
        return [(job, part) for job, part in zip(jobs, parts, strict=True) if job.n_read >= len(job.context)]

    def _propose(self, jobs: list[Job]) -> None:
        asked = [job for job in jobs if job.n_read == len(job.context) - 1 and job.left > 1]
        if self.speculator is None or not asked:
            return
        for job, guesses in zip(asked, self.speculator.propose(asked), strict=True):
            assert job.cache is not None
            room = job.cache.capacity - job.n_before - len(job.context)  # nobody is put off for a guess
            # Behind all that are right comes a token more.
            job.guesses = guesses[: max(0, min(room, job.left - 1, job.limit - len(job.context) - 1))]
            job.n_guessed += len(job.guesses)

    def _prefill(self) -> list[tuple[Job, Tensor]]:
        """Chunks of prompts, the oldest first. Gives those that are read to their end."""
        jobs = [job for job in self._running if job.is_chunked]
        ready = self._take_known(jobs)
        reading: list[Job] = []
        chunks: list[list[int]] = []
        places: set[Hashable] = set()
        for job in jobs:
            if not job.is_chunked:
                continue
            chunk = self._next_chunk(job)
            place = (id(job.node), self._key(job, chunk))
            if job.node is not None and place in places:
                continue  # it is being read for another
            padded = (len(chunks) + 1) * max(map(len, [*chunks, chunk]))
            special = job.special is not None or any(other.special is not None for other in reading)
            if reading and (padded > self.step_tokens or special):
                break
            reading.append(job)
            chunks.append(chunk)
            places.add(place)
        if not reading:
            return ready
        hidden = self._read(reading, chunks, **self._asked(reading[0], len(chunks[0])))
        # A special prompt is alone, and behind what is in front of it.
        parts = [hidden] if len(reading) == 1 else hidden.split([len(chunk) for chunk in chunks])
        for job, chunk, part in zip(reading, chunks, parts, strict=True):
            last = part[-1]
            self._remember(job, chunk, last)
            if job.n_read == len(job.context):
                ready.append((job, last[None]))
        return ready + self._take_known(jobs)

    def _next_chunk(self, job: Job) -> list[int]:
        stop = min(job.n_read + self.chunk, job.n_chunked) if job.special is None else job.n_chunked
        return job.context[job.n_read : stop]

    def _key(self, job: Job, chunk: list[int]) -> Hashable:
        """What a chunk's numbers follow from, beside the chunks before it."""
        return (job.special, *chunk)

    def _take_known(self, jobs: list[Job]) -> list[tuple[Job, Tensor]]:
        """Chunks that were read before. Gives those that are now read to their end."""
        ready = []
        for job in jobs:
            while job.is_chunked and job.node is not None and not job.node.is_gone:
                chunk = self._next_chunk(job)
                found = self.memory.prefixes.find(job.node, self._key(job, chunk))
                if found is None:
                    break
                assert job.cache is not None and found.hidden is not None
                end = job.n_before + job.n_read + len(chunk)
                job.cache.paste(end, found.parts)
                if job.request.prefix_lm:
                    job.cache.prefix_lengths = [end]
                job.node = found
                if job.n_read == len(job.context):
                    ready.append((job, found.hidden[None]))
        return ready

    def _remember(self, job: Job, chunk: list[int], last: Tensor) -> None:
        """Store what was read, if there is room for it."""
        if job.node is None or job.node.is_gone:
            job.node = None
            return
        assert job.cache is not None
        stop = job.cache.lengths[0]
        start = stop - len(chunk) - (job.n_before if job.n_read == len(chunk) else 0)
        parts = job.cache.cut(start, stop)
        n_bytes = last.nbytes + sum(tensor.nbytes for part in parts for tensor in part)
        fits = self.memory.fits(n_bytes, but=job.node)
        key = self._key(job, chunk)
        job.node = self.memory.prefixes.add(job.node, key, parts, last.clone()) if fits else None

    # ---- choosing

    def _choose(self, ready: list[tuple[Job, Tensor]]) -> None:
        """The next token of each, as events; where guesses were read too, the ones behind it as long as the guesses are
        right."""
        parts = [hidden for _, hidden in ready]
        logits = self.reader.logits(parts[0] if len(parts) == 1 else torch.cat(parts))  # [tokens, V]
        starts = itertools.accumulate([len(hidden) for _, hidden in ready], initial=0)
        places = {job: start for (job, _), start in zip(ready, starts, strict=False)}  # of each one's next logits
        jobs = [job for job, _ in ready]
        while jobs:
            at = [places[job] for job in jobs]
            part = logits if len(at) == len(logits) else logits[at]
            choices = choose(part, [job.next() for job in jobs], excluded=self.excluded, allowed=self._allowed(jobs))
            going = []
            for job, choice in zip(jobs, choices, strict=True):
                guess = job.guess
                event = job.take(choice)
                self._events.append(event)
                if event.finish_reason is not None:
                    self._end(job)
                elif guess is not None and guess.token_id == choice.token_id:
                    places[job] += 1
                    going.append(job)
            jobs = going
        for job in places:
            self._settle(job)

    def _settle(self, job: Job) -> None:
        """Forget what was read of wrong guesses, and of a context that has rolled."""
        if job.cache is None:
            return
        if self.speculator is not None and job.guesses:
            self.speculator.settle(job, len(job.guesses), job.n_right)
            job.guesses, job.n_right = [], 0
            job.cache.rewind([job.n_before + len(job.context) - 1])
        if job.roll_if_full():
            job.cache.rewind([0])
            job.node = None

    def _allowed(self, jobs: list[Job]) -> Tensor | None:
        """[B, V], where a constraint has a say."""
        masks = [None if job.matcher is None else job.matcher.allowed() for job in jobs]
        if all(mask is None for mask in masks):
            return None
        everything = torch.ones(self.config.vocab_size, dtype=torch.bool)
        return torch.stack([everything if mask is None else mask for mask in masks]).to(self.decoder.device)
