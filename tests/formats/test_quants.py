"""Blocks of quantised numbers: bit-equal to the `gguf` package's own reference, and no worse than plain rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from leftward.errors import UserError
from leftward.formats import quants
from leftward.formats.kinds import KINDS
from leftward.formats.quants import dequantise, quantise

gguf = pytest.importorskip("gguf", reason="the reference for GGUF's kinds (pip install gguf)")

WITHOUT_REFERENCE = {"F32", "F16", "F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0"}
BIT_EQUAL = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
SEARCHED = ["Q4_K", "Q5_K", "Q6_K"]


def bits(numbers: Tensor) -> list[int]:
    """NaN as one value: which of them a product gives is the processor's choice."""
    return torch.where(numbers.isnan(), torch.nan, numbers).view(torch.int32).tolist()


def reference_kind(kind: str) -> int:
    return gguf.GGMLQuantizationType[kind]


def reference(kind: str, raw: Tensor) -> Tensor:
    with np.errstate(all="ignore"):
        rows = raw.numpy().reshape(-1, KINDS[kind].nbytes)
        return torch.from_numpy(gguf.dequantize(rows, reference_kind(kind)).flatten())


def reference_quantised(kind: str, numbers: Tensor) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quantize(numbers.numpy(), reference_kind(kind)).view(np.uint8).flatten())


def random_bytes(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_sizes_and_numbers_are_those_of_the_reference() -> None:
    theirs = {kind.name: (int(kind), *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {name: tuple(kind) for name, kind in KINDS.items()} == theirs


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITHOUT_REFERENCE])
def test_dequantised_numbers_are_the_references_to_the_bit(kind: str) -> None:
    """Random bytes are every scale there is: zeros, subnormals, infinities and none."""
    raw = random_bytes(1500 * KINDS[kind].nbytes)
    raw[: KINDS[kind].nbytes] = 0
    raw[KINDS[kind].nbytes : 2 * KINDS[kind].nbytes] = 255
    ours = dequantise(kind, raw)
    assert ours.dtype == torch.float32
    assert len(ours) == 1500 * KINDS[kind].block
    assert bits(ours) == bits(reference(kind, raw))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_tensor_is_the_same_in_one_piece_and_in_many(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    raw = random_bytes(100 * KINDS["Q5_K"].nbytes)
    whole = dequantise("Q5_K", raw)
    monkeypatch.setattr(quants, "_AT_ONCE", 7 * 256)
    with torch.inference_mode():
        assert bits(dequantise("Q5_K", raw)) == bits(whole)
    numbers = torch.randn(11, 512)
    pieces = quantise("Q6_K", numbers)
    with pytest.raises(UserError, match="infinite or none"):
        quantise("Q6_K", numbers / 0)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    monkeypatch.undo()
    assert torch.equal(pieces, quantise("Q6_K", numbers))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64", "Q4_0", "Q6_K"])
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_bytes_may_begin_anywhere(kind: str, offset: int) -> None:
    raw = random_bytes(8 * KINDS[kind].nbytes + offset)[offset:]
    assert bits(dequantise(kind, raw)) == bits(dequantise(kind, raw.clone()))


def test_plain_numbers_are_not_copied() -> None:
    raw = torch.arange(8, dtype=torch.float32).view(torch.uint8)
    assert dequantise("F32", raw).data_ptr() == raw.data_ptr()
    assert dequantise("F32", raw, torch.bfloat16).dtype == torch.bfloat16
    wide = torch.tensor([1.5, -3.0], dtype=torch.float64)
    assert dequantise("F64", wide.view(torch.uint8)).tolist() == [1.5, -3.0]
    assert dequantise("I16", torch.tensor([-2, 7], dtype=torch.int16).view(torch.uint8)).tolist() == [-2, 7]


@pytest.mark.parametrize("kind", BIT_EQUAL)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4, 1e-9, 3e-36])
def test_quantised_bytes_are_the_references(kind: str, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(33, 256, generator=generator) * scale
    numbers[0] = 0
    numbers[1, :32] = 3.0 * scale  # no width
    numbers[2] = torch.where(torch.arange(256) % 2 == 0, scale, -scale)  # the largest magnitude many times
    numbers[3] = (torch.arange(256) % 15 - 7) * scale  # halves to round
    numbers[4] = numbers[4].abs()
    assert torch.equal(quantise(kind, numbers), reference_quantised(kind, numbers))


def plainly_rounded(numbers: Tensor, kind: str) -> Tensor:
    """Each group's own range in equal steps, its scale (and minimum) as 6-bit (8-bit) shares of the block's: the
    textbook way."""
    if kind == "Q6_K":
        groups = numbers.view(-1, 16, 16)
        scales = groups.abs().amax(-1) / 31
        d = scales.amax(-1, keepdim=True) / 127
        scales = ((scales / d).round() * d)[..., None]
        return ((groups / scales).round().clamp(-32, 31) * scales).view(numbers.shape)
    levels = 15 if kind == "Q4_K" else 31
    groups = numbers.view(-1, 8, 32)
    lows = -groups.amin(-1).clamp(max=0)
    scales = (groups.amax(-1) + lows) / levels
    d, m = scales.amax(-1, keepdim=True) / 63, lows.amax(-1, keepdim=True) / 63
    scales, lows = ((scales / d).round() * d)[..., None], ((lows / m).round() * m)[..., None]
    return (((groups + lows) / scales).round().clamp(0, levels) * scales - lows).view(numbers.shape)


@pytest.mark.parametrize("kind", SEARCHED)
@pytest.mark.parametrize("shape", ["normal", "heavy tails", "uniform", "shifted"])
def test_searched_scales_leave_less_error_than_plain_rounding(kind: str, shape: str) -> None:
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(512, 256, generator=generator)
    numbers = {
        "normal": numbers,
        "heavy tails": numbers**3,
        "uniform": torch.rand(512, 256, generator=generator) - 0.5,
        "shifted": numbers - 1.5,
    }[shape] * 0.05
    error = (dequantise(kind, quantise(kind, numbers)) - numbers.flatten()).square().mean().sqrt()
    plain = (plainly_rounded(numbers, kind) - numbers).square().mean().sqrt()
    print(f"{kind} {shape}: {error / plain:.3f} of plain rounding's error")
    assert error < plain


@pytest.mark.parametrize("kind", SEARCHED)
def test_searched_kinds_keep_what_needs_no_search(kind: str) -> None:
    assert dequantise(kind, quantise(kind, torch.zeros(1, 256))).tolist() == [0.0] * 256
    tiny = torch.full((1, 256), 1e-30)
    assert dequantise(kind, quantise(kind, tiny)).abs().max() <= 1e-7
    constant = dequantise(kind, quantise(kind, torch.full((2, 256), 0.75)))
    torch.testing.assert_close(constant, torch.full((512,), 0.75), atol=2e-3, rtol=0)
    constant = dequantise(kind, quantise(kind, torch.full((2, 256), -0.75)))
    torch.testing.assert_close(constant, torch.full((512,), -0.75), atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: dequantise("Q8_K", random_bytes(292)), "numbers of kind Q8_K can't be read"),
        (lambda: quantise("IQ2_S", torch.zeros(256)), "numbers of kind IQ2_S can't be written"),
        (lambda: quantise("Q4_K", torch.zeros(3, 128)), "rows of 128 numbers are no multiple of the 256"),
        (lambda: quantise("Q4_0", torch.tensor([torch.nan] * 32)), "infinite or none, which Q4_0 can't store"),
        (lambda: quantise("Q6_K", torch.tensor([torch.inf] * 256)), "infinite or none, which Q6_K can't store"),
    ],
)
def test_what_cannot_be_done_is_said(action: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        action()  # type: ignore[operator]
