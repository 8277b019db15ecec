"""The invariants of the Decoder, over Configs drawn at random, and right values from outside the code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from leftward import Config
from leftward.model.attention import _attend_explicitly
from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder
from leftward.model.masks import causal_mask
from leftward.model.norms import LayerNorm, RMSNorm, rms_norm
from leftward.model.positions import rotary_angles, rotate
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
    assert torch.equal(before[:, :split], after[:, :split])
    assert not torch.equal(before[:, split:], after[:, split:])  # and the change did reach the model


@given(configs(), st.data())
@settings(max_examples=60)
def test_cached_in_chunks_equals_full(config: Config, data: st.DataObject) -> None:
    decoder = random_decoder(config)
    length = data.draw(st.integers(1, config.max_seq_len))
    ids = random_ids(config, 2, length)
    cache = KVCache(config, batch=2, capacity=length)
    chunks, done = [], 0
    with torch.inference_mode():
        full = decoder(ids)
        while done < length:
            size = data.draw(st.integers(1, length - done))
            chunks.append(decoder(ids[:, done : done + size], cache))
            done += size
    assert cache.lengths == [length, length]
    torch.testing.assert_close(torch.cat(chunks, dim=1), full, atol=TOLERANCE, rtol=0)


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
    cache = KVCache(config, batch=2, capacity=20)
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
        Config(vocab_size=11, max_seq_len=1024, n_layers=1, d_model=8, n_heads=1, positions="learned", qk_norm=False)
    )
    decoder(torch.zeros(1, 1024, dtype=torch.long))
    with pytest.raises(ValueError, match="1025 tokens is longer than max_seq_len 1024"):
        decoder(torch.zeros(1, 1025, dtype=torch.long))


def test_a_full_cache_is_an_error_and_not_an_overwrite() -> None:
    config = Config(vocab_size=11, n_layers=1, d_model=8, n_heads=1)
    decoder, cache = Decoder(config), KVCache(config, batch=1, capacity=4)
    decoder(torch.zeros(1, 4, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="holds 4 tokens a row; 5 are needed"):
        decoder(torch.zeros(1, 1, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="cannot rewind"):
        cache.rewind([5])


# ---- right values from outside


LLAMA: dict[str, Any] = {"qk_norm": False, "tie_embeddings": False}
GPT2: dict[str, Any] = {
    "vocab_size": 50_257,
    "max_seq_len": 1024,
    "positions": "learned",
    "norm": "layernorm",
    "qk_norm": False,
    "feed_forward": "gelu_tanh",
    "qkv_bias": True,
    "attn_out_bias": True,
    "ff_bias": True,
}


@pytest.mark.parametrize(
    ("expected", "values"),
    [
        pytest.param(124_439_808, {**GPT2, "n_layers": 12, "d_model": 768, "n_heads": 12}, id="gpt2-small"),
        pytest.param(
            163_037_184,
            {**GPT2, "n_layers": 12, "d_model": 768, "n_heads": 12, "tie_embeddings": False},
            id="gpt2-small-untied",
        ),
        pytest.param(354_823_168, {**GPT2, "n_layers": 24, "d_model": 1024, "n_heads": 16}, id="gpt2-medium"),
        pytest.param(774_030_080, {**GPT2, "n_layers": 36, "d_model": 1280, "n_heads": 20}, id="gpt2-large"),
        pytest.param(1_557_611_200, {**GPT2, "n_layers": 48, "d_model": 1600, "n_heads": 25}, id="gpt2-xl"),
        pytest.param(
            174_604_259_328,
            {**GPT2, "max_seq_len": 2048, "n_layers": 96, "d_model": 12_288, "n_heads": 96},
            id="gpt3-175b",
        ),
        pytest.param(
            6_738_415_616,
            {**LLAMA, "vocab_size": 32_000, "n_layers": 32, "d_model": 4096, "n_heads": 32, "d_ff": 11_008},
            id="llama-2-7b",
        ),
        pytest.param(
            13_015_864_320,
            {**LLAMA, "vocab_size": 32_000, "n_layers": 40, "d_model": 5120, "n_heads": 40, "d_ff": 13_824},
            id="llama-2-13b",
        ),
        pytest.param(
            68_976_648_192,
            {
                **LLAMA,
                "vocab_size": 32_000,
                "n_layers": 80,
                "d_model": 8192,
                "n_heads": 64,
                "n_kv_heads": 8,
                "d_ff": 28_672,
            },
            id="llama-2-70b",
        ),
        pytest.param(
            8_030_261_248,
            {
                **LLAMA,
                "vocab_size": 128_256,
                "n_layers": 32,
                "d_model": 4096,
                "n_heads": 32,
                "n_kv_heads": 8,
                "d_ff": 14_336,
            },
            id="llama-3-8b",
        ),
        pytest.param(
            1_235_814_400,
            {
                "qk_norm": False,
                "vocab_size": 128_256,
                "n_layers": 16,
                "d_model": 2048,
                "n_heads": 32,
                "n_kv_heads": 8,
                "d_ff": 8192,
            },
            id="llama-3.2-1b",
        ),
        pytest.param(
            7_241_732_096,
            {
                **LLAMA,
                "vocab_size": 32_000,
                "n_layers": 32,
                "d_model": 4096,
                "n_heads": 32,
                "n_kv_heads": 8,
                "d_ff": 14_336,
            },
            id="mistral-7b",
        ),
        pytest.param(
            1_100_048_384,
            {
                **LLAMA,
                "vocab_size": 32_000,
                "n_layers": 22,
                "d_model": 2048,
                "n_heads": 32,
                "n_kv_heads": 4,
                "d_ff": 5632,
            },
            id="tinyllama-1.1b",
        ),
        pytest.param(
            134_515_008,
            {
                "qk_norm": False,
                "vocab_size": 49_152,
                "n_layers": 30,
                "d_model": 576,
                "n_heads": 9,
                "n_kv_heads": 3,
                "d_ff": 1536,
            },
            id="smollm2-135m",
        ),
        pytest.param(
            361_821_120,
            {
                "qk_norm": False,
                "vocab_size": 49_152,
                "n_layers": 32,
                "d_model": 960,
                "n_heads": 15,
                "n_kv_heads": 5,
                "d_ff": 2560,
            },
            id="smollm2-360m",
        ),
        pytest.param(
            494_032_768,
            {
                "qk_norm": False,
                "qkv_bias": True,
                "vocab_size": 151_936,
                "n_layers": 24,
                "d_model": 896,
                "n_heads": 14,
                "n_kv_heads": 2,
                "d_ff": 4864,
            },
            id="qwen2.5-0.5b",
        ),
        pytest.param(
            596_049_920,
            {
                "vocab_size": 151_936,
                "n_layers": 28,
                "d_model": 1024,
                "n_heads": 16,
                "n_kv_heads": 8,
                "head_dim": 128,
                "d_ff": 3072,
            },
            id="qwen3-0.6b",
        ),
        pytest.param(
            8_190_735_360,
            {
                "vocab_size": 151_936,
                "n_layers": 36,
                "d_model": 4096,
                "n_heads": 32,
                "n_kv_heads": 8,
                "head_dim": 128,
                "d_ff": 12_288,
                "tie_embeddings": False,
            },
            id="qwen3-8b",
        ),
    ],
)
def test_parameter_counts_of_known_models(expected: int, values: dict[str, Any]) -> None:
    with torch.device("meta"):
        assert Decoder(Config(**values)).n_parameters == expected


@pytest.mark.parametrize(
    ("bytes_a_token", "values"),
    [
        (36_864, {**GPT2, "n_layers": 12, "d_model": 768, "n_heads": 12}),
        (524_288, {"vocab_size": 32_000, "n_layers": 32, "d_model": 4096, "n_heads": 32}),
        (131_072, {"vocab_size": 128_256, "n_layers": 32, "d_model": 4096, "n_heads": 32, "n_kv_heads": 8}),
        (23_040, {"vocab_size": 49_152, "n_layers": 30, "d_model": 576, "n_heads": 9, "n_kv_heads": 3}),
        (
            114_688,
            {"vocab_size": 9, "n_layers": 28, "d_model": 1024, "n_heads": 16, "n_kv_heads": 8, "head_dim": 128},
        ),
    ],
)
def test_cache_bytes_of_known_models(bytes_a_token: int, values: dict[str, Any]) -> None:
    cache = KVCache(Config(**values), batch=2, capacity=3, dtype=torch.bfloat16, device="meta")
    assert cache.nbytes == 2 * 3 * bytes_a_token


@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_the_mask_is_pytorchs_square_subsequent_mask(length: int) -> None:
    reference = nn.Transformer.generate_square_subsequent_mask(length) == 0  # True: may look
    # Behind one cached token, so that the mask is a tensor and not only the kernel's flag.
    mask = causal_mask([1], length, torch.device("cpu")).dense
    visible = torch.ones(1, length + 1, dtype=torch.bool) if mask is None else mask[0, 0]
    assert visible[:, 0].all()
    assert torch.equal(visible[:, 1:], reference)
    q, k, v = torch.randn(3, 1, 2, length, 8).unbind()
    assert causal_mask([0], length, torch.device("cpu")).is_causal
    torch.testing.assert_close(
        F.scaled_dot_product_attention(q, k, v, is_causal=True),
        F.scaled_dot_product_attention(q, k, v, attn_mask=reference),
    )


def test_masks_of_rows_with_unequal_lengths() -> None:
    mask = causal_mask([2, 0], 2, torch.device("cpu")).dense
    assert mask is not None
    assert mask[:, 0].int().tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]]


def test_norms_of_the_worked_example() -> None:
    x = torch.tensor([4, -6, 1.5, 10.5, -2.5, 8, -4.5, 2])
    layer = [0.44, -1.40, -0.02, 1.63, -0.76, 1.17, -1.12, 0.07]
    root_mean_square = [0.703, -1.054, 0.264, 1.845, -0.439, 1.406, -0.791, 0.351]
    torch.testing.assert_close(LayerNorm(8, 1e-5)(x), torch.tensor(layer), atol=0.005, rtol=0)
    torch.testing.assert_close(RMSNorm(8, 1e-5)(x), torch.tensor(root_mean_square), atol=0.0005, rtol=0)


def test_gpt2_is_a_stack_of_pytorchs_encoder_layers() -> None:
    config = Config(
        vocab_size=31,
        max_seq_len=16,
        n_layers=3,
        d_model=24,
        n_heads=4,
        d_ff=96,
        positions="learned",
        norm="layernorm",
        norm_eps=1e-5,
        qk_norm=False,
        feed_forward="gelu",
        qkv_bias=True,
        attn_out_bias=True,
        ff_bias=True,
    )
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


# ---- gradients written by hand


def _gradients(output: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
    return torch.autograd.grad((output * weights).sum(), inputs)


@pytest.mark.parametrize("per_head", [False, True])
def test_the_gradient_of_rms_norm(per_head: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 16, requires_grad=True)
    weight = torch.randn((3, 16) if per_head else (16,), requires_grad=True)
    plain = x * (x.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * weight
    ours = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(ours, plain)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, weight, 1e-6), plain)  # the path of inference
    for mine, autograds in zip(_gradients(ours, [x, weight]), _gradients(plain, [x, weight]), strict=True):
        torch.testing.assert_close(mine, autograds)


def test_the_statistics_of_a_bf16_norm_are_fp32() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 512).bfloat16()
    exact = F.rms_norm(x.double(), (512,), eps=1e-6)
    for requires_grad in (False, True):
        ours = rms_norm(x.clone().requires_grad_(requires_grad), torch.ones(512, dtype=torch.bfloat16), 1e-6)
        assert ours.dtype == torch.bfloat16
        # One rounding of the result (2^-9) and one of the scale; bf16 statistics would be off by several.
        torch.testing.assert_close(ours.double(), exact, atol=0, rtol=2**-7)


@pytest.mark.parametrize("head_dim", [2, 8])
def test_rotation_and_its_gradient(head_dim: int) -> None:
    """Against complex numbers: pair (i, i + head_dim / 2) of position p turns by p · base^(−2i / head_dim)."""
    torch.manual_seed(0)
    config = Config(vocab_size=3, d_model=2 * head_dim, n_heads=2, rope_base=100.0)
    x = torch.randn(2, 7, 2, head_dim, requires_grad=True)
    half = head_dim // 2
    turns = torch.arange(7)[:, None] * 100.0 ** (-2 * torch.arange(half) / head_dim)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turns), turns)[:, None]
    plain = torch.cat((turned.real, turned.imag), dim=-1)
    ours = rotate(x, rotary_angles(config, torch.arange(7)[None], torch.float32))
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(_gradients(ours, [x])[0], _gradients(plain, [x])[0])


def test_rotary_scores_depend_on_distance_only() -> None:
    torch.manual_seed(0)
    config = Config(vocab_size=3, max_seq_len=200_000, d_model=32, n_heads=1)
    q, k = torch.randn(2, 1, 1, 1, 32).unbind()

    def score(position: int, distance: int) -> float:
        angles = [rotary_angles(config, torch.tensor([[p]]), torch.float32) for p in (position, position - distance)]
        return float((rotate(q, angles[0]) * rotate(k, angles[1])).sum())

    assert score(10, 3) == pytest.approx(score(1_000, 3), abs=1e-3)
    assert score(10, 3) == pytest.approx(score(100_000, 3), abs=0.05)
    assert score(10, 3) != pytest.approx(score(10, 4), abs=0.1)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_explicit_attention_is_the_kernels(n_kv_heads: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 9, 8, requires_grad=True)
    k = torch.randn(2, n_kv_heads, 9, 8, requires_grad=True)
    v = torch.randn(2, n_kv_heads, 9, 8, requires_grad=True)
    ours = _attend_explicitly(q, k, v, dropout=0.0)
    kernel = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours, kernel)
    for mine, reference in zip(_gradients(ours, [q, k, v]), _gradients(kernel, [q, k, v]), strict=True):
        torch.testing.assert_close(mine, reference)


def test_bf16_training_takes_the_explicit_path_and_agrees() -> None:
    torch.manual_seed(0)
    config = Config(vocab_size=17, d_model=32, n_heads=4, n_kv_heads=2, n_layers=2)
    decoder = random_decoder(config).bfloat16().train()
    ids = random_ids(config, 2, 12)
    with_gradients = decoder(ids)
    with torch.inference_mode():
        without = decoder(ids)
    torch.testing.assert_close(with_gradients, without, atol=0.05, rtol=0.05)
