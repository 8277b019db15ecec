"""A program computes what its Decoder computes, and a token's numbers never depend on its company."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.modules.module import register_module_forward_hook

from leftward import Config
from leftward.formats.packing import with_packed_weights
from leftward.generation.program import Program, can_say
from leftward.kernels import forward, native
from leftward.kernels.forward import Op, Work
from leftward.model.cache import KVCache, Rows
from leftward.model.decoder import Decoder
from random_models import configs, random_decoder

pytestmark = pytest.mark.skipif(not native.available(), reason="no C++ compiler here")


DENSE = {"n_experts": 0, "d_shared": 0, "n_experts_per_token": 2, "router_normalised": True}

# Widths that packed matrices can have.
WIDE = {"vocab_size": 37, "d_model": 96, "n_heads": 4, "n_kv_heads": 2, "d_ff": 64, "rope_scaling": None}


@given(configs(**DENSE), st.integers(0, 2**31), st.data())
@settings(max_examples=150)
def test_hidden_and_logits_are_the_decoders(config: Config, seed: int, data: st.DataObject) -> None:
    decoder = random_decoder(config, seed)
    program = Program(decoder)
    assert can_say(decoder)
    length = data.draw(st.integers(2, config.max_seq_len))
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        hidden = decoder.hidden(ids)
        logits = decoder.logits(hidden)
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4)) | {0, length})
    cache = KVCache(config, 2, length, rewindable=data.draw(st.integers(0, 4)))
    parts = [program.hidden(ids[:, a:b].tolist(), cache).view(2, b - a, -1) for a, b in itertools.pairwise(cuts)]
    ours = torch.cat(parts, dim=1)
    torch.testing.assert_close(ours, hidden, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(program.logits(ours.flatten(0, 1)), logits.flatten(0, 1), rtol=2e-4, atol=2e-4)


def with_weights(decoder: Decoder, kind: str) -> Decoder:
    if kind in ("q4", "q8"):
        return with_packed_weights(decoder, kind)  # type: ignore[arg-type]
    return decoder.to(torch.bfloat16 if kind == "bf16" else torch.float32)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "q4", "q8", "int8 cache"])
@given(configs(**DENSE, **WIDE), st.integers(0, 2**31))
@settings(max_examples=25)
def test_company_and_portions_change_no_bit(kind: str, config: Config, seed: int) -> None:
    """Five texts, each read alone in one pass; and together, in portions of their own, by those whose turn it is."""
    program = Program(with_weights(random_decoder(config, seed), kind))
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    texts = [torch.randint(37, (chance.randint(1, 24),), generator=generator) for _ in range(5)]
    dtype = {"bf16": torch.bfloat16, "int8 cache": torch.int8}.get(kind, torch.float32)
    alone = [program.hidden([text.tolist()], KVCache(config, 1, 24, dtype)) for text in texts]
    # Memory of its own for each, of a size of its own.
    rooms = [chance.randint(len(text), 30) for text in texts]
    caches = [KVCache(config, 1, room, dtype, rewindable=chance.randint(0, 3)) for room in rooms]
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    while rows := [row for row in range(5) if caches[row].lengths[0] < len(texts[row])]:
        rows = chance.sample(rows, chance.randint(1, len(rows)))
        counts = [chance.randint(1, len(texts[row]) - caches[row].lengths[0]) for row in rows]
        new = [texts[row][caches[row].lengths[0] :][:count].tolist() for row, count in zip(rows, counts, strict=True)]
        hidden = program.hidden(new, Rows([caches[row] for row in rows]))
        for row, part in zip(rows, hidden.split(counts), strict=True):
            parts[row].append(part)
    for text_alone, together in zip(alone, parts, strict=True):
        assert torch.equal(text_alone, torch.cat(together))
    every = torch.cat(alone)
    assert torch.equal(program.logits(every)[:3], program.logits(every[:3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@given(st.data(), st.integers(0, 2**31))
@settings(max_examples=30)
def test_attention_over_many_keys(dtype: torch.dtype, data: st.DataObject, seed: int) -> None:
    """More keys than are worked on together, heads of all widths, groups of queries of all sizes; in portions, among
    others, and by any number of threads the same to the bit."""
    n_kv_heads, group = data.draw(st.sampled_from([(1, 8), (1, 3), (2, 1), (2, 5), (3, 2), (2, 4)]))
    window = data.draw(st.sampled_from([None, None, 1, 7, 63, 64, 65, 130]))
    config = Config(
        vocab_size=37,
        max_seq_len=200,
        n_layers=2,
        d_model=16,
        d_ff=16,
        n_heads=n_kv_heads * group,
        n_kv_heads=n_kv_heads,
        head_dim=data.draw(st.sampled_from([2, 6, 10, 20, 24, 36, 64, 72, 100, 128, 256])),
        positions=data.draw(st.sampled_from(["rotary", "alibi", "none"])),
        attn_softcap=data.draw(st.sampled_from([None, 2.0])),
        attn_sinks=data.draw(st.booleans()),
        window=window,
        attention_pattern="G" if window is None else data.draw(st.sampled_from(["LG", "L"])),
    )
    decoder = random_decoder(config, seed, std=0.2)
    program, chance = Program(decoder), random.Random(seed)
    lengths = [chance.choice([63, 64, 65, 127, 129, 200]), chance.randint(1, 200)]
    texts = [torch.randint(37, (n,), generator=torch.Generator().manual_seed(seed)) for n in lengths]
    alone = [program.hidden([text.tolist()], KVCache(config, 1, 200, dtype)) for text in texts]
    with torch.inference_mode():
        for text, ours in zip(texts, alone, strict=True):
            expected = decoder.hidden(text[None], KVCache(config, 1, 200, dtype))[0]
            # A number on the border between two of 8 or 16 bits goes either way.
            assert (ours - expected).abs().max() < {torch.float32: 5e-4}.get(dtype, 0.1)
    caches = [KVCache(config, 1, len(text), dtype, rewindable=chance.randint(0, 16)) for text in texts]
    parts: list[list[torch.Tensor]] = [[], []]
    most = chance.choice([3, 9, 70, 200])
    while rows := [row for row in (0, 1) if caches[row].lengths[0] < len(texts[row])]:
        counts = [chance.randint(1, min(most, len(texts[row]) - caches[row].lengths[0])) for row in rows]
        new = [texts[row][caches[row].lengths[0] :][:count].tolist() for row, count in zip(rows, counts, strict=True)]
        with threads(chance.choice([1, 2, 3, 7])):
            hidden = program.hidden(new, Rows([caches[row] for row in rows]))
        for row, part in zip(rows, hidden.split(counts), strict=True):
            parts[row].append(part)
    for text_alone, together in zip(alone, parts, strict=True):
        assert torch.equal(text_alone, torch.cat(together))


def test_a_key_whose_score_overflows_downwards_has_no_weight() -> None:
    """Alone in its portion of the keys, too: the 65th of them."""
    config = Config(
        vocab_size=2, max_seq_len=65, n_layers=1, d_model=64, d_ff=32, n_heads=1, positions="none", qk_norm="none"
    )
    decoder = random_decoder(config)
    embed, qkv = decoder.embed.weight, decoder.blocks[0].attn.qkv.weight
    with torch.no_grad():
        embed.zero_(), qkv.zero_()
        embed[0, 0] = embed[1, 1] = 1
        qkv[:64, :2] = 10  # queries
        qkv[64:128, 1] = -1e37  # the second token's key; the first one's is 0
        qkv[128:, 0] = 1  # the first token's value; the second one's is 0
    ours = Program(decoder).hidden([[0] * 64 + [1]], KVCache(config, 1, 65))
    with torch.inference_mode():
        expected = decoder.hidden(torch.tensor([[0] * 64 + [1]]))[0]
    assert expected.isfinite().all()
    torch.testing.assert_close(ours, expected)


@contextlib.contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["q4", "q8"])
def test_packed_weights_say_nearly_the_same(kind: str) -> None:
    config = Config(vocab_size=100, d_model=64, n_layers=2)
    decoder = random_decoder(config)
    packed = with_packed_weights(random_decoder(config), kind)  # type: ignore[arg-type]
    ids = torch.randint(100, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, ours = decoder(ids).log_softmax(-1), packed(ids).log_softmax(-1)
    program = Program(packed)
    through_program = (
        program.logits(program.hidden(ids.tolist(), KVCache(config, 2, 30))).view(2, 30, -1).log_softmax(-1)
    )
    torch.testing.assert_close(through_program, ours, rtol=0, atol=0.02)  # an input on a border rounds either way
    of_chance = (expected.exp() * (expected - ours)).sum(-1).mean()  # Kullback–Leibler
    assert of_chance < (0.1 if kind == "q4" else 0.001)
    assert packed.n_parameters == decoder.n_parameters


def test_a_context_that_is_too_long_is_refused() -> None:
    config = Config(vocab_size=10, max_seq_len=8, d_model=16, n_layers=1)
    program = Program(random_decoder(config))
    with pytest.raises(ValueError, match="longer than max_seq_len 8"):
        program.hidden([[0] * 9], KVCache(config, 1, 9))


@pytest.mark.parametrize("wrong", [-1, 10, 1 << 40])
def test_ids_that_the_model_has_not_are_refused(wrong: int) -> None:
    config = Config(vocab_size=10, max_seq_len=8, d_model=16, n_layers=1)
    with pytest.raises(IndexError, match="not all in the model's vocabulary of 10"):
        Program(random_decoder(config)).hidden([[1, 2], [wrong]], KVCache(config, 2, 8))


def test_what_it_can_not_say() -> None:
    assert not can_say(random_decoder(Config(vocab_size=10, d_model=16, n_experts=2)))
    assert not can_say(random_decoder(Config(vocab_size=10, d_model=16, causal=False)))
    assert not can_say(random_decoder(Config(vocab_size=10, d_model=16)).to(torch.float64))
    hooked = random_decoder(Config(vocab_size=10, d_model=16))
    hooked.blocks[0].register_forward_hook(lambda module, inputs, output: None)
    assert not can_say(hooked)
    overridden = random_decoder(Config(vocab_size=10, d_model=16))
    overridden.blocks[0].forward = lambda *inputs: inputs[0]  # type: ignore[method-assign]
    assert not can_say(overridden)
    plain = random_decoder(Config(vocab_size=10, d_model=16))
    handle = register_module_forward_hook(lambda module, inputs, output: None)
    try:
        assert not can_say(plain)
    finally:
        handle.remove()
    assert can_say(plain)
    changed = random_decoder(Config(vocab_size=10, d_model=16))
    changed.set_submodule("head", type("Other", (torch.nn.Linear,), {})(16, 10))
    assert not can_say(changed)


def test_numbers_of_any_size_are_activated_as_pytorch_does() -> None:
    """Far beyond where e^x is 0 or too large, too, and none stays none."""
    gate = torch.tensor([[-1e30, -1e13, -200.0, -88.0, 0.5, 88.0, 1e13, 1e30, torch.nan]])
    wide, out = torch.cat((gate, torch.ones_like(gate)), dim=1), torch.empty_like(gate)
    n = gate.shape[1]
    op = Op(kind=forward.ACTIVATE, in_=0, out=1, width=2 * n, rows=n, out_width=n)
    op.variant = forward.ACTIVATIONS.index("swiglu")
    Work([op], [wide, out])(1)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), equal_nan=True)
