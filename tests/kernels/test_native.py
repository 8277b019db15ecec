"""Each kernel against its twin in PyTorch's own operations: values and gradients, in fp32 and bf16."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from leftward import Config, Decoder
from leftward.kernels import functions, native
from leftward.model.feedforward import swiglu
from leftward.model.norms import rms_norm
from leftward.training.loss import head_loss, loss_sum
from leftward.training.optim import adamw
from random_models import random_decoder, random_ids

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
both = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with native.in_use() as which:
        if which != "native":
            pytest.skip(f"no native kernels here: {which}")
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def check(ours: Callable[..., Any], plain: Callable[..., Any], inputs: list[Tensor], dtype: torch.dtype) -> None:
    """The same outputs and gradients; the plain function computes in fp32, and in no kernel of ours."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = ours(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    grads_out = [random(*tensor.shape, dtype=tensor.dtype, seed=7) for tensor in outs]
    grads = torch.autograd.grad(outs, leaves, grads_out)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    expected = plain(*exact)
    expected = expected if isinstance(expected, tuple) else (expected,)
    expected_grads = torch.autograd.grad(expected, exact, [grad.double() for grad in grads_out])
    for got, wanted in zip((*outs, *grads), (*expected, *expected_grads), strict=True):
        assert got.shape == wanted.shape
        error = (got.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9)
        assert error < TOLERANCE[dtype], (got.shape, float(error))


@both
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 50, 24), (2, 70, 257)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inputs = [random(*shape, dtype=dtype), 1 + 0.3 * random(shape[-1], dtype=dtype, seed=1)]
    check(
        lambda x, w: functions.rms_norm(x, w, 1e-6),
        lambda x, w: w * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
        inputs,
        dtype,
    )


@both
@pytest.mark.parametrize("width", [1, 37, 64])
def test_swiglu(dtype: torch.dtype, width: int) -> None:
    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gate / (1 + (-gate).exp()) * up

    check(functions.swiglu, plain, [6 * random(5, 9, 2 * width, dtype=dtype)], dtype)


@both
def test_large_gates_are_no_trouble(dtype: torch.dtype) -> None:
    x = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]], dtype=dtype)
    torch.testing.assert_close(functions.swiglu(x), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]], dtype=dtype))
    assert functions.swiglu(torch.full((1, 2), float("nan"), dtype=dtype)).isnan().all()


@both
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rope_dim", [0, 8, 16])
@pytest.mark.parametrize("rows", [1, 3])
def test_split_heads(dtype: torch.dtype, normed: bool, rope_dim: int, rows: int) -> None:
    batch, length, heads, kv, head_dim = 3, 45, 4, 2, 16
    turn = random(rows, length, 1, rope_dim // 2)
    cos, sin = torch.cat((turn.cos(), turn.cos()), dim=-1), torch.cat((-turn.sin(), turn.sin()), dim=-1)

    def plain(qkv: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv, kv), dim=2)
        parts = []
        for part, factor in zip((q, k), factors or (None, None), strict=True):
            if factor is not None:
                part = factor * part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            turned, rest = part[..., :rope_dim], part[..., rope_dim:]
            first, second = turned.chunk(2, dim=-1)
            c, s = turn.double().cos(), turn.double().sin()
            parts.append(torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1).transpose(1, 2))
        return (*parts, v.transpose(1, 2))

    def ours(qkv: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        angles = (cos, sin) if rope_dim else None
        return functions.split_heads(qkv, heads, kv, factors or None, 1e-5, angles)  # type: ignore[arg-type]

    inputs = [random(batch, length, (heads + 2 * kv) * head_dim, dtype=dtype)]
    inputs += [1 + 0.3 * random(head_dim, dtype=dtype, seed=s) for s in (1, 2)] * normed
    check(ours, plain, inputs, dtype)


@both
@pytest.mark.parametrize(("heads", "kv", "length"), [(4, 4, 1), (4, 2, 33), (6, 1, 80)])
def test_causal_attention(dtype: torch.dtype, heads: int, kv: int, length: int) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)

    inputs = [random(2, n, length, 16, dtype=dtype, seed=n) for n in (heads, kv, kv)]
    check(lambda q, k, v: functions.causal_attention(q, k, v, 0.3), plain, inputs, dtype)


@both
def test_the_loss_of_the_head_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leftward.planner.LOGITS_AT_ONCE", 61 * 7)
    config = Config(vocab_size=61, max_seq_len=16, n_layers=1, d_model=32, n_heads=2)
    decoder = random_decoder(config, std=0.3)
    ids = random_ids(config, 3, 17)
    targets = ids[:, 1:].clone()
    targets[0, 3:6] = -100
    hidden = random(3, 16, 32)
    expected = loss_sum(decoder.logits(hidden.requires_grad_()), targets) / 5
    wanted = torch.autograd.grad(expected, (hidden, decoder.head.weight))
    decoder, hidden = decoder.to(dtype), hidden.detach().to(dtype).requires_grad_()
    loss = head_loss(decoder, hidden, targets, 5)
    got = torch.autograd.grad(loss, (hidden, decoder.head.weight))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(loss, expected, atol=0, rtol=tolerance)
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours.float() - theirs).abs().max() / theirs.abs().max() < tolerance


@both
def test_adamw(dtype: torch.dtype) -> None:
    parameters = [random(n, seed=n) for n in (1, 33, 5000)]
    oracle = [tensor.clone().requires_grad_() for tensor in parameters]
    optimizer = torch.optim.AdamW(oracle, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    averages, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    steps = [torch.zeros(()) for _ in parameters]
    copies = [p.to(dtype) for p in parameters] if dtype == torch.bfloat16 else None
    for turn in range(3):
        grads = [random(len(p), dtype=dtype, seed=turn) for p in parameters]
        for theirs, grad in zip(oracle, grads, strict=True):
            theirs.grad = grad.float() * 0.5
        optimizer.step()
        settings = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1, "grad_scale": 0.5}
        adamw(parameters, grads, averages, squares, steps, copies=copies, **settings)
    for ours, theirs in zip(parameters, oracle, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), atol=1e-6, rtol=1e-5)
    for ours, copy in zip(parameters, copies or parameters, strict=True):
        assert torch.equal(copy, ours.to(dtype))


@both
def test_norm(dtype: torch.dtype) -> None:
    tensors = [random(n, dtype=dtype) for n in (1, 5000, 4096)]
    expected = torch.cat(tensors).double().norm().item()
    assert functions.norm(tensors) == pytest.approx(expected, rel=1e-6)
    assert math.isnan(functions.norm([*tensors, torch.full((3,), float("nan"), dtype=dtype)]))


@both
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"n_kv_heads": 2, "norm_weight": "one_plus"},
        {"qk_norm": "none", "rope_fraction": 0.5},
        {"rope_pairing": "adjacent"},
        {"qk_norm": "whole", "block": "output"},
        {"positions": "learned", "norm": "layernorm", "feed_forward": "gelu", "qk_norm": "none", "qkv_bias": True},
        {"logit_softcap": 20.0, "vocab_multiple": 64},
    ],
)
def test_a_whole_model_trains_the_same(dtype: torch.dtype, values: dict[str, Any]) -> None:
    config = Config(**{"vocab_size": 61, "max_seq_len": 48, "n_layers": 2, "d_model": 64, "n_heads": 4, **values})
    decoder = random_decoder(config, std=0.1).train()
    ids = random_ids(config, 3, 49)
    names = [name for name, _ in decoder.named_parameters()]

    def gradients(dtype: torch.dtype, which: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        model = decoder.to(dtype)
        hidden = model.hidden(ids[:, :-1])
        is_native = which == "native"
        loss = head_loss(model, hidden, ids[:, 1:]) if is_native else loss_sum(model.logits(hidden), ids[:, 1:])
        return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))

    loss, grads = gradients(dtype, "native")
    library, native._library = native._library, None  # PyTorch's own operations
    try:
        expected, wanted = gradients(torch.float32, "plain")
    finally:
        native._library = library
    torch.testing.assert_close(loss.float(), expected, atol=0, rtol=TOLERANCE[dtype] / 4)
    for name, ours, theirs in zip(names, grads, wanted, strict=True):
        error = (ours.float() - theirs).norm() / theirs.norm()
        assert error < 3 * TOLERANCE[dtype], (name, float(error))


def test_threads_do_not_change_a_bit() -> None:
    script = """
import sys, torch
from leftward import Config, Decoder
from leftward.kernels import native
from leftward.training.loss import head_loss
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
qkv, w = torch.randn(3, 70, 96).bfloat16().requires_grad_(), torch.rand(24, requires_grad=True)
x = torch.randn(3, 70, 24).bfloat16().requires_grad_()
from leftward.kernels import functions
with native.in_use():
    y = functions.rms_norm(x, w, 1e-6)
    parts = functions.split_heads(qkv, 2, 1, (w, w), 1e-6, None)
    (y.square().sum() + sum(p.square().sum() for p in parts)).backward()
print([t.grad.double().square().sum().item() for t in (qkv, w, x)])
"""
    texts = {
        subprocess.run([sys.executable, "-c", script, str(n)], capture_output=True, text=True, check=True).stdout
        for n in (1, 2, 3)
    }
    assert len(texts) == 1


def test_it_is_built_once_and_can_be_switched_off(tmp_path: Path) -> None:
    script = (
        "from leftward.kernels import native\nwith native.in_use() as which:\n"
        "    import torch; print(which, native.serves(torch.zeros(1)))\nprint(native.serves(torch.zeros(1)))"
    )

    def run(**env: str) -> str:
        command = [sys.executable, "-c", script]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), **env},
        )
        return done.stdout

    assert run() == "native True\nFalse\n"
    (built,) = (tmp_path / "leftward").iterdir()
    first = built.stat().st_mtime_ns
    assert run() == "native True\nFalse\n" and built.stat().st_mtime_ns == first
    assert run(LEFTWARD_NATIVE="0") == "plain: LEFTWARD_NATIVE=0 False\nFalse\n"
    assert run(CXX="/bin/false", XDG_CACHE_HOME=str(tmp_path / "other")).startswith("plain: /bin/false failed")
    assert run(XDG_CACHE_HOME="/proc/nowhere").startswith("plain: ")


def test_what_it_does_not_serve_runs_on() -> None:
    x = random(2, 8).double()
    assert not native.serves(x)
    torch.testing.assert_close(swiglu(x), F.silu(x[:, :4]) * x[:, 4:])
    torch.testing.assert_close(rms_norm(x, torch.ones(8).double(), 0.0), F.rms_norm(x, (8,), eps=0.0))
    assert isinstance(Decoder(Config(vocab_size=8, n_layers=1, d_model=8, n_heads=1)), Decoder)
