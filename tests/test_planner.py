"""The planner: values from papers and by hand, and the Decoder, its cache, PyTorch's FLOP counter and autograd as they
measure the same things."""

import dataclasses
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from leftward import Config, Decoder
from leftward.errors import UserError
from leftward.model.cache import KVCache
from leftward.planner import (
    DEVICES,
    count_activations,
    count_flops,
    count_kv_cache,
    count_parameters,
    count_training_memory,
    plan,
)
from leftward.presets import preset
from leftward.training import loss
from leftward.training.loss import loss_sum
from leftward.training.optim import Optimizer
from leftward.training.recipe import OptimizerSection
from random_models import configs, random_ids

# ---- parameters


@given(configs())
def test_parameters_by_arithmetic_are_those_of_the_decoder(config):
    with torch.device("meta"):
        decoder = Decoder(config)
    parameters = count_parameters(config)
    named = dict(decoder.named_parameters())
    assert parameters.total == sum(p.numel() for p in named.values())
    by_part = {
        "token_embedding": r"embed\.weight",
        "position_embedding": r"position_embed\.weight",
        "attention": r".*\.attn\.(qkv|o)\..*|.*\.sinks",
        "router": r".*\.router\..*",
        "feed_forward": r".*\.(up|down)\..*",
        "norms": r".*norm\..*",
        "head": r"head\..*",
    }
    for part, pattern in by_part.items():
        expected = sum(p.numel() for name, p in named.items() if re.fullmatch(pattern, name))
        assert getattr(parameters, part) == expected, part


def test_the_parts_of_gpt2():
    # seeds/000: the head would add 50,257 × 768 = 38,597,376, which is 23.7 % of the untied total 163,037,184.
    tied, untied = count_parameters(preset("gpt2")), count_parameters(preset("gpt2", tie_embeddings=False))
    assert (tied.total, untied.total) == (124_439_808, 163_037_184)
    assert (tied.head, untied.head) == (0, 38_597_376)
    assert tied.position_embedding == 1024 * 768
    assert tied.attention == 12 * (4 * 768 * 768 + 4 * 768)
    assert tied.norms == (2 * 12 + 1) * 2 * 768  # a LayerNorm counted once


def test_active_parameters_leave_out_the_idle_experts():
    config = Config(vocab_size=10, d_model=8, n_layers=3, n_experts=5, n_experts_per_token=2, d_ff=6, d_shared=7)
    parameters = count_parameters(config)
    assert parameters.total - parameters.active == 3 * 3 * (3 * 8 * 6)
    assert parameters.router == 3 * 5 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_take_the_bytes_that_are_said(dtype):
    config = Config(vocab_size=50, n_layers=2, d_model=32, tie_embeddings=False, n_experts=3, d_ff=16, qkv_bias=True)
    decoder = Decoder(config).to(dtype)
    measured = sum(tensor.nbytes for tensor in decoder.state_dict().values())
    assert plan(config, dtype={4: "fp32", 2: "bf16"}[dtype.itemsize]).inference.weights == measured


# ---- FLOPs


@pytest.mark.parametrize(
    ("name", "seq_len", "full", "causal"),
    [
        ("gpt2", 1024, 291_648_307_200, 272_339_828_736),
        ("llama3-8b", 8192, 158_140_695_838_720, None),
        ("smollm2-135m", 2048, 840_739_848_192, None),
    ],
)
def test_flops_of_known_models(name, seq_len, full, causal):
    flops = count_flops(preset(name), seq_len)
    assert flops.forward_full == full
    assert flops.training_full == 3 * full
    assert flops.forward_per_token == full / seq_len
    if causal is not None:
        assert (flops.forward_causal, flops.training_causal) == (causal, 3 * causal)


@settings(max_examples=50)
@given(configs(window=None, attention_pattern="G", attn_sinks=False))  # a sink is a key more
def test_pytorch_counts_the_same_flops(config):
    length = config.max_seq_len
    decoder, ids = Decoder(config).eval(), random_ids(config, 1, length)
    # The kernel written as products, since the fused one for CPUs is not counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        decoder(ids)
    assert count_flops(config, length).forward_full == counter.get_total_flops()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq_len", [1, 5, 7, 8, 40])
def test_attention_counts_the_pairs_that_see_each_other(seq_len, causal):
    config = Config(
        vocab_size=9, max_seq_len=40, n_layers=3, d_model=16, n_heads=2, window=7, attention_pattern="LG", causal=causal
    )
    pairs = 0
    for layer in range(3):
        for query in range(seq_len):
            reach = 7 if config.is_local(layer) else seq_len
            sees = [key for key in range(seq_len) if abs(query - key) < reach and (key <= query or not causal)]
            pairs += len(sees)
    flops = count_flops(config, seq_len)
    assert flops.attention_causal == 4 * 2 * 8 * pairs
    assert flops.attention_causal <= flops.attention_full


def test_only_the_experts_in_use_are_counted():
    config = Config(vocab_size=9, d_model=8, n_layers=2, n_experts=6, n_experts_per_token=3, d_ff=5, d_shared=4)
    flops = count_flops(config, 10)
    assert flops.feed_forward == 2 * 10 * 2 * (3 * 3 * 8 * 5 + 3 * 8 * 4)
    assert flops.router == 2 * 10 * 2 * 6 * 8


def test_six_n_d_of_gpt3():
    assert plan(preset("gpt3-175b"), tokens=300e9).run.six_nd == pytest.approx(3.143e23, rel=1e-4)


def test_a_training_token_costs_what_palm_says():
    # Chowdhery et al. 2022, appendix B: 6N + 12 L H Q T, with N the weights that multiply.
    config = preset("gpt2")
    weights = 12 * 12 * 768 * 768 + 50257 * 768
    assert count_flops(config, 1024).training_per_token == 6 * weights + 12 * 12 * 12 * 64 * 1024


# ---- KV cache


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("gpt2", 36_864),
        ("gpt2-xl", 307_200),
        ("gpt3-175b", 4_718_592),
        ("llama2-7b", 524_288),
        ("llama3-8b", 131_072),
        ("mistral-7b", 131_072),
        ("llama3-70b", 327_680),
        ("smollm2-135m", 23_040),
        ("gemma3-270m", 18_432),
        ("qwen3-0.6b", 114_688),
    ],
)
def test_kv_bytes_a_token(name, bytes_per_token):
    assert count_kv_cache(preset(name), 1).bytes_per_token == bytes_per_token


def test_kv_bytes_of_a_7b_at_its_context():
    assert count_kv_cache(preset("llama2-7b"), 4096).bytes == 2 * 2**30
    assert count_kv_cache(preset("llama2-7b"), 4096, batch_size=3, dtype="fp8").bytes == 3 * 2**30


def test_local_layers_hold_their_window():
    # Gemma 3 270M: 15 of 18 layers hold 512 tokens; 2 · 1 head · 256 · 2 bytes a token and layer.
    cache = count_kv_cache(preset("gemma3-270m"), 32768)
    assert cache.bytes == 1024 * (15 * 512 + 3 * 32768)
    assert cache.bytes_per_token_global == 3 * 1024
    assert count_kv_cache(preset("mistral-7b"), 32768).bytes == 131_072 * 4096


@given(configs())
def test_the_kv_cache_takes_the_bytes_that_are_said(config):
    for capacity in (1, 5, config.max_seq_len):
        cache = KVCache(config, batch=3, capacity=capacity, dtype=torch.bfloat16, rewindable=0)
        assert count_kv_cache(config, capacity, batch_size=3).bytes == cache.nbytes


# ---- training memory

_BASE = {"vocab_size": 50, "d_model": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 1024}
_GPT2_LIKE = {"positions": "learned", "norm": "layernorm", "qk_norm": "none", "n_kv_heads": 4}


def kept_for_backward(config: Config, batch_size: int, seq_len: int, dtype: torch.dtype) -> int:
    """Bytes of all storages that autograd keeps, weights and what the loss itself keeps left out."""
    decoder, ids = Decoder(config).to(dtype).train(), random_ids(config, batch_size, seq_len)
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            kept.setdefault(address, tensor)  # held, so that no later one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = decoder(ids)
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss_sum(logits, ids).backward()
    return total


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"qk_norm": "none", "feed_forward": "relu2"},
        {**_GPT2_LIKE, "feed_forward": "gelu_tanh"},
        {**_GPT2_LIKE, "feed_forward": "relu"},
        {**_GPT2_LIKE, "feed_forward": "gelu", "block": "post"},
        {"qk_norm": "none", "norm": "layernorm", "feed_forward": "gelu", "block": "parallel", "rope_fraction": 0.25},
        {"qk_norm": "none", "norm": "layernorm", "feed_forward": "gelu", "block": "parallel_shared"},
        {"qk_norm": "whole", "block": "output"},
        {"block": "sandwich", "norm_weight": "one_plus", "feed_forward": "geglu_tanh", "embed_norm": True},
        {"feed_forward": "swiglu_clamped", "position_pattern": "PN"},
        {"n_experts": 8, "d_ff": 64, "d_shared": 96},
        {"window": 64},
        {"window": 128, "attention_pattern": "LLG"},
        {**_GPT2_LIKE, "positions": "alibi"},
        {"attn_softcap": 30.0},
        {"attn_sinks": True},
    ],
    ids=str,
)
def test_activations_are_what_autograd_keeps(settings, dtype):
    config = Config(**{**_BASE, **settings})
    measured = kept_for_backward(config, 2, 1024, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    assert count_activations(config, 1024, 2, dtype) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("experts", [{}, {"n_experts": 3, "d_ff": 16, "d_shared": 8}], ids=["dense", "experts"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_gradients_and_optimizer_take_the_bytes_that_are_said(optimizer, dtype, experts):
    config = Config(vocab_size=50, n_layers=2, d_model=32, qkv_bias=True, ff_bias=True, tie_embeddings=False, **experts)
    decoder = Decoder(config)
    ours = Optimizer(decoder, OptimizerSection(name=optimizer), {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    ids = random_ids(config, 2, 8)
    for _ in range(3):  # the third pass has the sum of gradients beside its own
        loss_sum(decoder(ids), ids).backward()
        gradients = sum(p.grad.nbytes for p in decoder.parameters() if p.grad is not None)
        if dtype == "bf16":
            gradients += sum(grad.nbytes for grad in ours.grads.values())
        ours.accumulate()
    memory = count_training_memory(config, 8, 2, dtype, optimizer)
    assert memory.masters == sum(m.nbytes for m in ours.masters.values())
    assert memory.copies == (0 if dtype == "fp32" else sum(p.nbytes for p in decoder.parameters()))
    assert memory.gradients == gradients
    steps = {name: tensor for name, tensor in ours.state().items() if name.startswith("step.")}
    assert memory.optimizer_state == sum(t.nbytes for t in ours.state().values()) - 4 * len(steps)
    parts = dataclasses.asdict(memory)
    assert memory.total == sum(value for key, value in parts.items() if isinstance(value, int) and key != "total")


def test_muon_remembers_one_average_of_a_matrix_and_adamw_two():
    config = preset("gpt2")
    matrices = 12 * 12 * 768 * 768
    muon, adamw = (count_training_memory(config, 1024, 1, "bf16", name) for name in ("muon", "adamw"))
    assert adamw.optimizer_state == 8 * 124_439_808
    assert adamw.optimizer_state - muon.optimizer_state == 4 * matrices


def test_logits_are_counted_apart():
    # bf16 logits, their fp32 copy and the logarithm of softmax
    assert count_training_memory(preset("gpt2"), 1024, 1, "bf16").logits == 1024 * 50257 * (2 + 4 + 4)
    assert count_training_memory(preset("gpt2"), 1024, 1, "fp32").logits == 1024 * 50257 * (4 + 4)


@pytest.mark.parametrize(
    "batch_size, rows",
    [
        (1, 1024),  # 51.5 M logits; 2²⁶ are 67.1 M
        (2, 1024),  # 102.9 M in two portions
        (3, 1024),  # 154.4 M in three
        (4, 1024),  # 205.9 M in four: three would be 68.6 M each
        (13, 1332),  # 669.0 M in ten
        (128, 1324),  # 6,587 M in 99
    ],
)
def test_logits_of_a_large_batch_are_counted_as_they_are_portioned(batch_size, rows, monkeypatch):
    seen = []
    monkeypatch.setattr(
        loss, "_loss_and_gradients", lambda decoder, head, some, *_: (seen.append(len(some)) or 0.0, [])
    )
    config = preset("gpt2")
    decoder = SimpleNamespace(config=config, head=torch.nn.Linear(1, 1))
    with torch.no_grad():
        loss.head_loss(decoder, torch.zeros(batch_size, 1024, 1), torch.zeros(batch_size, 1024, dtype=torch.int64))
    assert sum(seen) == batch_size * 1024 and max(seen) == rows
    assert rows * 50257 <= 2**26
    assert count_training_memory(config, 1024, batch_size, "bf16").logits == rows * 50257 * (2 + 4 + 4)


def test_quantised_weights_take_their_blocks():
    # 32 weights in 18 bytes
    weights = 6_738_415_616
    quantised = plan(preset("llama2-7b"), dtype="q4_0")
    assert quantised.inference.weights == weights * 18 // 32
    assert quantised.kv_cache.dtype == "bf16"  # nothing is computed in q4_0
    assert quantised.training is None


# ---- time


def test_decoding_reads_the_weights_and_the_cache():
    # Of the embedding one row is read; 2 GiB of cache at 4,096 tokens.
    result = plan(preset("llama2-7b"), bandwidth=1e12)
    read = 2 * (6_738_415_616 - 32000 * 4096) + 2 * 2**30
    assert result.limits.decode_bytes == read
    assert result.limits.decode_tokens_per_second == pytest.approx(1e12 / read)
    assert result.limits.prefill_seconds is None and result.limits.training_tokens_per_second is None


def test_rows_share_the_weights_but_not_the_cache():
    result = plan(preset("llama2-7b"), bandwidth=1e12, batch_size=8, n_devices=2)
    read = 2 * (6_738_415_616 - 32000 * 4096) + 8 * 2 * 2**30
    assert result.limits.decode_tokens_per_second == pytest.approx(8 * 2e12 / read)


def test_a_tied_embedding_is_read_whole_and_a_position_table_is_not():
    result = plan(preset("gpt2"), bandwidth=1e12, seq_len=1)
    assert result.limits.decode_bytes == 2 * (124_439_808 - 1024 * 768) + 36_864


def test_rows_of_a_mixture_read_the_experts_that_any_of_them_is_sent_to():
    one, two = (
        plan(preset("mixtral-8x7b"), bandwidth=1e12, seq_len=1, batch_size=n).limits.decode_bytes for n in (1, 2)
    )
    assert one == 2 * (12_879_925_248 - 32000 * 4096) + 131_072
    # 8 (1 − (3/4)²) = 3.5 experts instead of 2, in 32 layers
    assert two - one == 2 * round(1.5 * 32 * 3 * 4096 * 14336) + 131_072


def test_many_rows_run_out_of_flops_before_bandwidth():
    config = preset("llama2-7b")
    result = plan(config, seq_len=16, batch_size=4096, peak_flops=1e14, bandwidth=1e15)
    assert result.limits.decode_tokens_per_second == pytest.approx(1e14 / count_flops(config, 16).forward_per_token)


def test_mfu_of_a_measured_speed_and_back():
    # 854,438,400 FLOPs a token (3 · 291,648,307,200 / 1024)
    measured = plan(preset("gpt2"), tokens_per_second=1e5, peak_flops=312e12, n_devices=2)
    assert measured.limits.mfu == pytest.approx(1e5 * 854_438_400 / 624e12)
    expected = plan(preset("gpt2"), mfu=measured.limits.mfu, peak_flops=312e12, n_devices=2, tokens=1e9)
    assert expected.limits.training_tokens_per_second == pytest.approx(1e5)
    assert expected.run.seconds == pytest.approx(1e4)
    assert expected.run.flops == pytest.approx(854_438_400 * 1e9)


def test_a_device_gives_its_figures_but_not_for_another_dtype():
    assert plan(preset("gpt2"), device="a100-80gb").limits.hardware.peak_flops == 312e12
    fp32 = plan(preset("gpt2"), device="a100-80gb", dtype="fp32").limits
    assert fp32.hardware.peak_flops is None and fp32.training_tokens_per_second is None
    assert fp32.decode_tokens_per_second is not None
    given = plan(preset("gpt2"), device="a100-80gb", dtype="fp32", peak_flops=19.5e12).limits
    assert given.hardware.peak_flops == 19.5e12 and given.hardware.bandwidth == DEVICES["a100-80gb"].bandwidth


def test_how_many_devices_hold_it():
    result = plan(preset("llama2-7b"), device="rtx-4090")  # 12.55 GiB of weights and 2 of cache in 24e9 bytes
    assert result.limits.devices_to_run == 1
    assert result.limits.devices_to_train == math.ceil(result.training.total / 24e9) > 4
    assert plan(preset("llama2-7b"), memory=8e9).limits.devices_to_run == 2
    assert plan(preset("llama2-7b"), bandwidth=1e12).limits.devices_to_run is None


def test_no_device_is_ever_assumed():
    result = plan(preset("gpt2"), tokens=1e9)
    assert result.limits is None and result.run.seconds is None


# ---- all of it


def test_losses_are_expected_of_dense_models_only():
    losses = plan(preset("gpt2"), tokens=1e10).run.losses
    # (8.8e13 / 85,056,000)^.076, (5.4e13 / 1e10)^.095, and E + A / N^α + B / D^β
    assert losses["Kaplan 2020, L(N)"] == pytest.approx(2.8649, abs=1e-4)
    assert losses["Kaplan 2020, L(D)"] == pytest.approx(2.2624, abs=1e-4)
    assert losses["Besiroglu 2024"] == pytest.approx(
        1.8172 + 482.01 / math.exp(0.3478 * math.log(124_439_808)) + 2085.43 / math.exp(0.3658 * math.log(1e10))
    )
    assert len(losses) == 5
    assert plan(preset("mixtral-8x7b"), tokens=1e10).run.losses == {}


def test_everything_becomes_json():
    result = plan(preset("gemma3-1b"), name="x", tokens=1e9, flops=1e21, device="l4", mfu=0.4)
    back = json.loads(json.dumps(result.to_dict()))
    assert back["parameters"]["total"] == 999_885_952
    assert back["compute_optimal"]["optima"][3]["band"]["loss"][0] > 0
    assert Config.from_dict(back["config"]) == preset("gemma3-1b")


def test_layers_beyond_count_cost_no_time():
    config = Config(vocab_size=2**31 - 1, n_layers=2**31 - 1, window=5, attention_pattern="LLG", position_pattern="PN")
    assert plan(config).parameters.total > 2**31


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seq_len": 0}, "seq_len is 0"),
        ({"seq_len": 1025}, "max_seq_len 1024"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"dtype": "bf61"}, "dtype is 'bf61': did you mean bf16"),
        ({"kv_dtype": "q4"}, "kv_dtype is 'q4'"),
        ({"optimizer": "adam"}, "optimizer is 'adam': did you mean adamw"),
        ({"device": "a100"}, "device is 'a100': did you mean a100-"),
        ({"peak_flops": 0.0}, "peak_flops is 0"),
        ({"bandwidth": math.nan}, "bandwidth is nan"),
        ({"n_devices": 0}, "n_devices is 0"),
        ({"mfu": 1.2}, "mfu is 1.2"),
        ({"mfu": 0.5, "tokens_per_second": 5.0}, "give one"),
        ({"tokens_per_second": 1e9, "peak_flops": 1e12}, "would be an MFU of 8.54e\\+05"),
        ({"tokens": 0.0}, "tokens is 0"),
        ({"tokens": math.inf}, "tokens is inf"),
        ({"flops": 1.0}, "flops is 1"),
        ({"bandwith": 1.0}, "unknown setting bandwith: did you mean bandwidth"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        plan(preset("gpt2"), **wrong)
