"""Presets: counts as published, counts and settings as transformers has them for the published config.json."""

import pytest
import torch

from leftward import Decoder
from leftward.config import Config
from leftward.errors import UserError
from leftward.planner import count_parameters
from leftward.presets import PRESETS, preset

# Totals of the published files (a tied head and buffers counted once or not at all), or of the formulas that the papers
# imply: GPT-3's layers of 12 d² + 13 d.
PUBLISHED = {
    "gpt1": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-14m": 14_067_712,
    "pythia-31m": 30_494_720,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "mpt-7b": 6_649_286_656,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    # The file's total less the vision tower's 416,866,032 and the projector's 1152 · d_model + 1152.
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 1152 * 2560 - 1152,
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 1152 * 3840 - 1152,
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * 5376 - 1152,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-3-mini-128k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "olmo-1b": 1_176_764_416,
    "olmo-7b": 6_888_095_744,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
# Without embeddings and head, from Pythia's model cards.
NON_EMBEDDING = {
    "pythia-70m": 18_915_328,
    "pythia-160m": 85_056_000,
    "pythia-410m": 302_311_424,
    "pythia-1b": 805_736_448,
    "pythia-1.4b": 1_208_602_624,
    "pythia-2.8b": 2_517_652_480,
    "pythia-6.9b": 6_444_163_072,
    "pythia-12b": 11_327_027_200,
}
# What GPT-3's table 2.1 calls each of its models, in units of its last digit.
GPT3_SIZES = {
    "gpt3-125m": (1e6, 125),
    "gpt3-350m": (10e6, 36),  # "350M": 355.9
    "gpt3-760m": (10e6, 76),
    "gpt3-1.3b": (1e8, 13),
    "gpt3-2.7b": (1e8, 27),
    "gpt3-6.7b": (1e8, 67),
    "gpt3-13b": (1e9, 13),
    "gpt3-175b": (1e9, 175),
}

# config.json as published, the keys that shape the model.
_LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-05, "tie_word_embeddings": False}
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_GEMMA3 = {
    "model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0, "sliding_window_pattern": 6,
}  # fmt: skip
_GEMMA2 = {
    "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "vocab_size": 256000,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096,
}  # fmt: skip
_OLMO2 = {"model_type": "olmo2", "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-06,
          "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352}  # fmt: skip
CONFIG_JSON = {
    "gpt1": {
        "model_type": "openai-gpt", "afn": "gelu", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "layer_norm_epsilon": 1e-05,
        "n_ctx": 512, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 512, "resid_pdrop": 0.1,
        "vocab_size": 40478,
    },
    "gpt2": {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "resid_pdrop": 0.1, "vocab_size": 50257,
    },
    "gpt2-xl": {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024,
        "resid_pdrop": 0.1, "vocab_size": 50257,
    },
    "gpt-j-6b": {
        "model_type": "gptj", "activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0,
        "layer_norm_epsilon": 1e-05, "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048,
        "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 64, "tie_word_embeddings": False, "vocab_size": 50400,
    },
    "gpt-neox-20b": {
        "model_type": "gpt_neox", "hidden_act": "gelu_fast", "hidden_size": 6144, "intermediate_size": 24576,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_attention_heads": 64, "num_hidden_layers": 44,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "vocab_size": 50432,
    },
    "pythia-1b": {
        "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 2048, "intermediate_size": 8192,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_attention_heads": 8, "num_hidden_layers": 16,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    "opt-1.3b": {
        "model_type": "opt", "activation_function": "relu", "attention_dropout": 0.0, "do_layer_norm_before": True,
        "dropout": 0.1, "ffn_dim": 8192, "hidden_size": 2048, "max_position_embeddings": 2048,
        "num_attention_heads": 32, "num_hidden_layers": 24, "vocab_size": 50272, "word_embed_proj_dim": 2048,
    },
    "opt-66b": {
        "model_type": "opt", "activation_function": "relu", "attention_dropout": 0.0, "do_layer_norm_before": True,
        "dropout": 0.1, "ffn_dim": 36864, "hidden_size": 9216, "max_position_embeddings": 2048,
        "num_attention_heads": 72, "num_hidden_layers": 64, "vocab_size": 50272, "word_embed_proj_dim": 9216,
    },
    "bloom-560m": {
        "model_type": "bloom", "apply_residual_connection_post_layernorm": False, "hidden_size": 1024, "n_layer": 24,
        "layer_norm_epsilon": 1e-05, "n_head": 16, "vocab_size": 250880,
    },
    "mpt-7b": {
        "model_type": "mpt", "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "qk_ln": False},
        "d_model": 4096, "expansion_ratio": 4, "max_seq_len": 2048, "n_heads": 32, "n_layers": 32, "no_bias": True,
        "vocab_size": 50432,
    },
    "mpt-30b": {
        "model_type": "mpt", "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "qk_ln": False},
        "d_model": 7168, "expansion_ratio": 4, "max_seq_len": 8192, "n_heads": 64, "n_layers": 48, "no_bias": True,
        "vocab_size": 50432,
    },
    "falcon-7b": {
        "model_type": "falcon", "alibi": False, "bias": False, "hidden_size": 4544, "layer_norm_epsilon": 1e-05,
        "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
        "parallel_attn": True, "vocab_size": 65024,
    },
    "falcon-40b": {
        "model_type": "falcon", "alibi": False, "bias": False, "hidden_size": 8192, "layer_norm_epsilon": 1e-05,
        "new_decoder_architecture": True, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
        "parallel_attn": True, "vocab_size": 65024,
    },
    "llama-65b": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 22016, "max_position_embeddings": 2048,
        "num_attention_heads": 64, "num_hidden_layers": 80, "vocab_size": 32000,
    },
    "llama2-70b": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "max_position_embeddings": 4096,
        "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8, "vocab_size": 32000,
    },
    "llama3-8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
    "llama3.1-405b": {
        **_LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "max_position_embeddings": 131072,
        "num_attention_heads": 128, "num_hidden_layers": 126, "num_key_value_heads": 8, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 8.0, **_LLAMA3_ROPE}, "vocab_size": 128256,
    },
    "llama3.2-1b": {
        **_LLAMA, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 32.0, **_LLAMA3_ROPE}, "tie_word_embeddings": True, "vocab_size": 128256,
    },
    "tinyllama-1.1b": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 2048,
        "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4, "vocab_size": 32000,
    },
    "smollm2-135m": {
        **_LLAMA, "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "rope_theta": 100000,
        "tie_word_embeddings": True, "vocab_size": 49152,
    },
    "mistral-7b": {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "mixtral-8x22b": {
        "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 16384,
        "max_position_embeddings": 65536, "num_attention_heads": 48, "num_experts_per_tok": 2, "num_hidden_layers": 56,
        "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "gemma-2b": {
        "model_type": "gemma", "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048, "intermediate_size": 16384,
        "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "vocab_size": 256000,
    },
    "gemma2-9b": {
        **_GEMMA2, "head_dim": 256, "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
        "num_hidden_layers": 42, "num_key_value_heads": 8, "query_pre_attn_scalar": 256,
    },
    "gemma2-27b": {
        **_GEMMA2, "head_dim": 128, "hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32,
        "num_hidden_layers": 46, "num_key_value_heads": 16, "query_pre_attn_scalar": 144,
    },
    "gemma3-270m": {
        **_GEMMA3, "hidden_size": 640, "intermediate_size": 2048, "max_position_embeddings": 32768,
        "num_attention_heads": 4, "num_hidden_layers": 18, "num_key_value_heads": 1, "sliding_window": 512,
        "vocab_size": 262144,
    },
    "gemma3-27b": {
        **_GEMMA3, "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, "vocab_size": 262208,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen2.5-72b": {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 29568,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_hidden_layers": 80,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 152064,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
        "intermediate_size": 9728, "max_position_embeddings": 40960, "num_attention_heads": 32, "rms_norm_eps": 1e-06,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_theta": 1000000, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "phi-1.5": {
        "model_type": "phi", "hidden_act": "gelu_new", "hidden_size": 2048, "intermediate_size": 8192,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 24,
        "partial_rotary_factor": 0.5, "qk_layernorm": False, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "vocab_size": 51200,
    },
    "phi-2": {
        "model_type": "phi", "hidden_act": "gelu_new", "hidden_size": 2560, "intermediate_size": 10240,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32,
        "partial_rotary_factor": 0.4, "qk_layernorm": False, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "vocab_size": 51200,
    },
    "phi-3-mini": {
        "model_type": "phi3", "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
        "sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064,
    },
    "phi-4": {
        "model_type": "phi3", "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17920,
        "max_position_embeddings": 16384, "num_attention_heads": 40, "num_hidden_layers": 40,
        "num_key_value_heads": 10, "original_max_position_embeddings": 16384, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "olmo-1b": {
        "model_type": "olmo", "attention_bias": False, "clip_qkv": None, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 2048, "num_attention_heads": 16, "rope_theta": 10000.0,
        "num_hidden_layers": 16, "num_key_value_heads": 16, "tie_word_embeddings": True, "vocab_size": 50304,
    },
    "olmo2-7b": {
        **_OLMO2, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32,
    },
    "olmo2-32b": {
        **_OLMO2, "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_hidden_layers": 64,
        "num_key_value_heads": 8,
    },
    "smollm3-3b": {
        "model_type": "smollm3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 11008, "max_position_embeddings": 65536, "mlp_bias": False, "no_rope_layer_interval": 4,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 5000000.0, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 128256,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "tie_word_embeddings": False, "vocab_size": 201088,
    },
}  # fmt: skip


def meta_count(config: Config) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_the_formula_counts_what_the_decoder_has(name):
    assert count_parameters(preset(name)).total == meta_count(preset(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_parameters_as_published(name):
    assert count_parameters(preset(name)).total == PUBLISHED[name]


@pytest.mark.parametrize("name", NON_EMBEDDING)
def test_as_many_outside_embedding_and_head_as_published(name):
    assert count_parameters(preset(name)).non_embedding == NON_EMBEDDING[name]


@pytest.mark.parametrize("name", GPT3_SIZES)
def test_gpt3_is_as_large_as_its_table_says(name):
    unit, count = GPT3_SIZES[name]
    assert round(count_parameters(preset(name)).total / unit) == count


def test_active_parameters_of_mixtures():
    # Jiang et al. 2024: "uses 13B active parameters"; exactly, all but six of eight experts a layer.
    assert count_parameters(preset("mixtral-8x7b")).active == 12_879_925_248
    # gpt-oss's model card counts the head but not the embedding: 3.61B and 5.13B.
    for name, billions in (("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)):
        parameters = count_parameters(preset(name))
        assert round((parameters.active - parameters.token_embedding) / 1e9, 2) == billions
    assert round(count_parameters(preset("qwen3-30b-a3b")).active / 1e9, 1) == 3.4  # "3.3B activated", rounded down
    assert round(count_parameters(preset("qwen3-235b-a22b")).active / 1e9) == 22


@pytest.mark.parametrize("name", CONFIG_JSON)
def test_as_many_parameters_as_transformers_class_has(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = AutoConfig.for_model(**CONFIG_JSON[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(preset(name)).total


@pytest.mark.parametrize("name", CONFIG_JSON)
def test_the_settings_are_those_of_the_published_file(name):
    from leftward.formats.hf import config_from_hf

    assert config_from_hf(CONFIG_JSON[name]) == preset(name)


def test_every_family_is_held_against_transformers():
    families = {name.partition("-")[0].partition(".")[0] for name in PRESETS}
    checked = {name.partition("-")[0].partition(".")[0] for name in CONFIG_JSON}
    assert families - checked == {"gpt3"}  # of which there is no class


def test_overrides_are_laid_over_and_what_follows_from_them_follows():
    config = preset("gpt2", n_layers=24, d_model=1024, n_heads=16)
    assert config == preset("gpt2-medium")
    assert preset("llama3-8b", max_seq_len=16) != preset("llama3-8b")


def test_gpt3_alternates_dense_and_banded_layers():
    config = preset("gpt3-175b")
    assert [config.is_local(layer) for layer in range(4)] == [False, True, False, True]
    assert config.window == 256


def test_longrope_has_a_divisor_for_each_pair():
    scaling = preset("phi-3-mini-128k").rope_scaling
    assert len(scaling.short_factors) == len(scaling.long_factors) == 48
    for factors in (scaling.short_factors, scaling.long_factors):
        assert sorted(factors) == list(factors)  # slower pairs are stretched more


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gtp2", "did you mean gpt2"), ("GPT2", "did you mean gpt2"), ("nothing", "plan --list"), ("", "plan --list")],
)
def test_an_unknown_name_is_told_the_nearest(name, hint):
    with pytest.raises(UserError, match=hint):
        preset(name)


def test_an_override_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match="unknown key n_layer: did you mean n_layers"):
        preset("gpt2", n_layer=3)
    with pytest.raises(UserError, match="d_model 768 is not divisible by n_heads 7"):
        preset("gpt2", n_heads=7)


def test_a_preset_cannot_be_changed_through_its_config():
    before = preset("llama3.1-8b")
    preset("llama3.1-8b").to_dict()["rope_scaling"]["factor"] = 1.0
    assert preset("llama3.1-8b") == before
