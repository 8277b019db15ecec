"""The cache's memory and limits; that it changes no output is tested over all variants in test_decoder.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from leftward import Config
from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder
from random_models import random_decoder, random_ids

SMALL: dict[str, Any] = {"vocab_size": 11, "n_layers": 1, "d_model": 8, "n_heads": 1}


def test_a_full_cache_is_an_error_and_not_an_overwrite() -> None:
    config = Config(**SMALL)
    decoder, cache = Decoder(config), KVCache(config, batch=1, capacity=4)
    decoder(torch.zeros(1, 4, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="holds 4 tokens a row; 5 are needed"):
        decoder(torch.zeros(1, 1, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="cannot rewind"):
        cache.rewind([5])


def test_memory_is_bounded_by_the_window() -> None:
    config = Config(**{**SMALL, "n_layers": 6}, window=10, attention_pattern="LLLLLG")
    cache = KVCache(config, batch=3, capacity=1000, dtype=torch.bfloat16, rewindable=0)
    # 2 · n_kv_heads · head_dim · bytes · slots · rows: five local layers and a global one
    assert cache.nbytes == 2 * 1 * 8 * 2 * (5 * 10 + 1000) * 3
    assert KVCache(config, 3, 1000, torch.bfloat16, rewindable=4).nbytes == 2 * 8 * 2 * (5 * 14 + 1000) * 3
    assert KVCache(config, 3, 8, torch.bfloat16).nbytes == 2 * 8 * 2 * (6 * 8) * 3  # never more than the capacity


def test_a_rolled_window_is_rewound_as_far_as_it_was_asked_to_keep() -> None:
    config = Config(**SMALL, window=4)
    decoder = random_decoder(config)
    ids = random_ids(config, 1, 30)
    cache = KVCache(config, batch=1, capacity=40, rewindable=3)
    with torch.inference_mode():
        full = decoder(ids)
        decoder(ids[:, :20], cache)
        with pytest.raises(ValueError, match="3 tokens can be taken back"):
            cache.rewind([15])
        cache.rewind([17])
        torch.testing.assert_close(decoder(ids[:, 17:21], cache), full[:, 17:21])
        with pytest.raises(ValueError, match="has rolled on"):  # what was overwritten stays overwritten
            cache.rewind([16])
        cache.rewind([0])  # from the start there is nothing to miss
        torch.testing.assert_close(decoder(ids[:, :5], cache), full[:, :5])


def test_a_prefix_that_sees_itself_is_read_in_one_pass() -> None:
    config = Config(**SMALL)
    decoder, ids = Decoder(config).eval(), random_ids(config, 1, 6)
    cache = KVCache(config, batch=1, capacity=6)
    with pytest.raises(ValueError, match="a prefix of 4 must be read in one pass"):
        decoder(ids[:, :3], cache, prefix_lengths=[4])


def test_what_is_kept_of_a_prefix_has_seen_the_rest() -> None:
    config = Config(**SMALL)
    decoder, ids = random_decoder(config), random_ids(config, 1, 8)
    cache = KVCache(config, batch=1, capacity=8)
    with torch.inference_mode():
        decoder(ids[:, :6], cache, prefix_lengths=[4])
        with pytest.raises(ValueError, match="into prefixes"):
            cache.fork([0]).rewind([3])
        cache.rewind([4])
        full = decoder(ids, prefix_lengths=[4])
        torch.testing.assert_close(decoder(ids[:, 4:], cache), full[:, 4:])
        cache.rewind([0])
        torch.testing.assert_close(decoder(ids[:, :5], cache), decoder(ids[:, :5]))


def test_a_used_cache_is_as_good_as_new() -> None:
    config = Config(**SMALL)
    decoder, ids = random_decoder(config), random_ids(config, 1, 6)
    documents = torch.tensor([[0, 0, 0, 7, 7, 7]])
    cache = KVCache(config, batch=1, capacity=6)
    with torch.inference_mode():
        decoder(ids[:, :4], cache, documents=torch.full((1, 4), 7))
        cache.rewind([0])
        decoder(ids[:, :3], cache)
        later = decoder(ids[:, 3:], cache, documents=documents[:, 3:])
        torch.testing.assert_close(later, decoder(ids, documents=documents)[:, 3:])


def test_padding_that_sees_nothing_spoils_nothing() -> None:
    """In a cached global layer the keys of padding are not written; in another document it then sees no key at all."""
    config = Config(vocab_size=7, d_model=8, n_heads=2, n_layers=2, window=3, attention_pattern="GL", attn_softcap=2.0)
    decoder, ids = random_decoder(config), random_ids(config, 1, 8)
    documents = torch.tensor([[0, 0, 0, 9, 9, 9, 9, 9]])
    cache = KVCache(config, 1, 40)
    with torch.no_grad():
        decoder(ids[:, :1], cache, documents=documents[:, :1])
    later = decoder(ids[:, 1:], cache, [2], documents=documents[:, 1:])[:, :2]
    torch.testing.assert_close(later, decoder(ids[:, :3])[:, 1:], atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(later.sum(), [decoder.embed.weight, decoder.blocks[0].attn.qkv.weight])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_padding_may_reach_beyond_the_context() -> None:
    config = Config(**SMALL, max_seq_len=12, positions="learned")
    decoder, ids = random_decoder(config), random_ids(config, 2, 12)
    cache = KVCache(config, batch=2, capacity=12)
    with torch.inference_mode():
        decoder(ids[:, :10], cache, [10, 2])
        logits = decoder(ids[:, :5], cache, [1, 5])
        alone = decoder(torch.cat((ids[1, :2], ids[1, :5]))[None])[0, 2:]
    torch.testing.assert_close(logits[1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrong", [{"rewindable": -1}, {"capacity": 0}, {"batch": 0}])
def test_a_cache_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        KVCache(Config(**SMALL), **{"batch": 1, "capacity": 4, **wrong})
