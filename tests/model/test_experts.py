"""Mixtures of experts against transformers' Mixtral, Qwen 3 MoE and gpt-oss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from leftward import Config
from leftward.model.decoder import Decoder
from leftward.model.experts import Experts
from random_models import random_decoder, random_ids

SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "d_model": 16,
    "n_heads": 2,
    "d_ff": 24,
    "n_experts": 5,
    "n_experts_per_token": 2,
    "n_layers": 2,
}


def experts(**values: Any) -> tuple[Experts, torch.Tensor]:
    module = random_decoder(Config(**{**SMALL, **values}), std=0.3).blocks[0].ff
    assert isinstance(module, Experts)
    return module, torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1))


def test_mixtral() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    ours, x = experts()
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=5, num_experts_per_tok=2)
    theirs = MixtralSparseMoeBlock(config)
    theirs.load_state_dict(
        {
            "gate.weight": ours.router.weight,
            "experts.gate_up_proj": ours.up.weight,
            "experts.down_proj": ours.down.weight,
        }
    )
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normalised", [True, False])
def test_qwen3(normalised: bool) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    ours, x = experts(router_normalised=normalised, n_experts_per_token=3)
    theirs = Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            hidden_size=16, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=3, norm_topk_prob=normalised
        )
    )
    theirs.load_state_dict(
        {
            "gate.weight": ours.router.weight,
            "experts.gate_up_proj": ours.up.weight,
            "experts.down_proj": ours.down.weight,
        }
    )
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_gpt_oss() -> None:
    """Biases everywhere, and a clamped activation; transformers interleaves gate and up, and keeps [in, out]."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    ours, x = experts(feed_forward="swiglu_clamped", ff_bias=True)
    config = GptOssConfig(hidden_size=16, intermediate_size=24, num_local_experts=5, num_experts_per_tok=2)
    theirs = GptOssMLP(config)
    interleave = torch.arange(48).view(2, 24).T.flatten()
    theirs.load_state_dict(
        {
            "router.weight": ours.router.weight,
            "router.bias": ours.router.bias,
            "experts.gate_up_proj": ours.up.weight[:, interleave].mT,
            "experts.gate_up_proj_bias": ours.up.bias[:, interleave],  # type: ignore[index]
            "experts.down_proj": ours.down.weight.mT,
            "experts.down_proj_bias": ours.down.bias,
        }
    )
    for scale in (1.0, 40.0):  # where nothing is clamped, and where much is
        torch.testing.assert_close(ours(scale * x), theirs(scale * x)[0], atol=1e-3, rtol=1e-4)


def test_the_balance_loss_is_transformers_over_top_k() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    ours, x = experts()
    ours.train()(x)
    theirs = load_balancing_loss_func((ours.router(x).flatten(0, 1),), num_experts=5, top_k=2)
    torch.testing.assert_close(ours.balance_loss, theirs / 2)


def test_the_balance_loss_ranges_from_even_to_one_for_all() -> None:
    config = Config(**{**SMALL, "router_normalised": False, "n_experts_per_token": 1})
    decoder = Decoder(config).train()
    with pytest.raises(ValueError, match="has not run in training mode"):
        decoder.balance_loss()
    ids = random_ids(config, 4, 16)
    decoder(ids)
    assert decoder.balance_loss().item() == pytest.approx(1.0, abs=0.1)  # a fresh router is about even
    with torch.no_grad():
        for block in decoder.blocks:
            block.ff.router.weight.zero_()
            block.ff.router.weight[3] = 100.0
            block.attn_norm.weight.fill_(0.0)
            block.ff_norm.weight.fill_(1.0)
        decoder.embed.weight.abs_()
    decoder(ids)
    assert decoder.balance_loss().item() == pytest.approx(5.0, abs=0.01)  # n_experts
    with pytest.raises(ValueError, match="no experts"):
        Decoder(Config(vocab_size=5)).train().balance_loss()


def test_the_shared_expert_is_added_for_every_token() -> None:
    with_shared, x = experts(d_shared=12)
    assert with_shared.shared is not None
    shared = with_shared.shared(x)
    both = with_shared(x)
    with_shared.shared = None
    torch.testing.assert_close(both, with_shared(x) + shared)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    ours, x = experts()
    torch.testing.assert_close(ours(x)[:1, :3], ours(x[:1, :3]), atol=1e-6, rtol=1e-5)
