"""The optimizer against PyTorch's own, and its groups."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from leftward import Config, Decoder
from leftward.training.optim import Optimizer, muon, orthogonalise, parameter_groups
from leftward.training.recipe import OptimizerSection

CONFIG = Config(vocab_size=11, n_layers=2, d_model=16, n_heads=2, max_seq_len=8, norm="layernorm", qkv_bias=True)


def fill_gradients(module, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_each_parameter_is_in_exactly_one_group():
    for tied in (True, False):
        decoder = Decoder(Config(**{**CONFIG.to_dict(), "tie_embeddings": tied, "positions": "learned"}))
        groups = parameter_groups(decoder)
        names = [name for group in groups.values() for name in group]
        assert sorted(names) == sorted(name for name, _ in decoder.named_parameters())
        assert all(".norm" not in n and "_norm" not in n and not n.endswith("bias") for n in groups["matrices"])
        assert not any("embed" in n or "head" in n for n in groups["matrices"])


@pytest.mark.parametrize("shape", [(32, 16), (16, 48), (16, 16)])
def test_muon_is_the_one_of_pytorch(shape):
    torch.manual_seed(0)
    ours = [torch.randn(shape) for _ in range(3)]
    theirs = [nn.Parameter(tensor.clone()) for tensor in ours]
    buffers = [torch.zeros(shape) for _ in range(3)]
    oracle = torch.optim.Muon(theirs, lr=0.02, momentum=0.9, weight_decay=0.1)
    for _ in range(5):
        grads = [torch.randn(shape) for _ in range(3)]
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.clone()
        muon(ours, grads, buffers, lr=0.02, momentum=0.9, weight_decay=0.1, dtype=torch.bfloat16)
        oracle.step()
    for a, b in zip(ours, theirs, strict=True):
        # the bf16 iteration rounds differently in a batch; a step moves weights by about lr · √max(1, r/c)
        torch.testing.assert_close(a, b.detach(), atol=2e-3, rtol=0)


def test_adamw_is_the_one_of_pytorch():
    torch.manual_seed(0)
    decoder, other = Decoder(CONFIG), Decoder(CONFIG)
    other.load_state_dict(decoder.state_dict())
    settings = OptimizerSection(name="adamw", adamw_lr=0.01, weight_decay=0.1, betas=[0.8, 0.9], grad_clip=0.0)
    optimizer = Optimizer(decoder, settings, torch.float32)
    named, matrices = dict(other.named_parameters()), parameter_groups(other)["matrices"]
    oracle = torch.optim.AdamW(
        [
            {"params": [named[name] for name in matrices], "weight_decay": 0.1},
            {"params": [p for name, p in named.items() if name not in matrices], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.8, 0.9),
    )
    for seed in range(4):
        fill_gradients(decoder, seed)
        fill_gradients(other, seed)
        optimizer.accumulate()
        optimizer.step(1.0)
        oracle.step()
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter, named[name], atol=1e-6, rtol=1e-5, msg=name)


def test_no_compiler_is_loaded():
    script = (
        "import sys, torch\n"
        "from leftward import Config, Decoder\n"
        "from leftward.training.optim import Optimizer\n"
        "from leftward.training.recipe import OptimizerSection\n"
        "decoder = Decoder(Config(vocab_size=8, n_layers=1, d_model=8, n_heads=1))\n"
        "optimizer = Optimizer(decoder, OptimizerSection(), torch.float32)\n"
        "decoder(torch.zeros(1, 2, dtype=torch.long)).sum().backward()\n"
        "optimizer.accumulate()\n"
        "optimizer.step(1.0)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_orthogonalise_flattens_the_singular_values():
    torch.manual_seed(0)
    for shape in [(3, 24, 40), (2, 40, 24)]:
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.6 and values.max() < 1.3


def test_every_expert_is_a_matrix_of_its_own():
    torch.manual_seed(0)
    weights, grads = torch.randn(2, 3, 8, 12)  # three experts
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "dtype": torch.float32}
    stacked = weights.clone()
    muon([stacked], [grads], [torch.zeros_like(grads)], **settings)
    for expert in range(3):
        alone = weights[expert].clone()
        muon([alone], [grads[expert]], [torch.zeros(8, 12)], **settings)
        torch.testing.assert_close(stacked[expert], alone)


def test_the_groups_of_every_variant():
    config = Config(
        vocab_size=8, d_model=16, n_heads=2, n_layers=1, n_experts=2, d_shared=4, ff_bias=True, attn_sinks=True
    )
    groups = parameter_groups(Decoder(config))
    assert {"blocks.0.ff.up.weight", "blocks.0.ff.router.weight", "blocks.0.ff.shared.up.weight"} <= {
        *groups["matrices"]
    }
    # neither decays nor is orthogonalised, although the biases of experts are stacked
    assert {"blocks.0.ff.up.bias", "blocks.0.attn.sinks", "blocks.0.attn.q_norm.weight"} <= {*groups["vectors"]}


def test_a_zero_gradient_moves_nothing():
    assert orthogonalise(torch.zeros(1, 4, 8)).abs().max() == 0


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_one_adamw_step_by_hand(name):
    # the first AdamW step moves every element by lr against its gradient's sign
    torch.manual_seed(0)
    decoder = Decoder(CONFIG)
    before = decoder.embed.weight.detach().clone()
    optimizer = Optimizer(decoder, OptimizerSection(name=name, adamw_lr=0.01, grad_clip=0.0), torch.float32)
    fill_gradients(decoder, 1)
    sign = decoder.embed.weight.grad.sign()
    optimizer.accumulate()
    optimizer.step(0.5)
    torch.testing.assert_close(decoder.embed.weight.detach(), before - 0.5 * 0.01 * sign, atol=1e-6, rtol=0)


def test_only_matrices_decay():
    torch.manual_seed(0)
    decoder = Decoder(CONFIG)
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    optimizer = Optimizer(decoder, OptimizerSection(name="adamw", adamw_lr=0.1, weight_decay=0.5), torch.float32)
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.accumulate()
    optimizer.step(1.0)
    matrices = parameter_groups(decoder)["matrices"]
    for name, parameter in decoder.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if name in matrices else before[name]
        torch.testing.assert_close(parameter.detach(), expected, msg=name)


def test_clipping_bounds_the_whole_gradient():
    decoder = Decoder(CONFIG)
    optimizer = Optimizer(decoder, OptimizerSection(name="adamw", grad_clip=1.0), torch.float32)
    fill_gradients(decoder, 1)
    expected = torch.cat([p.grad.flatten() for p in decoder.parameters()]).norm().item()
    optimizer.accumulate()
    assert optimizer.grad_norm() == pytest.approx(expected, rel=1e-5)
    optimizer.step(1.0)
    average = optimizer.state()["exp_avg.embed.weight"]  # 0.1 · the clipped gradient
    assert torch.cat([average.flatten()]).norm() <= 0.1 + 1e-6


def test_bf16_weights_are_rounded_masters_and_gradients_add_in_fp32():
    torch.manual_seed(0)
    decoder = Decoder(CONFIG)
    optimizer = Optimizer(decoder, OptimizerSection(), torch.bfloat16)
    assert decoder.head.weight is decoder.embed.weight and decoder.embed.weight.dtype == torch.bfloat16
    for seed in range(3):
        fill_gradients(decoder, seed)
        optimizer.accumulate()
    name = "blocks.0.ff.up.weight"
    grads = []
    for seed in range(3):
        fill_gradients(decoder, seed)
        grads.append(dict(decoder.named_parameters())[name].grad.float())
    torch.testing.assert_close(optimizer.grads[name], sum(grads))
    optimizer.step(1.0)
    for name, working in decoder.named_parameters():
        assert torch.equal(working, optimizer.masters[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_optimizer_goes_on_bit_for_bit(name, dtype):
    settings = OptimizerSection(name=name)

    def steps(optimizer, decoder, seeds):
        for seed in seeds:
            fill_gradients(decoder, seed)
            optimizer.accumulate()
            optimizer.step(1.0)

    torch.manual_seed(0)
    decoder = Decoder(CONFIG)
    optimizer = Optimizer(decoder, settings, dtype)
    steps(optimizer, decoder, range(3))
    weights = {k: v.clone() for k, v in optimizer.weights().items()}
    state = {k: v.clone() for k, v in optimizer.state().items()}
    steps(optimizer, decoder, range(3, 6))

    other_decoder = Decoder(CONFIG)
    other = Optimizer(other_decoder, settings, dtype)
    other.restore(weights, state)
    steps(other, other_decoder, range(3, 6))
    for name, tensor in optimizer.weights().items():
        assert torch.equal(tensor, other.weights()[name]), name
