"""Every family against transformers' own class: a tiny random model that transformers saved gives the same logits here,
with the cache, in a padded batch, with windows and scaled angles in force; writes the same text; and goes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import leftward as lw
from leftward.errors import UserError
from leftward.formats.families import FAMILIES
from leftward.formats.hf import from_hf
from leftward.formats.model_directory import build_decoder, load_model, save_model
from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder
from leftward.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {**BASE, "num_key_value_heads": 2}
GPT = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96}
GPT |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
OTHER = {key: BASE[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
FALCON = {**OTHER, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 96}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 24}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
# id → (prefix of the classes' names, settings)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-gpt": ("OpenAIGPT", {**GPT}),
    "gpt2": ("GPT2", {**GPT}),
    "gpt2-relu": ("GPT2", {**GPT, "activation_function": "relu", "n_inner": 40}),
    "gpt_neo": (
        "GPTNeo",
        {
            **OTHER,
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "intermediate_size": 56,
            "max_position_embeddings": 96,
            "window_size": 7,
            "attention_types": [[["global", "local"], 2]],
        },
    ),
    "gpt_neox": ("GPTNeoX", {**BASE}),
    "gpt_neox-sequential": ("GPTNeoX", {**BASE, "use_parallel_residual": False, "attention_bias": False}),
    "gptj": ("GPTJ", {**GPT, "rotary_dim": 4}),
    "opt": (
        "OPT",
        {
            **OTHER,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "ffn_dim": 56,
            "max_position_embeddings": 96,
            "word_embed_proj_dim": 32,
            "pad_token_id": 1,
        },
    ),
    "bloom": ("Bloom", {**OTHER, "hidden_size": 32, "n_layer": 3, "n_head": 4, "seq_length": 96}),
    "bloom-6-heads": ("Bloom", {**OTHER, "hidden_size": 48, "n_layer": 2, "n_head": 6, "seq_length": 96}),
    "mpt": ("Mpt", {**OTHER, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 96}),
    "mpt-6-heads": ("Mpt", {**OTHER, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 96}),
    "falcon-7b": ("Falcon", {**FALCON}),
    "falcon-40b": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon2-11b": (
        "Falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": (
        "Falcon",
        {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "falcon-rw": ("Falcon", {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-alibi-7b": ("Falcon", {**FALCON, "alibi": True}),
    "falcon-alibi-sequential": ("Falcon", {**FALCON, "alibi": True, "parallel_attn": False}),
    "falcon-alibi-40b": (
        "Falcon",
        {**FALCON, "alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon-alibi-11b": (
        "Falcon",
        {
            **FALCON,
            "alibi": True,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
        },
    ),
    "llama": ("Llama", {**GROUPED}),
    "llama-3": ("Llama", {**GROUPED, "rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {**GROUPED, "rope_parameters": YARN}),
    "llama-linear": (
        "Llama",
        {**GROUPED, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama-dynamic": (
        "Llama",
        {**GROUPED, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama-biases": ("Llama", {**GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 7}),
    "mistral-no-window": ("Mistral", {**GROUPED, "sliding_window": None, "head_dim": 16}),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4, "sliding_window": 7}),
    "gemma": ("Gemma", {**GROUPED, "head_dim": 16}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3",
        {
            **GROUPED,
            "head_dim": 16,
            "num_hidden_layers": 6,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
    ),
    "qwen2": ("Qwen2", {**GROUPED}),
    "qwen2-window": ("Qwen2", {**GROUPED, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**GROUPED, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "phi": ("Phi", {**BASE, "num_key_value_heads": 2}),
    "phi3": ("Phi3", {**GROUPED, "sliding_window": 7}),
    "phi3-longrope": ("Phi3", {**GROUPED, "rope_parameters": LONGROPE, "original_max_position_embeddings": 8}),
    "stablelm": ("StableLm", {**GROUPED, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {**GROUPED, "use_parallel_residual": True}),
    "olmo": ("Olmo", {**GROUPED}),
    "olmo2": ("Olmo2", {**GROUPED}),
    "smollm3": ("SmolLM3", {**GROUPED, "tie_word_embeddings": True}),
    "granite": (
        "Granite",
        {
            **GROUPED,
            "embedding_multiplier": 3,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **GROUPED,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "cohere": ("Cohere", {**GROUPED, "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2", {**GROUPED, "sliding_window": 7, "use_bias": True}),
}


def kernel_of(values: dict[str, Any]) -> str:
    """Falcon's eager attention adds ALiBi twice: it is in the mask already."""
    return "sdpa" if values.get("alibi") else "eager"


def make(name: str, values: dict[str, Any]) -> Any:
    """transformers' model with random weights that all have a say."""
    config_class = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    model_class = (
        "OpenAIGPTLMHeadModel" if name == "OpenAIGPT" else "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    )
    config = getattr(transformers, config_class)(**values)
    model = getattr(transformers, model_class)._from_config(config, attn_implementation=kernel_of(values)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            is_norm = parameter.ndim == 1 and bool((parameter == 1).all())
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + float(is_norm))
    return model


def ids_of(rows: int, length: int) -> torch.Tensor:
    return torch.randint(2, 61, (rows, length), generator=torch.Generator().manual_seed(1))


def greedy(decoder: Decoder, ids: torch.Tensor, n: int) -> list[int]:
    cache = KVCache(decoder.config, 1, ids.shape[1] + n, rewindable=0)
    new: list[int] = []
    step = ids
    for _ in range(n):
        new.append(int(decoder(step, cache)[0, -1].argmax()))
        step = torch.tensor([new[-1:]])
    return new


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_a_family_is_read_exactly_and_goes_back(case: str, tmp_path: Path) -> None:
    theirs = make(*CASES[case])
    theirs.save_pretrained(tmp_path / "theirs")
    ours, _, _ = load_model(tmp_path / "theirs")
    assert ours.n_parameters == theirs.num_parameters()

    # longer than the windows, and as long as the model goes, which is what settles rules that look at a length
    ids = ids_of(2, 96)
    expected = theirs(ids).logits
    torch.testing.assert_close(ours(ids), expected, atol=1e-4, rtol=1e-4)

    cache, chunks = KVCache(ours.config, 2, 96, rewindable=0), []
    for start, stop in [(0, 20), (20, 21), (21, 60), (60, 96)]:
        chunks.append(ours(ids[:, start:stop], cache))
    torch.testing.assert_close(torch.cat(chunks, dim=1), expected, atol=1e-4, rtol=1e-4)

    lengths = [30, 11]
    padded = ids[:, :30].clone()
    padded[1, 11:] = 0
    together = ours(padded, lengths=lengths)
    for row, length in enumerate(lengths):
        alone = ours(ids[row : row + 1, :length])[0]
        torch.testing.assert_close(together[row, :length], alone, atol=1e-5, rtol=1e-5)

    save_model(tmp_path / "ours", ours.config, ours.state_dict(), model_type=theirs.config.model_type)
    config_json = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config_json["model_type"] == theirs.config.model_type
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation=kernel_of(CASES[case][1])
    )
    assert not any(report.values()), report
    torch.testing.assert_close(back(ids).logits, expected, atol=1e-5, rtol=1e-5)
    written, original = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("llama-dynamic", "phi3-longrope")])
@torch.inference_mode()
def test_greedy_text_is_theirs(case: str, tmp_path: Path) -> None:
    theirs = make(*CASES[case])
    theirs.save_pretrained(tmp_path)
    ours, _, _ = load_model(tmp_path)
    ids = ids_of(1, 30)
    new = theirs.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 30:]
    assert greedy(ours, ids, 64) == new.tolist()


@torch.inference_mode()
def test_angles_that_hang_on_the_length_are_theirs_in_a_shorter_context(tmp_path: Path) -> None:
    """transformers takes the short factors of longrope while a text is within the original context of 8."""
    theirs = make(*CASES["phi3-longrope"])
    theirs.save_pretrained(tmp_path)
    Tokenizer.train(["ab"], kind="char").save(tmp_path)
    ids = ids_of(2, 8)
    assert not torch.allclose(lw.load(tmp_path).decoder(ids), theirs(ids).logits, atol=1e-2)
    torch.testing.assert_close(lw.load(tmp_path, max_seq_len=8).decoder(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_falcons_alibi_is_theirs_but_for_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ALiBi is bf16 in a model of any dtype. Without that, many heads and far keys agree too."""
    values = {**FALCON, "hidden_size": 128, "num_attention_heads": 16, "max_position_embeddings": 600, "alibi": True}
    theirs = make("Falcon", values)
    config_json, tensors = theirs.config.to_dict(), theirs.state_dict()
    ours = build_decoder(*from_hf(config_json, tensors))
    ids = ids_of(1, 600)
    assert not torch.allclose(ours(ids), theirs(ids).logits, atol=1e-2)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_every_family_has_a_case() -> None:
    tried = set()
    for name, values in CASES.values():
        config_class = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
        tried.add(getattr(transformers, config_class)(**values).model_type)
    assert {family.model_type for family in FAMILIES} - {"leftward"} == tried


@pytest.mark.parametrize(
    ("model_type", "change", "expected"),
    [
        ("llama", {"rope_scaling": {"rope_type": "mrope"}}, "scaled with 'mrope'"),
        ("llama", {"rope_scaling": 3}, "rope_scaling is 3: it must be an object"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "rope_scaling.factor is 'x'"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ("mistral", {"sliding_window": "x"}, "window is 'x'"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "do not fit gemma2"),
        ("gemma2", {"query_pre_attn_scalar": "x"}, "do not fit gemma2"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("gpt_neo", {"attention_types": 3}, "attention_types"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm True is not supported"),
        ("falcon", {"num_attention_heads": 0}, "n_heads is 0"),
        ("falcon", {"alibi": "false"}, "alibi is 'false'"),
        ("mpt", {"attn_config": 7}, "attn_config is 7"),
        ("mpt", {"attn_config": {"clip_qkv": 8.0}}, "clip_qkv 8.0 is not supported"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised with gptq"),
    ],
)
def test_what_is_not_supported_is_named(model_type: str, change: dict[str, Any], expected: str) -> None:
    from leftward.formats.hf import config_from_hf

    shape = {
        "vocab_size": 5,
        "hidden_size": 8,
        "d_model": 8,
        "num_hidden_layers": 2,
        "num_layers": 2,
        "n_layers": 2,
        "num_attention_heads": 2,
        "num_heads": 2,
        "n_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 16,
        "max_seq_len": 16,
    }
    with pytest.raises(UserError, match=expected):
        config_from_hf({"model_type": model_type, **shape, **change})
