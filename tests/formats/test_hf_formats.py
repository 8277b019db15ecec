"""Ours ↔ Hugging Face: the same logits and text as transformers, the same Config and weights back, nothing ignored."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leftward import Config
from leftward.errors import UserError
from leftward.formats.families import FAMILIES
from leftward.formats.hf import config_from_hf, family_of, from_hf, to_hf
from leftward.formats.model_directory import build_decoder, load_model, save_model
from random_models import configs, random_decoder, random_ids

SMALL: dict[str, Any] = {"vocab_size": 61, "max_seq_len": 96, "n_layers": 3, "d_model": 32, "n_heads": 4}
GPT2: dict[str, Any] = {
    **SMALL,
    "positions": "learned",
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "qk_norm": "none",
    "qkv_bias": True,
    "attn_out_bias": True,
    "ff_bias": True,
    "feed_forward": "gelu_tanh",
}
STARCODER2: dict[str, Any] = {**SMALL, "norm": "layernorm", "qk_norm": "none", "feed_forward": "gelu_tanh"}
EVERY_BIAS = {"qkv_bias": True, "attn_out_bias": True, "ff_bias": True}
CASES = [
    ("qwen3", {**SMALL}),
    ("qwen3", {**SMALL, "n_kv_heads": 2, "head_dim": 24, "tie_embeddings": False, "rope_base": 1e6}),
    ("qwen3", {**SMALL, "n_kv_heads": 1, "qkv_bias": True, "attn_out_bias": True, "dropout": 0.1, "norm_eps": 1e-5}),
    ("llama", {**SMALL, "qk_norm": "none", "n_kv_heads": 2}),
    ("llama", {**SMALL, "qk_norm": "none", **EVERY_BIAS, "head_dim": 16, "tie_embeddings": False, "dropout": 0.2}),
    ("llama", {**SMALL, "qk_norm": "none", "ff_bias": True, "d_ff": 40}),
    ("gpt2", GPT2),
    ("gpt2", {**GPT2, "feed_forward": "gelu", "d_ff": 56, "tie_embeddings": False, "dropout": 0.1}),
    ("gpt2", {**GPT2, "feed_forward": "relu2"}),
    ("starcoder2", {**STARCODER2, "n_kv_heads": 2}),
    ("starcoder2", {**STARCODER2, **EVERY_BIAS, "feed_forward": "gelu", "tie_embeddings": False, "dropout": 0.1}),
    ("starcoder2", {**STARCODER2, "n_kv_heads": 1, "feed_forward": "relu2", "rope_base": 500.0}),
]


@pytest.mark.parametrize(("family", "values"), CASES)
def test_transformers_gives_our_logits_and_our_text(tmp_path: Path, family: str, values: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = Config(**values)
    assert family_of(config) == family
    decoder = random_decoder(config)
    save_model(tmp_path, config, decoder.state_dict())
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report  # no tensor missing, left over or newly drawn
    assert theirs.config.model_type == family
    assert theirs.num_parameters() == decoder.n_parameters
    ids = random_ids(config, 2, 32)
    with torch.inference_mode():
        ours = decoder(ids)
        assert ours.std() > 0.05  # something to compare
        torch.testing.assert_close(theirs.eval()(ids).logits, ours, atol=1e-4, rtol=0)
        text = theirs.generate(ids[:1], attention_mask=torch.ones(1, 32), max_new_tokens=64, do_sample=False)
        sequence = ids[:1]
        for _ in range(64):
            sequence = torch.cat((sequence, decoder(sequence)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert text.tolist() == sequence.tolist()


@pytest.mark.parametrize(("family", "values"), CASES)
def test_what_transformers_saves_comes_back(tmp_path: Path, family: str, values: dict[str, Any]) -> None:
    """Their own writer orders keys, dtypes and rotary settings in its own way, and keeps our extra key."""
    transformers = pytest.importorskip("transformers")
    config = Config(**values)
    decoder = random_decoder(config)
    save_model(tmp_path / "ours", config, decoder.state_dict())
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    back, _, _ = load_model(tmp_path / "theirs")
    assert back.config == config
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_a_model_that_transformers_made_is_read(tmp_path: Path) -> None:
    """Weights drawn by transformers, in a config.json that leaves defaults out."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(made).eval()
    model.save_pretrained(tmp_path)
    decoder, tokenizer, _ = load_model(tmp_path)
    assert tokenizer is None
    assert decoder.config.d_ff == 64 and decoder.config.feed_forward == "gelu_tanh" and decoder.config.dropout == 0.1
    ids = random_ids(decoder.config, 2, 32)
    with torch.inference_mode():
        torch.testing.assert_close(decoder(ids), model(ids).logits, atol=1e-4, rtol=0)


@given(configs())
@settings(max_examples=60)
def test_every_config_and_its_weights_come_back(config: Config) -> None:
    decoder = random_decoder(config)
    config_json, tensors = to_hf(config, decoder.state_dict())
    config_json = json.loads(json.dumps(config_json, allow_nan=False))
    back, state = from_hf(config_json, tensors)
    assert back == config
    copy = build_decoder(back, state)
    assert (copy.head.weight is copy.embed.weight) == config.tie_embeddings
    ids = random_ids(config, 2, 10)
    with torch.inference_mode():
        assert torch.equal(copy(ids), decoder(ids))


def test_what_no_class_expresses_is_saved_as_ours() -> None:
    config = Config(**SMALL, positions="learned")
    assert family_of(config) is None
    config_json, tensors = to_hf(config, random_decoder(config).state_dict())
    assert config_json["model_type"] == "leftward"
    assert config_json["positions"] == "learned"
    assert "blocks.0.attn.qkv.weight" in tensors


def test_settings_that_other_tools_read() -> None:
    """rope_theta, torch_dtype: transformers 4 and vLLM; rope_parameters, dtype: transformers 5; n_ctx: llama.cpp."""
    config = Config(**SMALL, rope_base=5e5)
    config_json, _ = to_hf(config, random_decoder(config).bfloat16().state_dict())
    assert config_json["architectures"] == ["Qwen3ForCausalLM"]
    assert config_json["rope_theta"] == config_json["rope_parameters"]["rope_theta"] == 5e5
    assert config_json["torch_dtype"] == config_json["dtype"] == "bfloat16"
    assert config_json["head_dim"] == 8 and config_json["tie_word_embeddings"] is True
    assert to_hf(Config(**GPT2), random_decoder(Config(**GPT2)).state_dict())[0]["n_ctx"] == 96


LLAMA_JSON = {
    "model_type": "llama",
    "vocab_size": 61,
    "max_position_embeddings": 96,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def test_absent_keys_mean_what_the_class_means() -> None:
    config = config_from_hf({**LLAMA_JSON, "rope_scaling": None, "hidden_act": None, "unknown": [1, 2]})
    assert config == Config(**SMALL, d_ff=64, qk_norm="none", tie_embeddings=False, norm_eps=1e-6)
    assert config_from_hf({**LLAMA_JSON, "rope_parameters": {"rope_type": "default", "rope_theta": 7}}).rope_base == 7
    qwen3 = {**LLAMA_JSON, "model_type": "qwen3", "sliding_window": 32}
    assert config_from_hf(qwen3).head_dim == 128  # and the window is off unless use_sliding_window


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "scaled with 'mrope'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_slwo": 2.0}}, "beta_slwo is not supported"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_parameters": {"full_attention": 3}}, "each kind of layer"),
        ({"model_type": "bloom", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"sliding_window": 32}, "sliding_window 32 is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": 3}, "layer_types"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with gptq"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_size": "32"}, "d_model is '32'"),
        ({"hidden_size": [32]}, "hidden_size is [32]"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "not divisible"),
        ({"vocab_size": -1}, "vocab_size is -1"),
    ],
)
def test_what_a_config_cannot_say_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        config_from_hf({**LLAMA_JSON, **changes})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


MORE_KEYS = (
    *("rope_theta", "head_dim", "n_embd", "n_positions", "leftward", "layer_types", "rope_scaling", "rope_parameters"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "no_rope_layers"),
    *("no_rope_layer_interval", "query_pre_attn_scalar", "logits_scaling", "attn_config", "attention_types", "n_head"),
    *("num_layers", "num_kv_heads", "num_local_experts", "rotary_dim", "n_layer", "window_size", "attention_layers"),
)


@given(
    st.dictionaries(
        st.sampled_from([*LLAMA_JSON, *MORE_KEYS]),
        st.none() | st.booleans() | st.integers(-5, 70) | st.floats() | st.text(max_size=3) | st.just([]) | st.just({}),
    ),
    st.sampled_from([family.model_type for family in FAMILIES]),
)
@settings(max_examples=400)
def test_a_damaged_config_json_is_a_user_error(changes: dict[str, Any], model_type: str) -> None:
    with contextlib.suppress(UserError):
        config_from_hf({**LLAMA_JSON, "model_type": model_type, **changes})


# ---- tensors


def _gpt2_file() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = Config(**GPT2)
    return to_hf(config, random_decoder(config).state_dict())


def test_gpt2s_own_file_lacks_the_prefix_and_holds_the_mask() -> None:
    config_json, tensors = _gpt2_file()
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 96, 96) for i in range(3)}
    config, state = from_hf(config_json, bare)
    expected = from_hf(config_json, tensors)[1]
    assert config == Config(**GPT2)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_tied_head_may_be_in_the_file_but_must_be_the_embedding() -> None:
    config_json, tensors = _gpt2_file()
    embed = tensors["transformer.wte.weight"]
    _, state = from_hf(config_json, {**tensors, "lm_head.weight": embed.clone()})
    assert "head.weight" not in state
    with pytest.raises(UserError, match="said to be tied, but tensor lm_head"):
        from_hf(config_json, {**tensors, "lm_head.weight": embed + 1})
    with pytest.raises(UserError, match=r"tensor lm_head.weight is missing"):
        from_hf({**config_json, "tie_word_embeddings": False}, tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("transformer.wpe.weight"),
            "tensor transformer.wpe.weight is missing; expected with shape [96, 32]",
        ),
        (
            lambda t: t.update({"transformer.wte.weight": torch.zeros(60, 32)}),
            "tensor transformer.wte.weight has shape [60, 32]; expected [61, 32]",
        ),
        (
            lambda t: t.update({"transformer.h.1.mlp.c_fc.weight": torch.zeros(128, 32)}),
            "tensor transformer.h.1.mlp.c_fc.weight has shape [128, 32]; expected [32, 128]",
        ),
        (
            lambda t: t.update({"transformer.ln_f.bias": torch.zeros(32, dtype=torch.int8)}),
            "tensor transformer.ln_f.bias holds torch.int8",
        ),
        (
            lambda t: t.update({"transformer.h.3.ln_1.weight": torch.zeros(32), "zzz": torch.zeros(1)}),
            "tensor transformer.h.3.ln_1.weight (and 1 more) is not expected",
        ),
    ],
)
def test_wrong_tensors_are_named(change: Any, message: str) -> None:
    config_json, tensors = _gpt2_file()
    change(tensors)
    with pytest.raises(UserError) as caught:
        from_hf(config_json, tensors)
    assert message in str(caught.value)


def test_a_config_json_cannot_make_us_build_a_giant() -> None:
    config_json, tensors = _gpt2_file()
    with pytest.raises(UserError, match="1000000000 layers"):
        from_hf({**config_json, "n_layer": 10**9}, tensors)
    with pytest.raises(UserError, match="too large to exist"):
        from_hf({**config_json, "vocab_size": 2**31 - 1, "n_embd": 2**30, "n_inner": 2**31 - 1, "n_head": 1}, tensors)


def test_what_a_class_cannot_say_is_not_saved_as_it() -> None:
    """Every field that a table does not name has to have its default; no variant is lost in silence."""
    changes: list[dict[str, Any]] = [
        {"window": 4, "qk_norm": "whole"},
        {"causal": False},
        {"attn_scale": 0.3},
        {"attn_softcap": 9.0},
        {"attn_sinks": True},
        {"qk_norm": "whole"},
        {"positions": "alibi"},
        {"positions": "alibi", "alibi_scale": 0.35},
        {"position_pattern": "PN"},
        {"rope_fraction": 0.5},
        {"rope_pairing": "adjacent"},
        {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_max_seq_len": 5}},
        {"block": "sandwich"},
        {"norm_weight": "one_plus"},
        {"embed_norm": True},
        {"feed_forward": "relu2"},
        {"n_experts": 2, "d_shared": 8},
        {"head_bias": True},
        {"embed_scale": 2.0},
        {"logit_scale": 2.0},
        {"logit_softcap": 9.0},
    ]
    for change in changes:
        assert family_of(Config(**SMALL)) == "qwen3"
        assert family_of(Config(**{**SMALL, **change})) is None, change


def test_a_padded_vocabulary_is_transformers_without_the_padding() -> None:
    decoder = random_decoder(Config(**{**SMALL, "vocab_multiple": 64}))
    config_json, tensors = to_hf(decoder.config, decoder.state_dict())
    assert config_json["model_type"] == "qwen3" and config_json["vocab_size"] == decoder.config.vocab_size
    assert tensors["model.embed_tokens.weight"].shape[0] == decoder.config.vocab_size
    back, state = from_hf(config_json, tensors)
    assert back == decoder.config
    assert torch.equal(build_decoder(back, state)(torch.tensor([[1, 2]])), decoder(torch.tensor([[1, 2]])))
