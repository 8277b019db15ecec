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
