"""Presets: the architectures of published models, as rows of settings. Data only: no weights, no torch.

Settings are those of the config.json that was published with the weights, in our names (of the base model, where the
instruct model differs). A model that was never published (GPT-3) is as its paper prints it. A family's table holds
what its models share; a row, what sets each apart; fields that follow from others are left to Config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leftward.config import Config
from leftward.errors import UserError, nearest

Settings = dict[str, Any]


def preset(name: str, **overrides: Any) -> Config:
    """The Config of a published model, with `overrides` laid over it.

    Raises:
        UserError: no preset has this name, or the overrides don't fit.
    """
    return Config.from_dict({**preset_settings(name), **overrides})


def preset_settings(name: str) -> Settings:
    """The fields of Config that a published model sets. Raises: UserError, where no preset has this name."""
    if not isinstance(name, str) or name not in PRESETS:
        hint = nearest(str(name).lower(), PRESETS)
        hint = hint if hint.startswith("did you mean") else "`leftward plan --list` shows all"
        raise UserError(f"no preset is called {name!r}: {hint}")
    return dict(PRESETS[name])


def _models(family: Settings, columns: str, rows: Mapping[str, Sequence[Any]]) -> dict[str, Settings]:
    """Each row's values under the fields named in `columns`, and what stands behind those as a dict of its own."""
    names = columns.split()
    return {
        name: {**family, **dict(zip(names, row, strict=False)), **(row[len(names)] if len(row) > len(names) else {})}
        for name, row in rows.items()
    }


def _scaled_by_width(family: Settings, columns: str, rows: Mapping[str, Sequence[Any]]) -> dict[str, Settings]:
    """As `_models`, of a family that multiplies its embeddings by √d_model."""
    models = _models(family, columns, rows)
    return {name: {**settings, "embed_scale": settings["d_model"] ** 0.5} for name, settings in models.items()}


# ---- what families share

_WITHOUT_QK_NORM: Settings = {"qk_norm": "none"}
_EVERY_BIAS: Settings = {"qkv_bias": True, "attn_out_bias": True, "ff_bias": True}

# LayerNorm, a feed-forward without a gate and every bias, as the models that descend from GPT-2 have them.
_GPT: Settings = {**_WITHOUT_QK_NORM, **_EVERY_BIAS, "norm": "layernorm", "norm_eps": 1e-5, "feed_forward": "gelu_tanh"}
_GPT2: Settings = {**_GPT, "positions": "learned", "vocab_size": 50257, "max_seq_len": 1024, "dropout": 0.1}
_GPT3: Settings = {
    **_GPT,
    "positions": "learned",
    "vocab_size": 50257,
    "max_seq_len": 2048,
    # "Alternating dense and locally banded sparse attention patterns" (section 2.1). The paper prints neither the
    # band's width nor which kind comes first; these are those of GPT-Neo, EleutherAI's replication.
    "attention_pattern": "GL",
    "window": 256,
}
_NEOX: Settings = {**_GPT, "block": "parallel", "rope_fraction": 0.25, "tie_embeddings": False, "max_seq_len": 2048}
_OPT: Settings = {
    **_GPT,
    "positions": "learned",
    "position_offset": 2,
    "feed_forward": "relu",
    "vocab_size": 50272,
    "max_seq_len": 2048,
}
_BLOOM: Settings = {**_GPT, "positions": "alibi", "embed_norm": True, "vocab_size": 250_880, "max_seq_len": 2048}
_MPT: Settings = {
    **_WITHOUT_QK_NORM,
    "positions": "alibi_mpt",
    "norm": "layernorm",
    "norm_bias": False,
    "norm_eps": 1e-5,
    "feed_forward": "gelu",
    "vocab_size": 50432,
}
_FALCON: Settings = {
    **_WITHOUT_QK_NORM,
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "feed_forward": "gelu",
    "vocab_size": 65024,
    "max_seq_len": 2048,
}
_PHI: Settings = {
    **_GPT,
    "block": "parallel_shared",
    "tie_embeddings": False,
    "head_bias": True,
    "vocab_size": 51200,
    "max_seq_len": 2048,
}

_LLAMA: Settings = {**_WITHOUT_QK_NORM, "norm_eps": 1e-5, "tie_embeddings": False}
_LLAMA1: Settings = {**_LLAMA, "vocab_size": 32000, "max_seq_len": 2048, "norm_eps": 1e-6}
_LLAMA2: Settings = {**_LLAMA, "vocab_size": 32000, "max_seq_len": 4096}
_LLAMA3: Settings = {**_LLAMA, "vocab_size": 128_256, "max_seq_len": 8192, "rope_base": 500_000.0}


def _llama3_scaled(factor: float) -> Settings:
    scaling = {"kind": "llama3", "factor": factor, "original_max_seq_len": 8192}  # low and high factors: 1 and 4
    return {**_LLAMA3, "max_seq_len": 131_072, "rope_scaling": scaling}


_MIXTRAL: Settings = {**_LLAMA, "vocab_size": 32000, "rope_base": 1e6, "n_experts": 8, "n_experts_per_token": 2}
_SMOLLM2: Settings = {**_LLAMA, "tie_embeddings": True, "vocab_size": 49152, "max_seq_len": 8192}
_QWEN2: Settings = {**_WITHOUT_QK_NORM, "qkv_bias": True, "rope_base": 1e6}
_QWEN3: Settings = {
    "qk_norm": "per_head",
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_seq_len": 40960,
    "rope_base": 1e6,
}
_QWEN3_MOE: Settings = {**_QWEN3, "tie_embeddings": False, "n_experts": 128, "n_experts_per_token": 8}
_OLMO: Settings = {
    **_WITHOUT_QK_NORM,
    "norm": "layernorm",
    "norm_weight": "none",
    "norm_eps": 1e-5,
    "vocab_size": 50304,
    "max_seq_len": 2048,
}
_OLMO2: Settings = {
    "block": "output",
    "qk_norm": "whole",
    "tie_embeddings": False,
    "rope_base": 500_000.0,
    "vocab_size": 100_352,
    "max_seq_len": 4096,
}
_PHI3: Settings = {**_LLAMA, "vocab_size": 32064}

_GEMMA: Settings = {
    **_WITHOUT_QK_NORM,
    "norm_weight": "one_plus",
    "feed_forward": "geglu_tanh",
    "vocab_size": 256_000,
    "max_seq_len": 8192,
    "head_dim": 256,
}
_GEMMA2: Settings = {
    **_GEMMA,
    "block": "sandwich",
    "attention_pattern": "LG",
    "window": 4096,
    "attn_softcap": 50.0,
    "logit_softcap": 30.0,
}
_GEMMA3: Settings = {
    **_GEMMA,
    "block": "sandwich",
    "qk_norm": "per_head",
    "attention_pattern": "LLLLLG",
    "rope_base": 1e6,
    "rope_local_base": 10_000.0,
    "vocab_size": 262_144,
    "max_seq_len": 32768,
    "window": 512,
}
# The text model inside the ones that see: 64 more rows in the table for the tokens that stand for images.
_GEMMA3_LARGE: Settings = {
    **_GEMMA3,
    "vocab_size": 262_208,
    "max_seq_len": 131_072,
    "window": 1024,
    "rope_scaling": {"kind": "linear", "factor": 8.0},
}

_GPT_OSS: Settings = {
    **_LLAMA,
    **_EVERY_BIAS,
    "d_model": 2880,
    "n_heads": 64,
    "n_kv_heads": 8,
    "head_dim": 64,
    "d_ff": 2880,
    "n_experts_per_token": 4,
    "feed_forward": "swiglu_clamped",
    "attn_sinks": True,
    "attention_pattern": "LG",
    "window": 128,
    "vocab_size": 201_088,
    "max_seq_len": 131_072,
    "rope_base": 150_000.0,
    "rope_scaling": {"kind": "yarn", "factor": 32.0, "original_max_seq_len": 4096, "truncate": False},
}

# Phi-3-mini-128k's divisors (the config.json of June 2024), a pair each.
_PHI3_LONG = (
    *(1.0700000524520874, 1.1200000047683716, 1.149999976158142, 1.4199999570846558, 1.5699999332427979),
    *(1.7999999523162842, 2.129999876022339, 2.129999876022339, 3.009999990463257, 5.910000324249268),
    *(6.950000286102295, 9.070000648498535, 9.930000305175781, 10.710000038146973, 11.130000114440918),
    *(14.609999656677246, 15.409998893737793, 19.809999465942383, 37.279998779296875, 38.279998779296875),
    *(38.599998474121094, 40.12000274658203, 46.20000457763672, 50.940006256103516, 53.66000747680664),
    *(54.9373893737793, 56.89738845825195, 57.28738784790039, 59.98738479614258, 60.86738586425781),
    *(60.887386322021484, 61.71739196777344, 62.91739273071289, 62.957393646240234, 63.41739273071289),
    *(63.8173942565918, 63.83739471435547, 63.897396087646484, 63.93739700317383, 64.06739807128906),
    *(64.11434936523438, 64.12435150146484, 64.15435028076172, 64.19435119628906, 64.24435424804688),
    *(64.57435607910156, 64.69000244140625, 64.76000213623047),
)
_PHI3_SHORT = (
    *(1.1, 1.1, 1.1, 1.3000000000000003, 1.3500000000000003, 1.3500000000000003, 1.4000000000000004),
    *(1.5500000000000005, *[2.000000000000001] * 17, *[2.0500000000000007] * 6, *[2.1000000000000005] * 2),
    *(2.1500000000000004, *[2.25] * 5, 2.3999999999999995, 2.4499999999999993, 2.499999999999999),
    *(2.6999999999999984, 2.6999999999999984, 2.7499999999999982, 2.799999999999998, 2.8999999999999977),
    3.049999999999997,
)

# ---- the models

PRESETS: dict[str, Settings] = {
    # Radford et al. 2018, "Improving language understanding by generative pre-training"
    **_models(
        {**_GPT2, "block": "post", "vocab_size": 40478, "max_seq_len": 512},
        "n_layers d_model n_heads",
        {"gpt1": (12, 768, 12)},
    ),
    # Radford et al. 2019, "Language models are unsupervised multitask learners"
    **_models(
        _GPT2,
        "n_layers d_model n_heads",
        {
            "gpt2": (12, 768, 12),
            "gpt2-medium": (24, 1024, 16),
            "gpt2-large": (36, 1280, 20),
            "gpt2-xl": (48, 1600, 25),
        },
    ),
    # Brown et al. 2020, arXiv 2005.14165, table 2.1. Of 1.3B the table prints 24 heads of 128, which is not the width
    # 2048, and with which it would have 1.5B; 16 heads give 1.3B. 13B is 5140 wide with 40 heads of 128, as printed.
    **_models(
        _GPT3,
        "n_layers d_model n_heads head_dim",
        {
            "gpt3-125m": (12, 768, 12, 64),
            "gpt3-350m": (24, 1024, 16, 64),
            "gpt3-760m": (24, 1536, 16, 96),
            "gpt3-1.3b": (24, 2048, 16, 128),
            "gpt3-2.7b": (32, 2560, 32, 80),
            "gpt3-6.7b": (32, 4096, 32, 128),
            "gpt3-13b": (40, 5140, 40, 128, {"d_ff": 4 * 5140}),
            "gpt3-175b": (96, 12288, 96, 128),
        },
    ),
    # Wang and Komatsuzaki 2021
    **_models(
        {
            **_GPT,
            "block": "parallel_shared",
            "qkv_bias": False,
            "attn_out_bias": False,
            "rope_fraction": 0.25,
            "rope_pairing": "adjacent",
            "tie_embeddings": False,
            "head_bias": True,
            "vocab_size": 50400,
            "max_seq_len": 2048,
        },
        "n_layers d_model n_heads",
        {"gpt-j-6b": (28, 4096, 16)},
    ),
    # Black et al. 2022, arXiv 2204.06745
    **_models(_NEOX, "vocab_size n_layers d_model n_heads", {"gpt-neox-20b": (50432, 44, 6144, 64)}),
    # Biderman et al. 2023, arXiv 2304.01373
    **_models(
        {**_NEOX, "feed_forward": "gelu"},
        "vocab_size n_layers d_model n_heads",
        {
            "pythia-14m": (50304, 6, 128, 4),
            "pythia-31m": (50304, 6, 256, 8),
            "pythia-70m": (50304, 6, 512, 8),
            "pythia-160m": (50304, 12, 768, 12),
            "pythia-410m": (50304, 24, 1024, 16),
            "pythia-1b": (50304, 16, 2048, 8),
            "pythia-1.4b": (50304, 24, 2048, 16),
            "pythia-2.8b": (50304, 32, 2560, 32),
            "pythia-6.9b": (50432, 32, 4096, 32),
            "pythia-12b": (50688, 36, 5120, 40),
        },
    ),
    # Zhang et al. 2022, arXiv 2205.01068. The 350M is another architecture (post-norm, an embedding half as wide as the
    # model behind a projection), which no Config says.
    **_models(
        _OPT,
        "n_layers d_model n_heads",
        {
            "opt-125m": (12, 768, 12),
            "opt-1.3b": (24, 2048, 32),
            "opt-2.7b": (32, 2560, 32),
            "opt-6.7b": (32, 4096, 32),
            "opt-13b": (40, 5120, 40),
            "opt-30b": (48, 7168, 56),
            "opt-66b": (64, 9216, 72),
        },
    ),
    # BigScience 2022, arXiv 2211.05100
    **_models(
        _BLOOM,
        "n_layers d_model n_heads",
        {
            "bloom-560m": (24, 1024, 16),
            "bloom-1b1": (24, 1536, 16),
            "bloom-1b7": (24, 2048, 16),
            "bloom-3b": (30, 2560, 32),
            "bloom-7b1": (30, 4096, 32),
            "bloom-176b": (70, 14336, 112),
        },
    ),
    # MosaicML 2023
    **_models(
        _MPT,
        "n_layers d_model n_heads max_seq_len",
        {"mpt-7b": (32, 4096, 32, 2048), "mpt-30b": (48, 7168, 64, 8192)},
    ),
    # Almazrouei et al. 2023, arXiv 2311.16867
    **_models(
        _FALCON,
        "n_layers d_model n_heads n_kv_heads block",
        {"falcon-7b": (32, 4544, 71, 1, "parallel_shared"), "falcon-40b": (60, 8192, 128, 8, "parallel")},
    ),
    # Touvron et al. 2023, arXiv 2302.13971
    **_models(
        _LLAMA1,
        "n_layers d_model n_heads d_ff",
        {
            "llama-7b": (32, 4096, 32, 11008),
            "llama-13b": (40, 5120, 40, 13824),
            "llama-30b": (60, 6656, 52, 17920),
            "llama-65b": (80, 8192, 64, 22016, {"norm_eps": 1e-5}),
        },
    ),
    # Touvron et al. 2023, arXiv 2307.09288
    **_models(
        _LLAMA2,
        "n_layers d_model n_heads n_kv_heads d_ff",
        {
            "llama2-7b": (32, 4096, 32, 32, 11008),
            "llama2-13b": (40, 5120, 40, 40, 13824),
            "llama2-70b": (80, 8192, 64, 8, 28672),
        },
    ),
    # Dubey et al. 2024, arXiv 2407.21783
    **_models(
        _LLAMA3,
        "n_layers d_model n_heads n_kv_heads d_ff",
        {"llama3-8b": (32, 4096, 32, 8, 14336), "llama3-70b": (80, 8192, 64, 8, 28672)},
    ),
    **_models(
        _llama3_scaled(8.0),
        "n_layers d_model n_heads n_kv_heads d_ff",
        {
            "llama3.1-8b": (32, 4096, 32, 8, 14336),
            "llama3.1-70b": (80, 8192, 64, 8, 28672),
            "llama3.1-405b": (126, 16384, 128, 8, 53248),
        },
    ),
    **_models(
        {**_llama3_scaled(32.0), "tie_embeddings": True},
        "n_layers d_model n_heads n_kv_heads d_ff",
        {"llama3.2-1b": (16, 2048, 32, 8, 8192), "llama3.2-3b": (28, 3072, 24, 8, 8192)},
    ),
    # Zhang et al. 2024, arXiv 2401.02385
    **_models(
        {**_LLAMA1, "norm_eps": 1e-5},
        "n_layers d_model n_heads n_kv_heads d_ff",
        {"tinyllama-1.1b": (22, 2048, 32, 4, 5632)},
    ),
    # Jiang et al. 2023, arXiv 2310.06825 (v0.1)
    **_models(
        {**_LLAMA, "vocab_size": 32000, "max_seq_len": 32768, "window": 4096},
        "n_layers d_model n_heads n_kv_heads d_ff",
        {"mistral-7b": (32, 4096, 32, 8, 14336)},
    ),
    # Jiang et al. 2024, arXiv 2401.04088 (v0.1)
    **_models(
        _MIXTRAL,
        "n_layers d_model n_heads n_kv_heads d_ff max_seq_len",
        {"mixtral-8x7b": (32, 4096, 32, 8, 14336, 32768), "mixtral-8x22b": (56, 6144, 48, 8, 16384, 65536)},
    ),
    # Gemma Team 2024, arXiv 2403.08295
    **_scaled_by_width(
        _GEMMA,
        "n_layers d_model n_heads n_kv_heads d_ff",
        {
            "gemma-2b": (18, 2048, 8, 1, 16384),
            "gemma-7b": (28, 3072, 16, 16, 24576),
        },
    ),
    # Gemma Team 2024, arXiv 2408.00118. Of the 27B, scores are divided by √(d_model / n_heads), not by √head_dim.
    **_scaled_by_width(
        _GEMMA2,
        "n_layers d_model n_heads n_kv_heads d_ff",
        {
            "gemma2-2b": (26, 2304, 8, 4, 9216),
            "gemma2-9b": (42, 3584, 16, 8, 14336),
            "gemma2-27b": (46, 4608, 32, 16, 36864, {"head_dim": 128, "attn_scale": 144**-0.5}),
        },
    ),
    # Gemma Team 2025, arXiv 2503.19786
    **_scaled_by_width(
        _GEMMA3,
        "n_layers d_model n_heads n_kv_heads d_ff",
        {
            "gemma3-270m": (18, 640, 4, 1, 2048),
            "gemma3-1b": (26, 1152, 4, 1, 6912),
        },
    ),
    **_scaled_by_width(
        _GEMMA3_LARGE,
        "n_layers d_model n_heads n_kv_heads d_ff",
        {
            "gemma3-4b": (34, 2560, 8, 4, 10240),
            "gemma3-12b": (48, 3840, 16, 8, 15360),
            "gemma3-27b": (62, 5376, 32, 16, 21504, {"head_dim": 128, "attn_scale": 168**-0.5}),
        },
    ),
    # Qwen Team 2024, arXiv 2412.15115
    **_models(
        _QWEN2,
        "n_layers d_model n_heads n_kv_heads d_ff vocab_size max_seq_len tie_embeddings norm_eps",
        {
            "qwen2.5-0.5b": (24, 896, 14, 2, 4864, 151_936, 32768, True, 1e-6),
            "qwen2.5-1.5b": (28, 1536, 12, 2, 8960, 151_936, 131_072, True, 1e-6),
            "qwen2.5-3b": (36, 2048, 16, 2, 11008, 151_936, 32768, True, 1e-6),
            "qwen2.5-7b": (28, 3584, 28, 4, 18944, 152_064, 131_072, False, 1e-6),
            "qwen2.5-14b": (48, 5120, 40, 8, 13824, 152_064, 131_072, False, 1e-5),
            "qwen2.5-32b": (64, 5120, 40, 8, 27648, 152_064, 131_072, False, 1e-5),
            "qwen2.5-72b": (80, 8192, 64, 8, 29568, 152_064, 131_072, False, 1e-5),
        },
    ),
    # Yang et al. 2025, arXiv 2505.09388
    **_models(
        _QWEN3,
        "n_layers d_model n_heads n_kv_heads d_ff tie_embeddings",
        {
            "qwen3-0.6b": (28, 1024, 16, 8, 3072, True),
            "qwen3-1.7b": (28, 2048, 16, 8, 6144, True),
            "qwen3-4b": (36, 2560, 32, 8, 9728, True),
            "qwen3-8b": (36, 4096, 32, 8, 12288, False),
            "qwen3-14b": (40, 5120, 40, 8, 17408, False),
            "qwen3-32b": (64, 5120, 64, 8, 25600, False),
        },
    ),
    **_models(
        _QWEN3_MOE,
        "n_layers d_model n_heads n_kv_heads d_ff",
        {"qwen3-30b-a3b": (48, 2048, 32, 4, 768), "qwen3-235b-a22b": (94, 4096, 64, 4, 1536)},
    ),
    # Li et al. 2023, arXiv 2309.05463; Javaheripi et al. 2023, "Phi-2: the surprising power of small language models"
    **_models(
        _PHI,
        "n_layers d_model n_heads rope_fraction",
        {"phi-1.5": (24, 2048, 32, 0.5), "phi-2": (32, 2560, 32, 0.4)},
    ),
    # Abdin et al. 2024, arXiv 2404.14219. The window of the 128k is longer than its context, and so none.
    **_models(
        _PHI3,
        "n_layers d_model n_heads d_ff max_seq_len",
        {
            "phi-3-mini": (32, 3072, 32, 8192, 4096, {"window": 2047}),
            "phi-3-mini-128k": (
                *(32, 3072, 32, 8192, 131_072),
                {
                    "rope_scaling": {
                        "kind": "longrope",
                        "original_max_seq_len": 4096,
                        "short_factors": _PHI3_SHORT,
                        "long_factors": _PHI3_LONG,
                    }
                },
            ),
        },
    ),
    # Abdin et al. 2024, arXiv 2412.08905
    **_models(
        {**_PHI3, "vocab_size": 100_352, "rope_base": 250_000.0},
        "n_layers d_model n_heads n_kv_heads d_ff max_seq_len",
        {"phi-4": (40, 5120, 40, 10, 17920, 16384)},
    ),
    # Groeneveld et al. 2024, arXiv 2402.00838
    **_models(
        _OLMO,
        "n_layers d_model n_heads d_ff tie_embeddings",
        {"olmo-1b": (16, 2048, 16, 8192, True), "olmo-7b": (32, 4096, 32, 11008, False)},
    ),
    # OLMo Team 2025, arXiv 2501.00656
    **_models(
        _OLMO2,
        "n_layers d_model n_heads n_kv_heads d_ff",
        {
            "olmo2-1b": (16, 2048, 16, 16, 8192),
            "olmo2-7b": (32, 4096, 32, 32, 11008),
            "olmo2-13b": (40, 5120, 40, 40, 13824),
            "olmo2-32b": (64, 5120, 40, 8, 27648),
        },
    ),
    # Allal et al. 2025, arXiv 2502.02737
    **_models(
        _SMOLLM2,
        "n_layers d_model n_heads n_kv_heads d_ff rope_base",
        {
            "smollm2-135m": (30, 576, 9, 3, 1536, 100_000.0),
            "smollm2-360m": (32, 960, 15, 5, 2560, 100_000.0),
            "smollm2-1.7b": (24, 2048, 32, 32, 8192, 130_000.0),
        },
    ),
    # Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context reasoner"
    **_models(
        {
            **_WITHOUT_QK_NORM,
            "position_pattern": "PPPN",
            "rope_base": 5e6,
            "vocab_size": 128_256,
            "max_seq_len": 65536,
        },
        "n_layers d_model n_heads n_kv_heads d_ff",
        {"smollm3-3b": (36, 2048, 16, 4, 11008)},
    ),
    # OpenAI 2025, arXiv 2508.10925
    **_models(_GPT_OSS, "n_layers n_experts", {"gpt-oss-20b": (24, 32), "gpt-oss-120b": (36, 128)}),
}
