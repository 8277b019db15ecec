"""The invariants of the Decoder, over Configs drawn at random, and right values from outside the code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from leftward import Config, preset
from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder
from random_models import configs, random_decoder, random_ids

TOLERANCE = 2e-5

# ---- the invariants


@given(configs(), st.data())
@settings(max_examples=60)
def test_a_position_depends_on_nothing_to_its_right(config: Config, data: st.DataObject) -> None:
    decoder = random_decoder(config)
    length = data.draw(st.integers(2, config.max_seq_len))
    split = data.draw(st.integers(1, length - 1))
    ids = random_ids(config, 2, length)
    changed = ids.clone()
    changed[:, split:] = (changed[:, split:] + 1) % config.vocab_size
    with torch.inference_mode():
        before, after = decoder(ids), decoder(changed)
    # Experts gather tokens, so that the shapes of their products, and with them the rounding, depend on all tokens.
    tolerance = TOLERANCE if config.n_experts else 0.0
    torch.testing.assert_close(before[:, :split], after[:, :split], atol=tolerance, rtol=0)
    assert not torch.equal(before[:, split:], after[:, split:])  # and the change did reach the model


@st.composite
def masks(draw: st.DrawFn, config: Config, batch: int, length: int) -> dict[str, Any]:
    """Any mix of what a caller may ask for beside the Config's own mask."""
    asked: dict[str, Any] = {}
    if draw(st.booleans()):
        borders = draw(
            st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=batch, max_size=batch)
        )
        asked["documents"] = torch.tensor(borders).cumsum(dim=1)
    if draw(st.booleans()):
        asked["prefix_lengths"] = draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch))
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(3)
        asked["prefix_embeddings"] = torch.randn(
            batch, draw(st.integers(1, length)), config.d_model, generator=generator
        )
    return asked


@given(configs(), st.data())
@settings(max_examples=200)
def test_cached_in_chunks_equals_full(config: Config, data: st.DataObject) -> None:
    """Every variant, every mask and every mix of them, in chunks of any size, with windows that roll."""
    decoder = random_decoder(config)
    length = data.draw(st.integers(1, config.max_seq_len))
    asked = data.draw(masks(config, batch=2, length=length))
    vectors = asked.get("prefix_embeddings")
    n_vectors = 0 if vectors is None else vectors.shape[1]
    ids = random_ids(config, 2, length - n_vectors)
    cache = KVCache(config, batch=2, capacity=length, rewindable=data.draw(st.integers(0, 3)))
    # Vectors, and a prefix that sees itself, are read in one pass.
    least = max(n_vectors, *asked.get("prefix_lengths", [0]))
    chunks, done = [], 0
    with torch.inference_mode():
        full = decoder(ids, **asked)
        while done < length:
            size = data.draw(st.integers(max(1, least - done), length - done))
            now = dict(asked) if done == 0 else {}
            if "documents" in asked:
                now["documents"] = asked["documents"][:, done : done + size]
            chunks.append(decoder(ids[:, max(0, done - n_vectors) : done + size - n_vectors], cache, **now))
            done += size
    assert cache.lengths == [length, length]
    torch.testing.assert_close(torch.cat(chunks, dim=1), full, atol=TOLERANCE, rtol=0)


@given(configs(), st.data())
@settings(max_examples=60)
def test_documents_of_a_packed_row_are_each_as_if_alone(config: Config, data: st.DataObject) -> None:
    decoder = random_decoder(config)
    lengths = data.draw(st.lists(st.integers(1, 8), min_size=2, max_size=3))
    rows = [random_ids(config, 1, length, seed=i) for i, length in enumerate(lengths)]
    numbers = torch.cat([torch.full((1, length), i) for i, length in enumerate(lengths)], dim=1)
    with torch.inference_mode():
        packed = decoder(torch.cat(rows, dim=1), documents=numbers)
        alone = torch.cat([decoder(row) for row in rows], dim=1)
    torch.testing.assert_close(packed, alone, atol=TOLERANCE, rtol=0)


@given(configs(causal=False), st.data())
@settings(max_examples=60)
def test_without_the_mask_the_other_masks_still_hold(config: Config, data: st.DataObject) -> None:
    """Documents and windows, with vectors in front: what a position sees is what it sees in a full table of rules."""
    decoder = random_decoder(config)
    length = data.draw(st.integers(2, config.max_seq_len))
    borders = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    numbers = torch.tensor([borders]).cumsum(dim=1)
    vectors = torch.randn(1, 1, config.d_model, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        packed = decoder(random_ids(config, 1, length - 1), documents=numbers, prefix_embeddings=vectors)[0]
        ids = random_ids(config, 1, length - 1)
        for number in numbers.unique():
            places = (numbers[0] == number).nonzero()[:, 0]
            first = int(places[0])
            in_front = vectors if first == 0 else None
            alone = ids[:, max(0, first - 1) : int(places[-1])]
            expected = decoder(alone, prefix_embeddings=in_front)[0]
            torch.testing.assert_close(packed[places], expected, atol=TOLERANCE, rtol=0)


@given(configs(causal=False), st.data())
@settings(max_examples=30)
def test_without_the_mask_padding_is_still_unseen(config: Config, data: st.DataObject) -> None:
    decoder = random_decoder(config)
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=3))
    ids = random_ids(config, len(lengths), max(lengths))
    with torch.inference_mode():
        together = decoder(ids, lengths=lengths)
        for row, length in enumerate(lengths):
            alone = decoder(ids[row : row + 1, :length])[0]
            torch.testing.assert_close(together[row, :length], alone, atol=TOLERANCE, rtol=0)


@given(configs(), st.lists(st.integers(1, 12), min_size=2, max_size=4), st.data())
@settings(max_examples=60)
def test_rows_of_unequal_length_equal_each_row_alone(config: Config, lengths: list[int], data: st.DataObject) -> None:
    """Prefill with padding at the right, then a padded chunk behind unequal lengths, then single tokens."""
    decoder = random_decoder(config)
    more = [data.draw(st.integers(1, 4)) for _ in lengths]
    steps = 3
    totals = [first + second + steps for first, second in zip(lengths, more, strict=True)]
    rows = [random_ids(config, total, seed=i) for i, total in enumerate(totals)]
    # A padded chunk is written whole, behind the longest row.
    cache = KVCache(config, batch=len(rows), capacity=max(lengths) + max(more) + steps)
    outputs: list[list[torch.Tensor]] = [[] for _ in rows]
    done = [0] * len(rows)
    with torch.inference_mode():
        for counts in (lengths, more, *[[1] * len(rows)] * steps):
            chunk = torch.zeros(len(rows), max(counts), dtype=torch.long)
            for i, row in enumerate(rows):
                chunk[i, : counts[i]] = row[done[i] : done[i] + counts[i]]
            logits = decoder(chunk, cache, lengths=list(counts))
            for i in range(len(rows)):
                outputs[i].append(logits[i, : counts[i]])
                done[i] += counts[i]
        alone = [decoder(row[None])[0] for row in rows]
    assert cache.lengths == totals
    for batched, single in zip(outputs, alone, strict=True):
        torch.testing.assert_close(torch.cat(batched), single, atol=TOLERANCE, rtol=0)


@given(configs())
@settings(max_examples=30)
def test_a_rewound_cache_forgets(config: Config) -> None:
    decoder = random_decoder(config)
    ids = random_ids(config, 2, 12)
    other = random_ids(config, 2, 12, seed=1)
    cache = KVCache(config, batch=2, capacity=20, rewindable=9)
    with torch.inference_mode():
        decoder(ids, cache)
        cache.rewind([7, 3])
        logits = decoder(other[:, :4], cache)
        for row, kept in enumerate((7, 3)):
            sequence = torch.cat((ids[row, :kept], other[row, :4]))
            torch.testing.assert_close(logits[row], decoder(sequence[None])[0, kept:], atol=TOLERANCE, rtol=0)


@given(configs())
@settings(max_examples=30)
def test_a_forked_cache_shares_nothing(config: Config) -> None:
    decoder = random_decoder(config)
    ids = random_ids(config, 2, 8)
    cache = KVCache(config, batch=2, capacity=16)
    with torch.inference_mode():
        decoder(ids, cache)
        child = cache.fork([1, 1, 0])
        tails = random_ids(config, 3, 4, seed=1)
        forked = decoder(tails, child)
        continued = decoder(tails[:2], cache)  # the parent still holds its own
        for row, parent in enumerate((1, 1, 0)):
            full = decoder(torch.cat((ids[parent], tails[row]))[None])[0, 8:]
            torch.testing.assert_close(forked[row], full, atol=TOLERANCE, rtol=0)
        for row in range(2):
            full = decoder(torch.cat((ids[row], tails[row]))[None])[0, 8:]
            torch.testing.assert_close(continued[row], full, atol=TOLERANCE, rtol=0)


@given(configs(dropout=0.3))
@settings(max_examples=10)
def test_dropout_acts_in_training_only(config: Config) -> None:
    decoder = random_decoder(config)
    ids = random_ids(config, 2, 10)
    with torch.inference_mode():
        assert torch.equal(decoder(ids), decoder(ids))
        decoder.train()
        assert not torch.equal(decoder(ids), decoder(ids))


@given(configs())
@settings(max_examples=20)
def test_every_parameter_has_a_gradient(config: Config) -> None:
    assume(config.window != 1)  # who sees only itself has nothing to weigh
    decoder = random_decoder(config).train()
    decoder(random_ids(config, 2, 10)).square().sum().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_a_fresh_block_is_the_identity() -> None:
    decoder = Decoder(Config(vocab_size=17))
    ids = random_ids(decoder.config, 1, 9)
    expected = decoder.head(decoder.norm(decoder.embed(ids)))
    torch.testing.assert_close(decoder(ids), expected)


# ---- limits


def test_learned_positions_have_no_row_for_position_1024() -> None:
    decoder = Decoder(
        Config(vocab_size=11, max_seq_len=1024, n_layers=1, d_model=8, n_heads=1, positions="learned", qk_norm="none")
    )
    decoder(torch.zeros(1, 1024, dtype=torch.long))
    with pytest.raises(ValueError, match="1025 tokens is longer than max_seq_len 1024"):
        decoder(torch.zeros(1, 1025, dtype=torch.long))


IDS = torch.zeros(2, 5, dtype=torch.long)
SIMPLE = Config(vocab_size=13, vocab_multiple=8, n_layers=1, d_model=8, n_heads=1)


@pytest.mark.parametrize(
    ("ids", "asked", "match"),
    [
        (IDS, {"lengths": [6, 5]}, "lengths are"),
        (IDS, {"lengths": [5]}, "lengths are"),
        (IDS, {"lengths": [2.5, 5]}, "lengths are"),
        (IDS, {"prefix_lengths": [-1, 0]}, "prefix_lengths are"),
        (IDS, {"prefix_lengths": [6, 0]}, "a prefix of 6 must be read in one pass"),
        (IDS, {"documents": torch.zeros(2, 6, dtype=torch.long)}, "documents are"),
        (IDS, {"documents": torch.zeros(2, 5)}, "documents are"),
        (IDS, {"prefix_embeddings": torch.zeros(1, 3, 8)}, "prefix_embeddings are"),
        (IDS[0], {}, "ids are"),
        (IDS.float(), {}, "ids are"),
        (IDS[:, :0], {}, "nothing to read"),
        (IDS[:0], {}, "nothing to read"),
        (IDS + 13, {}, "id 13 is not in the vocabulary of 13"),
        (IDS, {"cache": KVCache(SIMPLE, 1, 9)}, "the cache has 1 rows"),
        (IDS, {"cache": KVCache(Config(vocab_size=13, window=2), 2, 9)}, "for another Config"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(ids: torch.Tensor, asked: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Decoder(SIMPLE)(ids, **asked)


def test_a_decoder_with_experts_can_be_copied_after_a_step() -> None:
    decoder = Decoder(Config(vocab_size=13, n_layers=1, d_model=8, n_heads=1, n_experts=2)).train()
    decoder(IDS)
    copy.deepcopy(decoder)(IDS)


# ---- right values from outside


def test_gpt2_is_a_stack_of_pytorchs_encoder_layers() -> None:
    small = {"vocab_size": 31, "max_seq_len": 16, "n_layers": 3, "d_model": 24, "n_heads": 4}
    config = preset("gpt2", **small, feed_forward="gelu", dropout=0.0)
    decoder = random_decoder(config)
    layer = nn.TransformerEncoderLayer(24, 4, 96, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    stack = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(24), enable_nested_tensor=False).eval()
    names = {
        "self_attn.in_proj_": "attn.qkv.",
        "self_attn.out_proj.": "attn.o.",
        "linear1.": "ff.up.",
        "linear2.": "ff.down.",
        "norm1.": "attn_norm.",
        "norm2.": "ff_norm.",
    }
    state = decoder.state_dict()
    theirs = {"norm.weight": state["norm.weight"], "norm.bias": state["norm.bias"]}
    for i in range(3):
        for there, here in names.items():
            for kind in ("weight", "bias"):
                theirs[f"layers.{i}.{there}{kind}"] = state[f"blocks.{i}.{here}{kind}"]
    stack.load_state_dict(theirs)
    ids = random_ids(config, 2, 16)
    with torch.inference_mode():
        x = decoder.embed(ids) + decoder.position_embed(torch.arange(16))
        hidden = stack(x, mask=nn.Transformer.generate_square_subsequent_mask(16), is_causal=True)
        torch.testing.assert_close(decoder(ids), hidden @ decoder.embed.weight.T, atol=1e-5, rtol=1e-5)
