"""Steps of fixed shapes: they say what a cache of one's own says, and ask nothing of the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from leftward import Config
from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder
from leftward.model.slots import Pool, Slots, pool_row_bytes
from random_models import configs, random_decoder, random_ids

SMALL = Config(vocab_size=11, max_seq_len=32, n_layers=2, d_model=16, n_heads=4, n_kv_heads=2)


def step(decoder: Decoder, pool: Pool, ids: torch.Tensor, places: list[int], span: int) -> torch.Tensor:
    return decoder.hidden(ids, Slots(pool, torch.tensor(places), span))


def count(row: KVCache) -> None:
    """What a step leaves to the owner of the rows."""
    row.begin(1, [1])
    row.advance()


@given(configs(), st.data())
@settings(max_examples=60)
def test_a_step_says_what_caches_of_their_own_say(config: Config, data: st.DataObject) -> None:
    """Rows at unequal places, of which some take no part, until windows have rolled; then several tokens at once."""
    decoder = random_decoder(config)
    n_rows, rewindable = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    n_read = data.draw(st.integers(1, n_rows))
    pool = Pool(config, n_rows, config.max_seq_len, rewindable=rewindable)
    alone = [KVCache(config, 1, config.max_seq_len, rewindable=rewindable) for _ in pool.rows]
    ids = random_ids(config, n_rows, config.max_seq_len)
    with torch.inference_mode():
        for number, (row, own) in enumerate(zip(pool.rows, alone, strict=True)):
            if n := data.draw(st.integers(0, 14)):
                for cache in (row, own):
                    decoder.hidden(ids[number : number + 1, :n], cache)
        for _ in range(data.draw(st.integers(1, 6))):
            active = data.draw(st.sets(st.integers(0, n_read - 1), min_size=1))
            places = [pool.rows[number].lengths[0] if number in active else -1 for number in range(n_read)]
            idle = [number for number in range(n_rows) if number not in active]
            before = {
                number: [[t.clone() for t in pool.rows[number].held(i)] for i in range(len(decoder.blocks))]
                for number in idle
            }
            new = torch.tensor([[int(ids[number, max(place, 0)])] for number, place in enumerate(places)])
            hidden = step(decoder, pool, new, places, data.draw(st.integers(max(places) + 1, config.max_seq_len)))
            assert hidden.isfinite().all()
            for number in active:
                torch.testing.assert_close(
                    hidden[number], decoder.hidden(new[number : number + 1], alone[number])[0], atol=1e-5, rtol=1e-5
                )
                count(pool.rows[number])
            for number, held in before.items():
                for layer, tensors in enumerate(held):
                    assert all(map(torch.equal, tensors, pool.rows[number].held(layer)))
        number = data.draw(st.integers(0, n_rows - 1))
        row, own = pool.rows[number], alone[number]
        assert row.lengths == own.lengths
        back = max(0, row.lengths[0] - rewindable)
        row.rewind([back])
        own.rewind([back])
        torch.testing.assert_close(
            decoder.hidden(ids[:1, :3], row), decoder.hidden(ids[:1, :3], own), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_what_is_kept_is_kept_as_in_a_cache(dtype: torch.dtype) -> None:
    config = dataclasses.replace(SMALL, window=5, attention_pattern="LG")
    pool, own = Pool(config, 2, 20, dtype, rewindable=1), KVCache(config, 1, 20, dtype, rewindable=1)
    generator = torch.Generator().manual_seed(1)
    for place in range(14):
        own.begin(1, [1])
        slots = Slots(pool, torch.tensor([-1, place]), 16)
        for layer in range(2):
            keys, values = torch.randn(2, 2, 2, 1, 4, generator=generator)
            expected = own.append(layer, keys[1:], values[1:])
            found = slots.append(layer, keys, values)
            if place:  # the first pass of a cache gives back what it got
                n = expected[0].shape[2]
                assert all(torch.equal(mine[1:, :, :n], theirs) for mine, theirs in zip(found, expected, strict=True))
            assert all(map(torch.equal, pool.rows[1].held(layer), own.held(layer)))
        own.advance()
    assert pool.nbytes == 2 * pool_row_bytes(config, 20, dtype, rewindable=1)


def test_a_cleared_row_knows_nothing_of_who_had_it() -> None:
    """Not even numbers that are none, which a weight of zero would not hide."""
    decoder, pool = random_decoder(SMALL), Pool(SMALL, 1, 32)
    with torch.inference_mode():
        decoder.hidden(random_ids(SMALL, 1, 30), pool.rows[0])
        for tensor in pool.held[0]:
            tensor.fill_(torch.nan)
        pool.clear(0)
        hidden = step(decoder, pool, torch.tensor([[3]]), [0], 32)
        torch.testing.assert_close(hidden, decoder.hidden(torch.tensor([[3]])), atol=1e-5, rtol=1e-5)


# ---- what a GPU can record

ASKS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "unique", "lift_fresh")


class Listening(TorchDispatchMode):
    """Hears every operation. The last of ASKS is a tensor of Python's numbers, which would have to be copied to the
    device; the others are answers that the host would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removeprefix("aten::").split(".")[0])
        return func(*args, **(kwargs or {}))


@given(configs().filter(lambda config: not config.n_experts), st.sampled_from([torch.float32, torch.int8]))
@settings(max_examples=60)
def test_a_step_neither_asks_the_host_nor_is_told_anything_new(config: Config, dtype: torch.dtype) -> None:
    decoder, pool = random_decoder(config), Pool(config, 3, config.max_seq_len, dtype)
    heard = []
    for places in ([4, -1, 0], [20, 3, 7]):
        with torch.inference_mode(), Listening() as listening:
            inputs = torch.tensor([[1], [2], [3]]), torch.tensor(places)
            listening.names.clear()
            decoder.hidden(inputs[0], Slots(pool, inputs[1], 22))
        assert not set(listening.names) & set(ASKS)
        heard.append(listening.names)
    assert heard[0] == heard[1]


VARIANTS: list[dict[str, Any]] = [
    {"window": 4, "attention_pattern": "LG", "qk_norm": "per_head", "rope_local_base": 50.0, "position_pattern": "PN"},
    {"positions": "alibi", "attn_sinks": True, "block": "parallel", "norm": "layernorm", "feed_forward": "gelu"},
    {"positions": "learned", "attn_softcap": 2.0, "block": "sandwich", "norm_weight": "one_plus"},
    {"positions": "sinusoidal", "embed_norm": True, "block": "post", "feed_forward": "relu2", "n_kv_heads": 4},
    {"rope_pairing": "adjacent", "rope_fraction": 0.5, "rope_scaling": {"kind": "yarn", "factor": 4.0,
     "original_max_seq_len": 8}, "qk_norm": "whole", "vocab_multiple": 16},
]  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_step_is_one_graph_for_the_compiler(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """One, at whatever places the rows stand."""
    config = Config(**(SMALL.to_dict() | changes))
    decoder, pool = random_decoder(config), Pool(config, 3, 32, dtype)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def read(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return decoder.hidden(ids, Slots(pool, places, 16))

    torch._dynamo.reset()
    compiled = torch.compile(read, fullgraph=True, dynamic=False, backend=backend)
    with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
        for places in ([0, -1, 0], [1, 0, 1], [2, 1, -1], [9, 2, 15]):
            ids, at = torch.tensor([[1], [2], [3]]), torch.tensor(places)
            found = compiled(ids, at)
            torch.testing.assert_close(found, read(ids, at), atol=1e-5, rtol=1e-5)  # which writes the same again
    assert len(graphs) == 1


# ---- what cannot be


def test_what_slots_are_not_read_with() -> None:
    decoder, pool = random_decoder(SMALL), Pool(SMALL, 2, 8)
    slots = Slots(pool, torch.tensor([0, 0]), 8)
    with pytest.raises(ValueError, match=r"one token a row, \[2, 1\]"):
        decoder(torch.zeros(2, 3, dtype=torch.long), slots)
    with pytest.raises(ValueError, match="without lengths, documents"):
        decoder(torch.zeros(2, 1, dtype=torch.long), slots, [1, 1])


@pytest.mark.parametrize("wrong", [{"n_rows": 0}, {"capacity": 0}, {"rewindable": -1}])
def test_a_pool_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        Pool(SMALL, **{"n_rows": 1, "capacity": 4, **wrong})
