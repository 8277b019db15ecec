"""The processes that train one model together: started by torchrun, all of them running the same loop.

A `World` is what that loop knows of the others: how many there are, sums over them, and what the first of them found.
Alone it is all of that at no cost. How a model is spread over the ranks is sharding.py's business.

Whatever depends on a clock, on a signal or on a disk is settled by the first rank, or summed, so that all ranks do the
same thing; and whatever ends one of them ends all, with the words of one.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from torch.utils.checkpoint import checkpoint

from leftward.data.batches import IGNORED, Batch
from leftward.data.order import share
from leftward.errors import UserError
from leftward.model.decoder import Decoder
from leftward.training.progress import Interrupted

if TYPE_CHECKING:  # a model is loaded without it, which takes long to import
    from leftward.training.recipe import Recipe

T = TypeVar("T")

_END = "leftward/end"
_FAILED = 70  # the exit code of ranks beside one that fails with a traceback
_PATIENCE = datetime.timedelta(hours=1)  # with a rank that writes a large file while the others wait
_LOOK_SECONDS = 0.5  # between looks whether another rank has ended
_GRACE_SECONDS = 10.0  # to end by itself, for a rank that may hang in a collective with one that has


class Grid(NamedTuple):
    """How many ranks there are of each kind; the last changes fastest from rank to rank, so that it stays in a node."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, ranks: int, replicate: int, tensor: int) -> Grid:
        """Raises: UserError where so many ranks make no such grid."""
        shard, rest = divmod(ranks, replicate * tensor)
        if rest or not shard:
            raise UserError(
                f"parallel.replicate {replicate} × parallel.tensor {tensor} needs a multiple of {replicate * tensor} "
                f"ranks, and there {'is 1' if ranks == 1 else f'are {ranks}'}: start more with torchrun, or lower them"
            )
        return cls(replicate, shard, tensor)

    def place(self, rank: int) -> Grid:
        """Where `rank` is, counted from 0 in each dimension."""
        rest, tensor = divmod(rank, self.tensor)
        return Grid(*divmod(rest, self.shard), tensor)


def check(recipe: Recipe, grid: Grid) -> None:
    """Raises: UserError where what the recipe asks for can't be done by so many ranks."""
    share(0, recipe.training.batch_size, 0, grid.replicate * grid.shard)
    config, n = recipe.config(vocab_size=1), grid.tensor
    if n == 1:
        return
    problems = [
        f"{what} {size} is not divisible by {n}"
        for what, size in (
            ("model.n_heads", config.n_heads),
            ("model.n_kv_heads", config.n_kv_heads),
            ("model.d_ff", config.d_ff),
            ("training.seq_len", recipe.seq_len),
        )
        if size % n
    ]
    if config.n_experts:
        problems.append("experts (model.n_experts) are not cut over tensor ranks")
    if config.qk_norm == "whole":
        problems.append("model.qk_norm whole is a norm over all heads, of which a tensor rank has some")
    if config.positions in ("alibi", "alibi_mpt"):
        problems.append(f"model.positions {config.positions} has a slope a head, which tensor ranks don't share out")
    if recipe.training.sample_prompts:
        problems.append("training.sample_prompts are written by ranks that have all heads")
    if problems:
        raise UserError(
            f"parallel.tensor is {n}, but {'; '.join(problems)}: set parallel.tensor to another number or 1"
        )


class World:
    """The ranks that train together, as one of them sees it."""

    def __init__(self, rank: int = 0, size: int = 1, on_this_machine: int = 1, store: Any = None) -> None:
        self.rank, self.size, self.on_this_machine = rank, size, on_this_machine
        self.grid = Grid(shard=size)
        self._store, self._asked = store, 0
        self._heard: int | None = None  # the exit code that another rank has ended all with

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    @property
    def place(self) -> Grid:
        """Where this rank is in the grid."""
        return self.grid.place(self.rank)

    def arrange(self, recipe: Recipe) -> None:
        """Make the grid that a recipe asks for. Raises: UserError, where so many ranks make none, or can't share out
        what the recipe says."""
        self.grid = Grid.of(self.size, recipe.parallel.replicate, recipe.parallel.tensor)
        if self.size > 1:
            check(recipe, self.grid)

    def share(self, position: int, size: int) -> tuple[int, int]:
        """The rows of a batch that are for this rank, as data/order.py shares them out: all but tensor ranks take some.
        Raises: UserError."""
        return share(position, size, self.rank // self.grid.tensor, self.size // self.grid.tensor)

    def own_tokens(self, x: Tensor) -> Tensor:
        """Of [B, T, …], the positions that this tensor rank works on between attention and feed-forward."""
        return x if self.grid.tensor == 1 else x.chunk(self.grid.tensor, dim=1)[self.place.tensor]

    def shared(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """This rank's of the batches that all ranks are given; each rank gets as many, where they don't go round such
        as have no target."""
        index, n = self.rank // self.grid.tensor, self.size // self.grid.tensor
        while group := list(itertools.islice(batches, n)):
            batch = group[min(index, len(group) - 1)]
            yield batch if index < len(group) else batch._replace(targets=np.full_like(batch.targets, IGNORED))

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks, which wait for each other."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(value) for value in total]

    def agree(self, value: float) -> float:
        """The first rank's value."""
        return self.sum(value if self.is_first else 0.0)[0]

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return self.sum(flag)[0] > 0

    def wait(self) -> None:
        """For all ranks to come here."""
        self.sum(0.0)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make`, called on the first rank alone, gives there: something that JSON has. The others wait, however
        long that takes."""
        if self.size == 1:
            return make()
        self._asked += 1
        key = f"leftward/first/{self._asked}"
        if self.is_first:
            value = make()
            self._store.set(key, json.dumps(value))
            return value
        pause = 0.01
        while not self._store.check([key]):
            if (code := self._ended()) is not None:
                raise SystemExit(code)
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_SECONDS)
        result: T = json.loads(self._store.get(key))
        return result

    def after_first(self, make: Callable[[], T]) -> T:
        """What `make` gives here, called on the other ranks once the first one has done it. All wait till all have it,
        since the first may take away again what it made, should something fail."""
        made = make() if self.is_first else None
        self.from_first(lambda: None)
        made = make() if made is None else made
        self.wait()
        return made

    def compiles(self, device: torch.device) -> bool:
        """Whether torch.compile works on every rank."""
        try:
            torch.compile(lambda x: x.sin().exp())(torch.ones(8, device=device))
            works = True
        except Exception:  # whatever a compiler back end may raise
            works = False
        return not self.any(not works)

    def leave_it_to(self, knows: bool) -> None:
        """Before all ranks raise an error: the first that `knows` the reason goes on to do so, and the others end here
        when it has."""
        if self.size == 1:
            return
        knowing = self.sum(*(float(knows and rank == self.rank) for rank in range(self.size)))
        if self.rank != (knowing.index(1.0) if 1.0 in knowing else 0):
            while (code := self._ended()) is None:
                time.sleep(0.01)
            raise SystemExit(code)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks what ends the block at once, before anything is tidied up that they may stumble over."""
        try:
            yield
        except Interrupted:  # which all ranks agree on
            raise
        except BaseException as error:
            if self.size > 1:
                self._end(error)
            raise

    def _ended(self) -> int | None:
        """The exit code that a rank has ended all with; None: none has."""
        return self._heard if self._heard is not None else self._look(self._store)

    def _look(self, store: Any) -> int | None:
        try:
            return int(store.get(_END).split()[1]) if store.check([_END]) else None
        except RuntimeError:  # whoever keeps the store has ended
            return _FAILED

    def watch(self, store: Any, over: threading.Event) -> None:
        """End this process where another rank has ended, and this one, which may wait for it in a collective, doesn't.

        Args:
            store: a connection of the watching thread's own.
            over: nothing is to be watched any more.
        """
        while self._heard is None and not over.wait(_LOOK_SECONDS):
            self._heard = self._look(store)
        if not over.wait(_GRACE_SECONDS):
            os._exit(_FAILED if self._heard is None else self._heard)

    def _end(self, error: BaseException) -> int | None:
        """Tell the other ranks that this one ends. Returns None where it is the first to, and so the one to say why;
        otherwise the code to leave with."""
        mine = f"{self.rank} {_code(error)}"
        try:
            said = self._store.compare_set(_END, "", mine).decode()
        except RuntimeError:  # whoever keeps the store has ended
            return _code(error) if self._heard is None else self._heard
        if said != mine:
            return int(said.split()[1])
        # torchrun asks the others to end as soon as one has, which may be before this one has said why.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return None


ALONE = World()
_joined: World | None = None


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """The ranks that torchrun has started, as long as the block lasts; this process alone, if it wasn't torchrun. A
    block within another one has the same World.

    An exception is raised by the first rank to meet one; the others leave without a word, with its exit code.
    """
    global _joined
    if _joined is not None or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield _joined or ALONE
        return
    if dist.is_initialized():
        raise UserError(
            "torch.distributed is initialised already: leave that to leftward, which joins torchrun's ranks"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, size = next(rendezvous("env://"))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    world = World(rank, size, int(os.environ.get("LOCAL_WORLD_SIZE", size)), store)
    over = threading.Event()
    threading.Thread(target=world.watch, args=(store.clone(), over), daemon=True).start()
    _joined = world
    try:
        yield world
        world.wait()
    except BaseException as error:
        code = world._end(error)
        if code is not None:
            raise SystemExit(code) from None
        over.set()
        if world.is_first and not isinstance(error, SystemExit):  # which may keep the store
            time.sleep(2 * _LOOK_SECONDS)  # till all have heard
        if isinstance(error, dist.DistError) or "by peer" in str(error):
            raise UserError(
                "another rank is gone without a word (killed, or its machine has failed): what was saved stays, and "
                "`leftward train --resume` goes on from it"
            ) from error
        raise
    finally:
        _joined = None
    over.set()
    dist.destroy_process_group()


def recompute_blocks(decoder: Decoder) -> None:
    """Let the backward pass compute each block again, so that the forward pass keeps only what goes into it."""
    for block in decoder.blocks:
        setattr(block, "forward", functools.partial(checkpoint, block.forward, use_reentrant=False))  # noqa: B010


def _code(error: BaseException) -> int:
    """The exit code that an error ends all ranks with."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else _FAILED
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return 130
    return 2 if isinstance(error, UserError) else _FAILED
