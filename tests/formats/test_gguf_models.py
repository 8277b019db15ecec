"""GGUF models: our Config and weights out and back without a loss, and transformers' logits from the same file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leftward import Config
from leftward.errors import UserError
from leftward.formats.gguf import GGUF, write_gguf
from leftward.formats.gguf_architectures import ARCHITECTURES
from leftward.formats.gguf_models import config_of, from_gguf, to_gguf
from leftward.formats.model_directory import build_decoder
from leftward.model.decoder import Decoder
from leftward.presets import preset_settings
from random_models import random_decoder, random_ids

SMALL: dict[str, Any] = {"vocab_size": 61, "max_seq_len": 96, "n_layers": 3, "d_model": 32, "n_heads": 4, "d_ff": 48}
PLAIN: dict[str, Any] = {**SMALL, "qk_norm": "none"}
EVERY_BIAS = {"qkv_bias": True, "attn_out_bias": True, "ff_bias": True}
GPT: dict[str, Any] = {**PLAIN, **EVERY_BIAS, "norm": "layernorm", "norm_eps": 1e-5, "feed_forward": "gelu_tanh"}
GEMMA: dict[str, Any] = {
    **PLAIN,
    "norm_weight": "one_plus",
    "feed_forward": "geglu_tanh",
    "embed_scale": 32**0.5,
    "head_dim": 16,
    "n_kv_heads": 1,
}
GEMMA3: dict[str, Any] = {
    **GEMMA,
    "block": "sandwich",
    "qk_norm": "per_head",
    "attention_pattern": "LLLLLG",
    "window": 8,
    "rope_base": 1e6,
    "rope_local_base": 1e4,
}
COHERE: dict[str, Any] = {
    **PLAIN,
    "norm": "layernorm",
    "norm_bias": False,
    "block": "parallel_shared",
    "rope_pairing": "adjacent",
    "logit_scale": 0.0625,
}
EXPERTS = {"n_experts": 4, "n_experts_per_token": 2}
UNTIED = {"tie_embeddings": False}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {**PLAIN, "n_kv_heads": 2}),
    ("llama", {**PLAIN, **UNTIED, **EVERY_BIAS, "n_kv_heads": 1, "norm_eps": 1e-5, "rope_base": 1e5}),
    ("llama", {**PLAIN, "head_dim": 16, "rope_scaling": {"kind": "linear", "factor": 4.0}, "dropout": 0.1}),
    ("llama", {**PLAIN, "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 32}}),
    ("llama", {**PLAIN, **UNTIED, **EXPERTS, "n_kv_heads": 2}),
    ("qwen2", {**PLAIN, "n_kv_heads": 2, "qkv_bias": True}),
    ("qwen2", {**PLAIN, "qkv_bias": True, "rope_scaling": {"kind": "yarn", "factor": 4.0}}),
    ("qwen2", {**PLAIN, "qkv_bias": True, "rope_scaling": {"kind": "yarn", "factor": 4.0, "attention_factor": 1.25}}),
    ("llama", {**PLAIN, "qkv_bias": True, "head_dim": 16}),  # which llama.cpp's qwen2 can't be
    ("qwen3", {**SMALL, "head_dim": 8, "n_kv_heads": 2}),
    ("qwen3", {**SMALL, **UNTIED, "head_dim": 24, "vocab_multiple": 64}),
    ("qwen3moe", {**SMALL, **EXPERTS, **UNTIED, "head_dim": 24, "n_kv_heads": 2}),
    ("smollm3", {**PLAIN, "n_layers": 5, "n_kv_heads": 2, "position_pattern": "PPPN"}),
    ("granite", {**PLAIN, "embed_scale": 12.0, "residual_scale": 0.22, "attn_scale": 0.0078125, "logit_scale": 1 / 6}),
    ("gemma", GEMMA),
    (
        "gemma2",
        {
            **GEMMA,
            "block": "sandwich",
            "attention_pattern": "LG",
            "window": 8,
            "attn_softcap": 50.0,
            "logit_softcap": 30.0,
        },
    ),
    ("gemma2", {**GEMMA, "block": "sandwich", "attn_softcap": 50.0, "logit_softcap": 30.0}),
    (
        "gemma3",
        {**GEMMA3, "n_layers": 7},
    ),
    ("gemma3", {**GEMMA, "block": "sandwich", "qk_norm": "per_head", "attention_pattern": "L", "window": 8}),
    ("olmo2", {**SMALL, **UNTIED, "block": "output", "qk_norm": "whole", "n_kv_heads": 2}),
    ("olmo", {**PLAIN, "norm": "layernorm", "norm_weight": "none", "n_kv_heads": 2}),
    (
        "phi3",
        {
            **PLAIN,
            **UNTIED,
            "window": 200,
            "rope_scaling": {
                "kind": "longrope",
                "original_max_seq_len": 32,
                "short_factors": [1.0, 1.1, 1.0700000524520874, 2.0],
                "long_factors": [1.5, 2.5, 10.0, 64.76000213623047],
            },
        },
    ),
    (
        "gpt-oss",
        {
            **PLAIN,
            **UNTIED,
            **EVERY_BIAS,
            **EXPERTS,
            "attn_sinks": True,
            "feed_forward": "swiglu_clamped",
            "attention_pattern": "LG",
            "window": 8,
            "rope_scaling": {"kind": "yarn", "factor": 32.0, "original_max_seq_len": 64, "truncate": False},
        },
    ),
    (
        "gpt-oss",
        {**PLAIN, **UNTIED, **EVERY_BIAS, **EXPERTS, "attn_sinks": True, "feed_forward": "swiglu_clamped"},
    ),
    ("gpt2", {**GPT, "positions": "learned"}),
    ("gpt2", {**GPT, **UNTIED, "positions": "learned", "dropout": 0.1}),
    ("gpt2", {**GPT, "positions": "learned", "feed_forward": "gelu"}),
    ("starcoder2", {**GPT, "n_kv_heads": 2}),
    ("gptneox", {**GPT, **UNTIED, "feed_forward": "gelu", "block": "parallel", "rope_fraction": 0.5}),
    ("gptneox", {**GPT, "block": "parallel", "rope_fraction": 0.25}),
    ("bloom", {**GPT, "positions": "alibi", "embed_norm": True, "n_heads": 4, "d_ff": 128}),
    ("bloom", {**GPT, **UNTIED, "positions": "alibi", "embed_norm": True, "n_heads": 6, "d_model": 48}),
    ("mpt", {**PLAIN, "norm": "layernorm", "norm_bias": False, "feed_forward": "gelu", "positions": "alibi_mpt"}),
    (
        "falcon",
        {**PLAIN, "norm": "layernorm", "n_kv_heads": 1, "feed_forward": "gelu", "block": "parallel_shared"},
    ),
    ("falcon", {**PLAIN, "norm": "layernorm", "n_kv_heads": 2, "feed_forward": "gelu", "block": "parallel"}),
    ("phi2", {**GPT, **UNTIED, "head_bias": True, "block": "parallel_shared", "rope_fraction": 0.5}),
    ("stablelm", {**PLAIN, **UNTIED, "norm": "layernorm", "rope_fraction": 0.25, "qkv_bias": True}),
    ("stablelm", {**PLAIN, **UNTIED, "norm": "layernorm", "block": "parallel_shared"}),
    ("command-r", {**COHERE, "n_kv_heads": 2}),
    ("cohere2", {**COHERE, "attention_pattern": "LLLG", "window": 8, "position_pattern": "PPPN"}),
]
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(CASES)]


def drawn(values: dict[str, Any]) -> Decoder:
    """Random weights that 16 bits hold, as published ones are: then 1 + w is exact in fp32."""
    decoder = random_decoder(Config(**values))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(parameter.bfloat16())
    if decoder.config.padded_vocab_size > decoder.config.vocab_size:
        for table in {decoder.embed.weight, decoder.head.weight}:
            table.data[decoder.config.vocab_size :] = 0
    return decoder


def without_tied_head(decoder: Decoder) -> dict[str, Tensor]:
    state = decoder.state_dict()
    return {name: t for name, t in state.items() if not (decoder.config.tie_embeddings and name == "head.weight")}


@pytest.mark.parametrize(("architecture", "values"), CASES, ids=IDS)
def test_ours_to_gguf_and_back_loses_nothing(tmp_path: Path, architecture: str, values: dict[str, Any]) -> None:
    decoder = drawn(values)
    metadata, tensors = to_gguf(decoder.config, decoder.state_dict())
    assert metadata["general.architecture"] == architecture
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    config, state = from_gguf(GGUF.open(tmp_path / "model.gguf"))
    assert config == decoder.config
    expected = without_tied_head(decoder)
    assert state.keys() == expected.keys()
    for name in state:
        assert torch.equal(state[name], expected[name]), name
        assert state[name].is_contiguous()


@pytest.mark.parametrize(("architecture", "values"), CASES, ids=IDS)
def test_names_are_those_of_the_gguf_package(architecture: str, values: dict[str, Any]) -> None:
    constants = pytest.importorskip("gguf").constants
    arch = next(arch for arch, name in constants.MODEL_ARCH_NAMES.items() if name == architecture)
    known = {constants.TENSOR_NAMES[tensor] for tensor in constants.MODEL_TENSORS[arch]}
    decoder = drawn(values)
    metadata, tensors = to_gguf(decoder.config, decoder.state_dict())
    layers = range(decoder.config.n_layers)
    names = {name.format(bid=layer) for name in known for layer in layers}
    assert {name.rpartition(".")[0] for name in tensors} <= names
    keys = {
        key.format(arch=architecture, dense="dense")
        for group in (constants.Keys.LLM, constants.Keys.Attention, constants.Keys.Rope)
        for key in vars(group).values()
        if isinstance(key, str)
    }
    assert {key for key in metadata if key.startswith(architecture + ".")} <= keys


# What transformers needs to know beside the file of an architecture's first case, since its reader leaves out, or has
# wrong, one setting or another of most: the model_type and fields of its own class.
CLASS = {"vocab_size": 61, "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
ROTARY = {**CLASS, "max_position_embeddings": 96, "tie_word_embeddings": True, "num_key_value_heads": 2}
GEMMA_CLASS = {**ROTARY, "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
EXPERTS_CLASS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
ORACLES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", ROTARY),
    "qwen2": ("qwen2", ROTARY),
    "qwen3": ("qwen3", {**ROTARY, "head_dim": 8}),
    "qwen3moe": ("qwen3_moe", {**ROTARY, **EXPERTS_CLASS, "head_dim": 24, "tie_word_embeddings": False}),
    "gemma2": ("gemma2", GEMMA_CLASS),
    "gemma3": ("gemma3_text", {**GEMMA_CLASS, "num_hidden_layers": 7}),
    "gpt2": ("gpt2", {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_inner": 48, "vocab_size": 61, "n_positions": 96}),
    "starcoder2": ("starcoder2", {**ROTARY, "sliding_window": None}),
    "bloom": ("bloom", {"n_layer": 3, "hidden_size": 32, "n_head": 4, "vocab_size": 61}),
    "falcon": ("falcon", {**CLASS, "multi_query": True, "ffn_hidden_size": 48, "layer_norm_epsilon": 1e-6}),
    "stablelm": (
        "stablelm",
        {
            **ROTARY,
            "num_key_value_heads": 4,
            "use_qkv_bias": True,
            "layer_norm_eps": 1e-6,
            "partial_rotary_factor": 0.25,
            "tie_word_embeddings": False,
        },
    ),
}


@pytest.mark.parametrize("architecture", ORACLES)
def test_transformers_reads_the_same_model(tmp_path: Path, architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it only")
    decoder = drawn(next(values for name, values in CASES if name == architecture))
    write_gguf(tmp_path / "model.gguf", *to_gguf(decoder.config, decoder.state_dict()))
    model_type, fields = ORACLES[architecture]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="model.gguf",
        config=transformers.AutoConfig.for_model(model_type, **fields),
        dtype=torch.float32,
    ).eval()
    ids = random_ids(decoder.config, 2, 32)
    with torch.inference_mode():
        ours = decoder(ids)
        assert ours.std() > 0.05  # something to compare
        torch.testing.assert_close(theirs(ids).logits, ours, atol=1e-4, rtol=0)


def test_a_window_that_no_key_says_is_llama_cpps(tmp_path: Path) -> None:
    """Gemma 2's first files had no key for it; its window is 4,096."""
    decoder = drawn(next(values for name, values in CASES if name == "gemma2"))
    metadata, tensors = to_gguf(decoder.config, decoder.state_dict())
    del metadata["gemma2.attention.sliding_window"]
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    config = config_of(GGUF.open(tmp_path / "model.gguf"))
    assert (config.window, config.attention_pattern) == (4096, "LG")


def test_what_is_added_to_a_product_stays_fp32() -> None:
    """llama.cpp takes no other kind, biases of experts included, which have a row for each."""
    decoder = drawn(next(values for name, values in CASES if name == "gpt-oss"))
    _, tensors = to_gguf(decoder.config, decoder.state_dict(), kind="F16")
    assert {kind for name, (kind, _) in tensors.items() if name.endswith(".bias")} == {"F32"}


def test_query_and_key_rows_are_permuted_as_the_converter_does(tmp_path: Path) -> None:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py, written out."""

    def permuted(weights: Tensor, n_heads: int) -> Tensor:
        rows = weights.reshape(n_heads, 2, weights.shape[0] // n_heads // 2, *weights.shape[1:])
        return rows.swapaxes(1, 2).reshape(weights.shape)

    decoder = drawn({**PLAIN, "n_kv_heads": 2, "qkv_bias": True, "attn_out_bias": True})
    _, tensors = to_gguf(decoder.config, decoder.state_dict())
    for kind in ("weight", "bias"):
        q, k, v = getattr(decoder.blocks[1].attn.qkv, kind).split([32, 16, 16])
        assert torch.equal(tensors[f"blk.1.attn_q.{kind}"][1], permuted(q, 4))
        assert torch.equal(tensors[f"blk.1.attn_k.{kind}"][1], permuted(k, 2))
        assert torch.equal(tensors[f"blk.1.attn_v.{kind}"][1], v)
    assert not torch.equal(q, permuted(q, 4))


def test_norms_are_stored_as_what_they_multiply_by(tmp_path: Path) -> None:
    """In fp32, which rounds 1 + w once, as the model itself does: the function is the same to the bit."""
    decoder = random_decoder(Config(**GEMMA))
    metadata, tensors = to_gguf(decoder.config, decoder.state_dict(), kind="F16")
    kind, stored = tensors["blk.0.attn_norm.weight"]
    assert kind == "F32"
    assert torch.equal(stored, 1 + decoder.blocks[0].attn_norm.weight)
    metadata, tensors = to_gguf(decoder.config, decoder.state_dict())
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    back = build_decoder(*from_gguf(GGUF.open(tmp_path / "model.gguf")))
    ids = random_ids(decoder.config, 2, 32)
    with torch.inference_mode():
        assert torch.equal(back(ids), decoder(ids))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "BF16", "F16"])
@pytest.mark.parametrize("d_model", [256, 32])
def test_quantised_models_stay_close(tmp_path: Path, kind: str, d_model: int) -> None:
    """Rows of 32 are no whole block of 256: they get the next kind that divides them."""
    decoder = random_decoder(Config(**{**PLAIN, "n_kv_heads": 2, "d_model": d_model, "d_ff": 256}), std=0.05)
    metadata, tensors = to_gguf(decoder.config, decoder.state_dict(), kind=kind)
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    gguf = GGUF.open(tmp_path / "model.gguf")
    found = gguf.tensors["blk.0.attn_q.weight"].kind
    fallback = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
    assert found == (fallback.get(kind, kind) if d_model == 32 else kind)
    assert gguf.tensors["blk.0.attn_norm.weight"].kind == "F32"
    config, state = from_gguf(gguf, torch.bfloat16)
    assert config == decoder.config
    for name, tensor in without_tied_head(decoder).items():
        assert state[name].dtype == torch.bfloat16
        error = (state[name].float() - tensor).norm() / tensor.norm()
        assert error < (0.12 if "4" in kind else 0.06), name


def test_rows_of_one_kind_are_moved_as_bytes_and_of_several_as_numbers(tmp_path: Path) -> None:
    decoder = random_decoder(Config(**{**PLAIN, "n_kv_heads": 2}))
    metadata, tensors = to_gguf(decoder.config, decoder.state_dict(), kind="Q8_0")
    states = []
    for kind in ("Q8_0", "Q4_0"):
        tensors["blk.0.attn_v.weight"] = (kind, tensors["blk.0.attn_v.weight"][1])
        write_gguf(tmp_path / "model.gguf", metadata, tensors)
        states.append(from_gguf(GGUF.open(tmp_path / "model.gguf"))[1]["blocks.0.attn.qkv.weight"])
    assert torch.equal(states[0][:48], states[1][:48])
    assert not torch.equal(states[0][48:], states[1][48:])


def test_divisors_that_no_formula_gives_are_kept(tmp_path: Path) -> None:
    decoder = drawn(PLAIN)
    metadata, tensors = to_gguf(decoder.config, decoder.state_dict())
    tensors["rope_freqs.weight"] = ("F32", torch.tensor([1.0, 3.0, 2.5, 7.0]))
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    scaling = config_of(GGUF.open(tmp_path / "model.gguf")).rope_scaling
    assert scaling is not None
    assert scaling.long_factors == scaling.short_factors == (1.0, 3.0, 2.5, 7.0)
    assert scaling.attention_factor == 1.0


def test_llama3s_divisors_are_recognised(tmp_path: Path) -> None:
    """Without our own key: by the values that Llama 3.1's converter computes (dim 128, base 5e5, factor 8)."""
    values = {**preset_settings("llama3.1-8b"), "n_layers": 1, "d_model": 128, "n_heads": 1, "n_kv_heads": 1}
    config = Config(**{**values, "vocab_size": 8, "d_ff": 32})
    assert config.rope_scaling is not None
    metadata, tensors = to_gguf(config, Decoder(config).state_dict())
    _, divisors = tensors["rope_freqs.weight"]
    torch.testing.assert_close(divisors[:29], torch.ones(29), atol=0, rtol=0)
    passage = torch.tensor([0.8282, 0.6437, 0.4935, 0.3711, 0.2714, 0.1902])  # oracle: Meta's code
    torch.testing.assert_close(1 / divisors[29:35], passage, atol=5e-5, rtol=0)
    torch.testing.assert_close(divisors[35:], torch.full((29,), 8.0))
    metadata.pop("leftward.config", None)
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    assert config_of(GGUF.open(tmp_path / "model.gguf")).rope_scaling == config.rope_scaling


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**PLAIN, "window": 8}, "but for window, attention_pattern .with max_seq_len 8 the"),
        ({**SMALL, "norm": "layernorm", "positions": "sinusoidal"}, "no architecture"),
        ({**PLAIN, "rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_max_seq_len": 8}}, "rope_scaling"),
        ({**PLAIN, "n_heads": 1, "causal": False}, "causal"),
        ({**GPT, "positions": "learned", "head_dim": 16}, "gpt2, but for head_dim"),
        (
            {
                **PLAIN,
                "norm": "layernorm",
                "norm_bias": False,
                "n_heads": 6,
                "d_model": 48,
                "feed_forward": "gelu",
                "positions": "alibi_mpt",
            },
            "mpt, but for n_heads",
        ),
        ({**COHERE, "n_layers": 64}, "command-r, but for n_layers"),
        ({**SMALL, "rope_fraction": 0.5}, "qwen3, but for rope_fraction"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_not_written(values: dict[str, Any], message: str) -> None:
    decoder = random_decoder(Config(**values))
    with pytest.raises(UserError, match=message):
        to_gguf(decoder.config, decoder.state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture 'mamba' is not supported yet: qwen3, "),
        ({"general.architecture": None}, "general.architecture is missing"),
        ({"llama.block_count": 4}, "tensor blk.3.attn_norm.weight is missing; expected with shape [32]"),
        ({"llama.block_count": 2}, "tensor blk.2.attn_k.weight (and 8 more) is not expected"),
        ({"llama.block_count": 2**31 - 1}, "layers are said, but the file has only"),
        ({"llama.block_count": None}, "metadata llama.block_count is missing"),
        ({"llama.block_count": "3"}, "llama.block_count: expected a whole number from 1 to 2^31, found '3'"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count: expected a whole number"),
        ({"llama.attention.head_count": 8}, "tensor blk.0.attn_q.weight has shape [32, 32]; expected [64, 32]"),
        ({"llama.attention.head_count_kv": [2, 1, 2]}, "differs from layer to layer"),
        ({"llama.feed_forward_length": 2**31 - 1}, "tensor blk.0.ffn_gate.weight has shape [48, 32]"),
        ({"llama.attention.value_length": 4}, "values of another width than keys"),
        ({"llama.rope.dimension_count": 4}, "rotary positions on a part of each head"),
        ({"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 2.0}, "rope.scaling.type 'su' is not"),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base: expected a number above 0, found -1.0"),
        ({"llama.attention.layer_norm_rms_epsilon": 2.0}, "norm_eps is 2.0"),
        ({"llama.residual_scale": 0.22}, "metadata llama.residual_scale is 0.22, which is not supported yet"),
        ({"llama.expert_count": 2}, "tensor blk.0.ffn_gate_inp.weight is missing"),
        ({"llama.some_new_thing": [1, 2]}, "llama.some_new_thing is a list, which is not supported yet"),
        ({"leftward.config": '{"d_model": 64}'}, "leftward.config says d_model 64, and the file 32"),
        ({"leftward.config": '{"vocab_multiple": 65536}'}, "leftward.config says vocab_multiple"),
        ({"leftward.config": "[[["}, "leftward.config is damaged"),
        ({"leftward.config": "7"}, "leftward.config is damaged"),
    ],
)
def test_metadata_that_is_wrong_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    decoder = drawn({**PLAIN, "n_kv_heads": 2})
    metadata, tensors = to_gguf(decoder.config, decoder.state_dict())
    metadata = {key: value for key, value in {**metadata, **changes}.items() if value is not None}
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata, tensors)
    with pytest.raises(UserError) as caught:
        from_gguf(GGUF.open(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_head_that_is_said_to_be_tied_is_compared(tmp_path: Path) -> None:
    decoder = drawn({**GPT, "block": "parallel"})
    metadata, tensors = to_gguf(decoder.config, decoder.state_dict())
    assert torch.equal(tensors["output.weight"][1], decoder.embed.weight)
    tensors["output.weight"] = ("F32", tensors["output.weight"][1] + 1)
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    with pytest.raises(UserError, match="the head is said to be tied"):
        from_gguf(GGUF.open(tmp_path / "model.gguf"))


def test_every_architecture_has_a_case() -> None:
    assert {name for name, _ in CASES} == {architecture.name for architecture in ARCHITECTURES}


def test_the_container_is_read_without_torch() -> None:
    code = "import sys, leftward.formats.gguf; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
