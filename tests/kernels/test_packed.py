"""Packed matrices hold what a file's blocks say, and their products are those of rounded inputs with these numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leftward import Config
from leftward.formats.family import QKV_APART, SAME, VOCABULARY
from leftward.formats.kinds import KINDS
from leftward.formats.packing import pack_numbers, pack_rows, pack_tensors
from leftward.formats.quants import dequantise, quantise
from leftward.kernels import native
from leftward.kernels.packed import Packed, PackedEmbedding, PackedLinear, unpack

pytestmark = pytest.mark.skipif(not native.available(), reason="no C++ compiler here")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def raw_of(kind: str, tensor: Tensor) -> Tensor:
    return quantise(kind, tensor).view(len(tensor), -1)


@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_kept_bit_for_bit(kind: str, rows: int) -> None:
    raw = raw_of(kind, draw(rows, 96))
    packed = pack_rows(kind, raw)
    stored = dequantise(kind, raw.flatten()).view(rows, 96)
    assert torch.equal(unpack(packed), stored)
    some = torch.tensor([rows - 1, 0, rows // 2])
    assert torch.equal(unpack(packed, some), stored[some])


def test_q4_k_keeps_its_numbers_but_for_the_steps_rounding() -> None:
    raw = torch.randint(256, (5, KINDS["Q4_K"].nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    raw[:, :4] = torch.tensor([0.01, 0.02], dtype=torch.float16).view(torch.uint8)
    stored = dequantise("Q4_K", raw.flatten()).view(5, 256)
    # fp16 keeps 11 bits of a step of at most 0.01 · 63, which counts 15 times, and of a least number of 0.02 · 63.
    assert (unpack(pack_rows("Q4_K", raw)) - stored).abs().max() <= (15 * 0.63 + 1.26) * 2**-11


def test_other_kinds_become_8_bits() -> None:
    raw = raw_of("Q5_1", draw(3, 64))
    stored = dequantise("Q5_1", raw.flatten()).view(3, 64)
    again = dequantise("Q8_0", quantise("Q8_0", stored)).view(3, 64)
    packed = pack_rows("Q5_1", raw)
    assert packed.kind == "q8"
    assert torch.equal(unpack(packed), again)


def rounded(x: Tensor) -> Tensor:
    """To whole multiples of a 127th of the largest number of each 32, as the kernel's comment says."""
    blocks = x.double().unflatten(-1, (-1, 32))
    step = blocks.abs().amax(dim=-1, keepdim=True) / 127
    return ((blocks / step.clamp(min=1e-300)).round() * step).flatten(-2)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 5, 19, 300])
@pytest.mark.parametrize("kind", ["q4", "q8"])
def test_products(kind: str, n_tokens: int) -> None:
    parts = [pack_numbers(draw(rows, 352, seed=rows), kind) for rows in (48, 7, 33)]  # type: ignore[arg-type]
    bias, x = draw(88), draw(n_tokens, 352, seed=2) * 3
    linear = PackedLinear(parts, bias)
    expected = rounded(x) @ linear.weight.double().T + bias.double()
    ours = linear(x)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=2e-4)
    # A token alone gives the same bits.
    assert torch.equal(linear(x[-1:]), ours[-1:])


def test_what_is_no_number_stays_so() -> None:
    linear = PackedLinear([pack_numbers(draw(16, 32), "q8")])
    x = draw(2, 32)
    x[1, 3] = torch.nan
    out = linear(x)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_largest_numbers_do_not_overflow() -> None:
    """Every q at its end and every input at its own: sums in 16 bits must hold them."""
    raw = raw_of("Q4_1", torch.cat((torch.zeros(16, 32), torch.full((16, 32), 15.0)), dim=1))
    q4 = pack_rows("Q4_1", raw)
    q8 = pack_numbers(torch.full((16, 64), -1.0), "q8")
    for packed in (q4, q8):
        linear = PackedLinear([packed])
        x = torch.full((3, 64), 2.0)
        torch.testing.assert_close(linear(x), x @ linear.weight.T)
        torch.testing.assert_close(linear(-x), -x @ linear.weight.T)


def test_an_embedding_gives_rows() -> None:
    packed = pack_numbers(draw(50, 64), "q4")
    ids = torch.tensor([[49, 3], [3, 0]])
    assert torch.equal(PackedEmbedding([packed])(ids), unpack(packed)[ids])


def test_parts_of_several_kinds_and_in_another_order() -> None:
    config = Config(vocab_size=40, vocab_multiple=16, d_model=32, n_heads=4, n_kv_heads=2)
    tensors = [("Q4_1", draw(32, 32)), ("Q4_1", draw(16, 32, seed=1)), ("Q8_0", draw(16, 32, seed=2))]
    raws = [(kind, raw_of(kind, tensor)) for kind, tensor in tensors]
    numbers = torch.cat([dequantise(kind, raw.flatten()).view(-1, 32) for kind, raw in raws])
    parts = pack_tensors(config, QKV_APART, raws)
    assert [part.kind for part in parts] == ["q4", "q4", "q8"]
    assert torch.equal(PackedLinear(parts).weight, numbers)
    backwards = SAME._replace(read=lambda config, tensors: tensors[0].flip(0))
    (part,) = pack_tensors(config, backwards, raws[:1])
    assert torch.equal(unpack(part), numbers[:32].flip(0))


def test_rows_that_pad_the_vocabulary_are_zeros() -> None:
    config = Config(vocab_size=40, vocab_multiple=16, d_model=32)
    raw = raw_of("Q8_0", draw(40, 32))
    parts: list[Packed] = pack_tensors(config, VOCABULARY, [("Q8_0", raw)])
    table = torch.cat([unpack(part) for part in parts])
    assert torch.equal(table, torch.cat((dequantise("Q8_0", raw.flatten()).view(40, 32), torch.zeros(8, 32))))
