"""Steps that are recorded and repeated. A GPU's graphs are played by a tape, which repeats operations on the memory
that they were recorded on, and not one line of Python beside them."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import SMALL, check_texts, drive, finish, greedy, ids_of, make, request_lists
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leftward import Config
from leftward.errors import UserError
from leftward.generation import graphs, memory
from leftward.generation.engine import Engine
from leftward.generation.graphs import CudaGraphs, Steps, Work, can_be_recorded
from leftward.generation.requests import Request
from leftward.generation.settings import Sampling
from leftward.generation.speculative import Speculator
from leftward.model.cache import row_bytes
from leftward.model.decoder import Decoder
from leftward.model.slots import Pool, pool_row_bytes
from random_models import configs, random_decoder, random_ids


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def play(self) -> None:
        for func, args, kwargs, result in self.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # no view
                    old.copy_(new)


def record(work: Work) -> Work:
    with Tape() as tape:
        result = work()

    def repeated() -> torch.Tensor:
        tape.play()
        return result

    return repeated


def static(decoder: Decoder, *, recorded: bool = True, **options: Any) -> Engine:
    engine = make(decoder, static=True, **options)
    if recorded:
        assert isinstance(engine.memory, memory.Slotted)
        engine.reader._steps = Steps(decoder, engine.memory.pool, capture=record)
    return engine


def texts(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    for request in requests:
        engine.submit(request)
    events = finish(engine)
    assert all(of_one[-1].message is None for of_one in events.values())
    return [ids_of(events[number]) for number in range(len(requests))]


def sampled(n: int, seed: int, **more: Any) -> Sampling:
    return Sampling(max_tokens=n, seed=seed, temperature=0.9, **more)


@contextlib.contextmanager
def short_spans(n: int) -> Iterator[None]:
    """So that small contexts have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_LEAST_SPAN", n)
        yield


# ---- the same texts


@given(configs(vocab_size=60), st.data())
@settings(max_examples=25)
def test_a_text_does_not_depend_on_what_happens_beside_it(config: Config, data: st.DataObject) -> None:
    """As of engines whose memory grows, test_engine.py; here more requests than rows wait for one."""
    decoder = random_decoder(config, std=0.3)
    requests = data.draw(request_lists(config))
    rows = data.draw(st.integers(1, 4))
    engine = static(
        decoder,
        recorded=can_be_recorded(decoder) and data.draw(st.booleans()),
        max_rows=rows,
        chunk=data.draw(st.integers(1, 9)),
        step_tokens=data.draw(st.integers(1, 30)),
        kv_bytes=int(
            pool_row_bytes(config, config.max_seq_len, torch.float32) * data.draw(st.sampled_from([1.0, 1.6, 2.5, 8.0]))
        ),
        share_prefixes=data.draw(st.booleans()),
    )
    with short_spans(data.draw(st.sampled_from([1, 8, 256]))):
        events, cancelled = drive(engine, requests, data.draw(st.integers(0, 10**6)))
    check_texts(decoder, requests, events, cancelled)


MIXES: dict[str, tuple[list[Request], dict[str, Any]]] = {
    "equal beginnings": (
        [
            Request(ids=[*random_ids(SMALL, 20).tolist(), i], sampling=greedy(20) if i % 2 else sampled(20, i))
            for i in range(7)
        ],
        {"max_rows": 3, "chunk": 8},
    ),
    "int8": (
        [
            Request(ids=random_ids(SMALL, 3 + 9 * i, seed=i).tolist(), sampling=greedy(12 + i) if i else sampled(12, 1))
            for i in range(5)
        ],
        {"kv_dtype": "int8", "chunk": 16},
    ),
    "rolling": (
        [
            Request(ids=random_ids(SMALL, 40, seed=i).tolist(), sampling=sampled(90, i), at_context="roll", n_keep=i)
            for i in range(3)
        ],
        {"max_rows": 2, "chunk": 16},
    ),
    "special prompts": (
        [
            Request(ids=[1, 2, 3], sampling=greedy(20), prefix_embeddings=torch.ones(4, 32)),
            Request(ids=random_ids(SMALL, 12).tolist(), sampling=sampled(20, 3), prefix_lm=True),
            Request(ids=[7], sampling=sampled(30, 4)),
            Request(ids=random_ids(SMALL, 12).tolist(), sampling=sampled(20, 3), prefix_lm=True),
        ],
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("windows", [{}, {"window": 9, "attention_pattern": "LG"}])
def test_the_same_as_an_engine_whose_memory_grows(mix: str, windows: dict[str, Any]) -> None:
    requests, options = MIXES[mix]
    decoder = random_decoder(dataclasses.replace(SMALL, **windows), std=0.3)
    with short_spans(16):
        assert texts(static(decoder, **options), requests) == texts(make(decoder, **options), requests)


@pytest.mark.parametrize("kind", ["prompt_lookup", "draft"])
def test_guesses_are_read_beside_steps(kind: Any) -> None:
    """Some are right, some wrong; others are not guessed for."""
    config = dataclasses.replace(SMALL, window=9, attention_pattern="LG")
    decoder, draft = random_decoder(config, std=0.3), random_decoder(config, std=0.28)
    repeated = random_ids(config, 6).tolist() * 3
    requests = [Request(ids=[*repeated, i], sampling=greedy(30), speculative=kind if i else None) for i in range(4)]
    found = []
    for make_one in (static, make):
        speculator = Speculator(60, draft)
        engine = make_one(decoder, speculator=speculator, max_rows=3)
        for request in requests:
            engine.submit(request)
        events = finish(engine)
        found.append([ids_of(events[number]) for number in range(4)])
        assert sum(of_one[-1].n_guessed for of_one in events.values()) > 0
        assert not speculator._states
    assert found[0] == found[1]


def test_a_row_without_numbers_harms_nobody_who_has_the_row_later() -> None:
    decoder = random_decoder(dataclasses.replace(SMALL, tie_embeddings=False), std=0.3)
    with torch.no_grad():
        decoder.embed.weight[7] = torch.nan
    excluded = torch.zeros(60, dtype=torch.bool)
    excluded[7] = True
    clean = Request(ids=[3, 4, 5], sampling=greedy(12))
    engine = static(decoder, max_rows=1, excluded=excluded)
    for request in (Request(ids=[3] * 30 + [7], sampling=greedy(12)), clean):
        engine.submit(request)
    events = finish(engine)
    assert events[0][-1].finish_reason == "error"
    assert ids_of(events[1]) == texts(make(decoder, excluded=excluded), [clean])[0]


# ---- which steps there are


def test_few_shapes_are_made_once_each_and_reach_no_further_than_needed() -> None:
    decoder = random_decoder(SMALL, std=0.3)
    engine = static(decoder, max_rows=5)
    steps = engine.reader._steps
    assert steps is not None
    made: list[tuple[int, int]] = []
    work = steps._work
    steps._work = lambda n_rows, span: made.append((n_rows, span)) or work(n_rows, span)  # type: ignore[method-assign]
    with short_spans(16):
        texts(engine, [Request(ids=[1] * 4, sampling=greedy(50))])
        assert made == [(1, 16), (1, 32), (1, 64)]
        texts(engine, [Request(ids=[1] * 4, sampling=greedy(20 + 4 * n)) for n in range(5)])
    # There are five rows, which is no power of two, and the last of them goes on longest.
    assert made[3:] == [(5, 16), (5, 32), (5, 64)]


def test_idle_rows_are_passed_over() -> None:
    """Steps of the rows 0 and 2 of 3 say what each says alone, and row 1 keeps what it has."""
    decoder = random_decoder(SMALL, std=0.3)
    pool = Pool(SMALL, 3, 64)
    steps = Steps(decoder, pool, capture=record)
    ids = random_ids(SMALL, 3, 9)
    with torch.inference_mode():
        for row, n in zip(pool.rows, (2, 5, 7), strict=True):
            decoder.hidden(ids[:1, :n], row)
        before = [tensor[1, :, :-1].clone() for held in pool.held for tensor in held]
        found = [steps.hidden(ids[1:, turn].tolist(), [pool.rows[0], pool.rows[2]]) for turn in range(2)]
        for turn, hidden in enumerate(found):  # what was recorded, and repeated, which has not overwritten the first
            for got, n, other in zip(hidden, (2, 7), (1, 2), strict=True):
                whole = torch.cat((ids[0, :n], ids[other, : turn + 1]))[None]
                torch.testing.assert_close(got, decoder.hidden(whole)[0, -1], atol=1e-5, rtol=1e-5)
        assert all(map(torch.equal, before, (tensor[1, :, :-1] for held in pool.held for tensor in held)))
    assert [row.lengths[0] for row in pool.rows] == [4, 5, 9]


def test_which_models_can_be_recorded() -> None:
    assert can_be_recorded(random_decoder(SMALL))
    assert not can_be_recorded(random_decoder(dataclasses.replace(SMALL, n_experts=3, n_experts_per_token=2)))
    watched = random_decoder(SMALL)
    handle = watched.blocks[0].register_forward_hook(lambda module, inputs, output: None)
    assert not can_be_recorded(watched)
    handle.remove()
    assert can_be_recorded(watched)


# ---- memory


def test_memory_is_there_from_the_start() -> None:
    decoder = random_decoder(SMALL, std=0.3)
    a_row = pool_row_bytes(SMALL, 64, torch.float32)
    assert (
        a_row == row_bytes(SMALL, 64, torch.float32) + 2 * 2 * 2 * 8 * 4
    )  # a slot: 2 layers, keys, values, 2 heads of 8
    engine = static(decoder, kv_bytes=int(2.5 * a_row), chunk=8)
    for i in range(4):
        engine.submit(Request(ids=random_ids(SMALL, 12, seed=i).tolist(), sampling=greedy(6)))
    assert (engine.kv_bytes_used, engine.n_running) == (2 * a_row, 0)
    engine.step()
    assert engine.n_running == 2
    assert engine.kv_bytes_used > 2 * a_row  # and beginnings
    assert engine.cancel(1)
    engine.step()
    assert [job.number for job in engine._running] == [0, 2]
    assert isinstance(engine.memory, memory.Slotted)
    assert engine._running[1].cache is engine.memory.pool.rows[1]  # at once
    finish(engine)
    assert engine.memory._free == [0, 1]
    assert engine.kv_bytes_used <= engine.kv_bytes


def test_a_draft_has_room_beside_each_row() -> None:
    decoder = random_decoder(SMALL, std=0.3)
    speculator = Speculator(60, random_decoder(SMALL))
    whole = pool_row_bytes(SMALL, 64, torch.float32, 16) + speculator.row_bytes(64)
    engine = static(decoder, kv_bytes=3 * whole - 1, speculator=speculator, chunk=8)
    assert engine.kv_bytes_used == 2 * pool_row_bytes(SMALL, 64, torch.float32, 16)
    requests = [
        Request(ids=random_ids(SMALL, 30, seed=i).tolist(), sampling=greedy(20), speculative="draft") for i in range(4)
    ]
    for request in requests:
        engine.submit(request)
    while engine.n_requests:
        engine.step()
        assert engine.kv_bytes_used <= engine.kv_bytes


def test_one_row_is_as_long_as_there_is_room_for() -> None:
    decoder = random_decoder(SMALL, std=0.3)
    engine = static(decoder, kv_bytes=pool_row_bytes(SMALL, 20, torch.float32))
    engine.submit(Request(ids=[5] * 8, sampling=greedy(40)))
    with pytest.raises(UserError, match=r"22 tokens, more than .*kv_bytes.* 21"):
        engine.submit(Request(ids=[5] * 22, sampling=greedy(1)))
    events = finish(engine)
    assert (len(ids_of(events[0])), events[0][-1].finish_reason) == (13, "context")
    with pytest.raises(UserError, match="kv_bytes is 100: one token of this model takes 512"):
        static(decoder, kv_bytes=100)


def test_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Pool:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory, "Pool", full)
    with pytest.raises(UserError, match=r"kv_bytes is 1,073,741,824: cpu has no room for 64 sequences of 64 tokens"):
        static(random_decoder(SMALL))


def test_half_of_what_a_gpu_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch keeps of earlier engines is free too: 100 with the driver, 30 of PyTorch's 50 in use."""
    for name, value in (("mem_get_info", (100, 500)), ("memory_reserved", 50), ("memory_allocated", 30)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert memory._default_bytes(torch.device("cuda"), 7) == 60
    assert memory._default_bytes(torch.device("cpu"), 7) == 1 << 30


# ---- compiled, recorded


def test_compiled_steps_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **how: compiled(step, backend="eager", **how))
    decoder = random_decoder(dataclasses.replace(SMALL, window=9, attention_pattern="LG"), std=0.3)
    requests = [Request(ids=random_ids(SMALL, 5 + i, seed=i).tolist(), sampling=sampled(40, i)) for i in range(3)]
    with short_spans(16):  # more shapes than PyTorch compiles unasked
        engine = static(decoder, recorded=False, compile=True, max_rows=20)
        more = [Request(ids=[i], sampling=greedy(40 - i)) for i in range(17)]
        assert texts(engine, requests + more) == texts(make(decoder), requests + more)
    assert engine.reader.path.endswith("steps of fixed shapes, compiled")


def test_what_cannot_be_compiled_or_recorded_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler\nand so on")

    monkeypatch.setattr(torch, "compile", lambda step, **how: fails)
    decoder = random_decoder(SMALL, std=0.3)
    request = Request(ids=[3], sampling=greedy(5))
    engine = static(decoder, recorded=False, compile=True)
    with pytest.warns(RuntimeWarning, match="without steps that are compiled: RuntimeError: no compiler$"):
        found = texts(engine, [request])
    assert found == texts(make(decoder), [request])
    assert engine.reader.path == "PyTorch's operations in float32 on cpu, steps of fixed shapes"
    assert isinstance(engine.memory, memory.Slotted)
    engine.reader._steps = Steps(decoder, engine.memory.pool, capture=fails)
    assert engine.reader.path.endswith("steps of fixed shapes, recorded as CUDA graphs")
    with pytest.warns(RuntimeWarning, match="without steps that are recorded as a CUDA graph"):
        engine.submit(request)
        assert ids_of(finish(engine)[1]) == found[0]
    assert engine.reader.path.endswith("steps of fixed shapes")


def test_nothing_is_compiled_where_nothing_is_static() -> None:
    with pytest.raises(UserError, match=re.escape("compile is for static steps")):
        make(random_decoder(SMALL), compile=True)


def test_a_graph_is_recorded_behind_trial_passes_on_a_stream_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Stream:
        def __init__(self, name: str = "aside") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            done.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self) -> None:
            done.append("replay")

    @contextlib.contextmanager
    def within(what: str) -> Iterator[None]:
        done.append(f"begin {what}")
        yield
        done.append(f"end {what}")

    def graph(graph: Graph, *, pool: str, capture_error_mode: str) -> contextlib.AbstractContextManager[None]:
        return within(f"graph in {pool}, {capture_error_mode}")

    fakes = {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": lambda: "memory",
        "current_stream": lambda: Stream("here"),
        "stream": lambda stream: within(stream.name),
        "device": lambda device: contextlib.nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    result = torch.ones(1)

    def work() -> torch.Tensor:
        done.append("work")
        return result

    repeated = CudaGraphs(torch.device("cuda"))(work)
    assert done == [
        *("aside waits for here", "begin aside", "work", "work", "work", "end aside", "here waits for aside"),
        *("begin graph in memory, thread_local", "work", "end graph in memory, thread_local"),
    ]
    done.clear()
    assert repeated() is repeated() is result
    assert done == ["replay", "replay"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs take a GPU")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_on_a_gpu(compile: bool, kv_dtype: Any) -> None:
    config = dataclasses.replace(SMALL, window=9, attention_pattern="LG")
    decoder = random_decoder(config, std=0.3).to("cuda")
    requests = [Request(ids=random_ids(SMALL, 5 + i, seed=i).tolist(), sampling=sampled(40, i)) for i in range(5)]
    engine = make(decoder, compile=compile, kv_dtype=kv_dtype, max_rows=3)
    found = texts(engine, requests)
    assert engine.reader.path.endswith("compiled, recorded as CUDA graphs" if compile else "recorded as CUDA graphs")
    assert found == texts(make(decoder, static=False, kv_dtype=kv_dtype), requests)
