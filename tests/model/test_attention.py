"""Attention: each of its variants against transformers' own, the paths against each other, and the memory it takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradients import gradients
from leftward import Config
from leftward.model import attention
from leftward.model.attention import _attend_by_batched_products, attend
from leftward.model.decoder import Decoder
from leftward.model.masks import Mask
from random_models import random_decoder, random_ids


def qkv(n_kv_heads: int = 2, length: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q = torch.randn(2, 4, length, 8, requires_grad=True)
    k, v = (torch.randn(2, n_kv_heads, length, 8, requires_grad=True) for _ in range(2))
    return q, k, v


def causal(length: int, **rules: Any) -> Mask:
    places = torch.arange(length)[None]
    return Mask(queries=places, keys=places, offset=0, **rules)


def reference_mask(mask: Mask) -> torch.Tensor:
    seen = mask.visible(slice(None), slice(None))
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize("window", [None, 3])
def test_softcap_is_gemma2s(window: int | None) -> None:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    q, k, v = qkv()
    mask = causal(9, window=window)
    module = SimpleNamespace(num_key_value_groups=2, training=False)
    theirs, _ = eager_attention_forward(module, q, k, v, reference_mask(mask), scaling=0.3, softcap=2.0)  # type: ignore[arg-type]
    ours = attend(q, k, v, mask, scale=0.3, softcap=2.0)
    torch.testing.assert_close(ours.transpose(1, 2), theirs)


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_are_those_of_gpt_oss(window: int | None) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    q, k, v = qkv()
    sinks = torch.randn(4, requires_grad=True)
    mask = causal(9, window=window)
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
    theirs, _ = eager_attention_forward(module, q, k, v, reference_mask(mask), scaling=0.3)  # type: ignore[arg-type]
    ours = attend(q, k, v, mask, scale=0.3, sinks=sinks).transpose(1, 2)
    torch.testing.assert_close(ours, theirs)
    for mine, reference in zip(gradients(ours, [q, k, v, sinks]), gradients(theirs, [q, k, v, sinks]), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-5)


def test_alibi_adds_its_slope_a_place_of_distance() -> None:
    q, k, v = qkv()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0])
    distance = (torch.arange(9)[:, None] - torch.arange(9)).clamp(min=0)
    bias = reference_mask(causal(9)) - slopes[:, None, None] * distance
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, causal(9, slopes=slopes), scale=0.3), theirs)
    rounded = attend(*(t.bfloat16() for t in (q, k, v)), causal(9, slopes=slopes), scale=0.3)
    torch.testing.assert_close(rounded.float(), theirs, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("features", [{}, {"softcap": 3.0}, {"sinks": torch.arange(4.0)}])
@pytest.mark.parametrize("rules", [{"window": 70}, {"window": 300}, {"slopes": torch.rand(4)}, {"causal": False}])
def test_blocks_of_queries_are_the_whole(
    features: dict[str, Any], rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of a block, also where a local layer looks only at the keys that it can reach."""
    q, k, v = qkv(length=600)
    monkeypatch.setattr(attention, "_query_blocks", lambda q, k, mask: [(0, 600)])
    whole = attend(q, k, v, causal(600, **rules), scale=0.3, **features)
    monkeypatch.undo()
    for budget in (1 << 24, 1 << 16):
        monkeypatch.setattr(attention, "_SCORES_AT_ONCE", budget)
        torch.testing.assert_close(attend(q, k, v, causal(600, **rules), scale=0.3, **features), whole)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_batched_products_are_the_kernel(n_kv_heads: int) -> None:
    q, k, v = qkv(n_kv_heads)
    ours = _attend_by_batched_products(q, k, v, scale=8**-0.5, dropout=0.0)
    kernel = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours, kernel)
    for mine, reference in zip(gradients(ours, [q, k, v]), gradients(kernel, [q, k, v]), strict=True):
        torch.testing.assert_close(mine, reference)


def test_bf16_training_takes_batched_products_and_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    taken: list[int] = []

    def watched(*arguments: Any) -> torch.Tensor:
        taken.append(1)
        return _attend_by_batched_products(*arguments)

    monkeypatch.setattr(attention, "_attend_by_batched_products", watched)
    config = Config(vocab_size=17, d_model=32, n_heads=4, n_kv_heads=2, n_layers=2)
    decoder = random_decoder(config).bfloat16().train()
    ids = random_ids(config, 2, 12)
    with_gradients = decoder(ids)
    assert len(taken) == 2  # layers
    with torch.inference_mode():
        without = decoder(ids)
    assert len(taken) == 2
    torch.testing.assert_close(with_gradients, without, atol=0.05, rtol=0.05)


# ---- memory


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation gives out."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.bytes = max(self.bytes, *sizes, 0)
        return result


@pytest.mark.parametrize(
    "values",
    [{}, {"window": 64}, {"window": 64, "attn_sinks": True, "attn_softcap": 9.0}, {"window": 1000}],
    ids=["causal", "window", "window-sinks-softcap", "wide"],
)
def test_a_long_forward_never_holds_a_square(values: dict[str, Any]) -> None:
    """32,768² booleans would be a gigabyte."""
    length = 32_768
    config = Config(vocab_size=5, max_seq_len=length, n_layers=1, d_model=8, n_heads=1, d_ff=8, **values)
    decoder = Decoder(config).eval()
    with torch.inference_mode(), Largest() as largest:
        decoder(torch.zeros(1, length, dtype=torch.long))
    assert largest.bytes <= 32 * 1024 * 1024


def test_other_masks_are_bounded_too() -> None:
    """Documents and ALiBi reach far, so that their blocks of queries are what bounds them."""
    length = 8_192
    config = Config(vocab_size=5, max_seq_len=length, n_layers=1, d_model=8, n_heads=1, d_ff=8, positions="alibi")
    documents = torch.arange(length)[None] // 1000
    with torch.inference_mode(), Largest() as largest:
        Decoder(config).eval()(torch.zeros(1, length, dtype=torch.long), documents=documents)
    assert largest.bytes <= 4 * attention._SCORES_AT_ONCE  # fp32 scores of a block
