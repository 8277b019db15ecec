"""Norms: the worked example, transformers' variants, fp32 statistics, and the gradient written by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from gradients import gradients
from leftward.model.norms import LayerNorm, RMSNorm, rms_norm


def test_norms_of_the_worked_example() -> None:
    # seeds/001, at scale 5
    x = torch.tensor([4, -6, 1.5, 10.5, -2.5, 8, -4.5, 2])
    layer = [0.44, -1.40, -0.02, 1.63, -0.76, 1.17, -1.12, 0.07]
    root_mean_square = [0.703, -1.054, 0.264, 1.845, -0.439, 1.406, -0.791, 0.351]
    torch.testing.assert_close(LayerNorm(8, 1e-5)(x), torch.tensor(layer), atol=0.005, rtol=0)
    torch.testing.assert_close(RMSNorm(8, 1e-5)(x), torch.tensor(root_mean_square), atol=0.0005, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_plus_is_gemmas_norm(dtype: torch.dtype) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    torch.manual_seed(0)
    ours, theirs = RMSNorm(64, 1e-6, "one_plus").to(dtype), Gemma2RMSNorm(64, 1e-6).to(dtype)
    weight = torch.randn(64).to(dtype) * 0.01
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
        x = torch.randn(5, 64).to(dtype)
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-6 if dtype == torch.float32 else 0, rtol=0)


def test_layer_norms_without_weights_or_bias() -> None:
    from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

    torch.manual_seed(0)
    x = torch.randn(5, 64)
    torch.testing.assert_close(LayerNorm(64, 1e-5, "none", bias=False)(x), OlmoLayerNorm(64)(x))
    assert not list(LayerNorm(64, 1e-5, "none", bias=False).parameters())
    norm = LayerNorm(64, 1e-5, bias=False)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    with torch.no_grad():
        norm.weight.uniform_()
    torch.testing.assert_close(norm(x), F.layer_norm(x, (64,), norm.weight, None, 1e-5))


def test_layer_norm_one_plus() -> None:
    torch.manual_seed(0)
    norm, x = LayerNorm(16, 1e-5, "one_plus"), torch.randn(3, 16)
    with torch.no_grad():
        norm.weight.uniform_()
        norm.bias.uniform_()
    torch.testing.assert_close(norm(x), F.layer_norm(x, (16,)) * (1 + norm.weight) + norm.bias)


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
    for mine, autograds in zip(gradients(ours, [x, weight]), gradients(plain, [x, weight]), strict=True):
        torch.testing.assert_close(mine, autograds)


@pytest.mark.parametrize("kind", ["plain", "one_plus", "none"])
def test_the_statistics_of_a_bf16_norm_are_fp32(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 512).bfloat16()
    norm = RMSNorm(512, 1e-6, kind).bfloat16()  # type: ignore[arg-type]
    if kind == "one_plus":
        torch.nn.init.zeros_(norm.weight)
    exact = F.rms_norm(x.double(), (512,), eps=1e-6)
    for requires_grad in (False, True):
        ours = norm(x.clone().requires_grad_(requires_grad))
        assert ours.dtype == torch.bfloat16
        # One rounding, of half a unit in the last place: 2^-9 of the number, and 2^-8 at most.
        torch.testing.assert_close(ours.double(), exact, atol=0, rtol=2**-8)
    naive = x * (x.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
    assert not torch.allclose(naive.double(), exact, atol=0, rtol=2**-8)
