"""What the bytes of a GGUF tensor mean: blocks of quantised numbers ↔ floats. Which tensor is where is gguf.py's
business.

Every kind is one function from blocks [n, bytes] to numbers [n, elements], bit-equal to ggml's reference
(ggml-quants.c, and the `gguf` package's quants.py, which the tests compare with): the order of the products matters.
Quantising is bit-equal too for the kinds with one scale a block; for the K kinds ggml has no canonical result, and the
search is ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leftward.errors import UserError
from leftward.formats.cores import on_all_cores
from leftward.formats.kinds import KINDS
from leftward.formats.quant_grids import GRIDS

_AT_ONCE = 1 << 18  # numbers worked on together: they stay in the cache, and memory beside the result is bounded

_PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


def dequantise(kind: str, raw: Tensor, dtype: torch.dtype | None = torch.float32) -> Tensor:
    """The numbers that `raw` (uint8 [bytes], whole blocks) stands for, [elements]; by way of fp32 where quantised.

    `dtype` None: floats as they are stored, all else in fp32. Plain numbers that have the dtype already are not copied.
    Raises: UserError, where the kind can't be read.
    """
    if dtype is None:
        dtype = _PLAIN[kind] if kind in ("F32", "F16", "BF16") else torch.float32
    if kind in _PLAIN:
        aligned = raw.storage_offset() % KINDS[kind].nbytes == 0
        return (raw if aligned else raw.clone()).view(_PLAIN[kind]).to(dtype)
    if kind not in _DEQUANTISERS:
        raise UserError(f"numbers of kind {kind} can't be read: {', '.join((*_PLAIN, *_DEQUANTISERS))} can")
    if raw.storage_offset() % 2:  # scales of 16 bits are read where they are
        raw = raw.clone()
    elements, nbytes = KINDS[kind].block, KINDS[kind].nbytes
    out = torch.empty(len(raw) // nbytes, elements, dtype=dtype)
    step = _AT_ONCE // elements
    parts = zip(out.split(step), raw.view(-1, nbytes).split(step), strict=True)
    on_all_cores(lambda some, blocks: some.copy_(_DEQUANTISERS[kind](blocks)), parts)
    return out.flatten()


def quantise(kind: str, tensor: Tensor) -> Tensor:
    """The bytes of `tensor` [..., columns] as `kind`, uint8 [bytes].

    Raises: UserError, where the kind can't be written, a row is no whole number of blocks, or a number is infinite or
    none.
    """
    tensor = tensor.detach()
    if kind in _PLAIN:
        return tensor.to(_PLAIN[kind]).contiguous().flatten().view(torch.uint8)
    if kind not in _QUANTISERS:
        raise UserError(f"numbers of kind {kind} can't be written: {', '.join((*_PLAIN, *_QUANTISERS))} can")
    elements, nbytes = KINDS[kind].block, KINDS[kind].nbytes
    if tensor.shape[-1] % elements:
        raise UserError(f"rows of {tensor.shape[-1]} numbers are no multiple of the {elements} of a block of {kind}")
    blocks = tensor.reshape(-1, elements)
    out = torch.empty(len(blocks), nbytes, dtype=torch.uint8)
    step = _AT_ONCE // elements

    def write(some: Tensor, part: Tensor) -> None:
        numbers = part.float()
        if not numbers.isfinite().all():
            raise UserError(f"it holds numbers that are infinite or none, which {kind} can't store")
        some.copy_(torch.cat(_QUANTISERS[kind](numbers), dim=1))

    on_all_cores(write, zip(out.split(step), blocks.split(step), strict=True))
    return out.flatten()


# ---- parts of a block


def _f16(bytes_: Tensor) -> Tensor:
    """[n, 2 k] → [n, k]"""
    return bytes_.view(torch.float16).float()


def _int16(bytes_: Tensor) -> Tensor:
    """Unsigned, little endian: [n, 2 k] → [n, k]"""
    return bytes_.contiguous().view(torch.int16).int() & 0xFFFF


def _int32(bytes_: Tensor) -> Tensor:
    """Little endian, the highest bit as a sign: [n, 4 k] → [n, k]"""
    return bytes_.contiguous().view(torch.int32)


def _unpack(packed: Tensor, width: int, group: int) -> Tensor:
    """Fields of `width` bits, [n, k] → [n, k · 8 / width]: of each `group` bytes first the lowest bits of all, then the
    next."""
    packed = packed.contiguous().view(len(packed), -1, group)
    mask = (1 << width) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, width)], dim=2).flatten(1)


def _shifted(words: Tensor, shifts: range, mask: int) -> Tensor:
    """Fields of integers, [n, k] → [n, k, len(shifts)]"""
    return torch.stack([(words >> shift) & mask for shift in shifts], dim=-1)


def _pack(fields: Tensor, width: int, group: int) -> Tensor:
    """The reverse of `_unpack`, from uint8."""
    per_byte = 8 // width
    fields = fields.view(len(fields), -1, per_byte, group)
    packed = fields[:, :, 0].clone()
    for i in range(1, per_byte):
        packed |= fields[:, :, i] << (i * width)
    return packed.flatten(1)


def _scaled(scales: Tensor, numbers: Tensor) -> Tensor:
    """Each scale times its share of the numbers: [n, s], [n, k] → [n, k]"""
    return (scales[..., None] * numbers.float().view(*scales.shape, -1)).flatten(1)


# ---- one scale a block of 32


def _q4_0(b: Tensor) -> Tensor:
    return _scaled(_f16(b[:, :2]), _unpack(b[:, 2:], 4, 16).to(torch.int8) - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _unpack(b[:, 4:], 4, 16).float().mul_(_f16(b[:, :2])).add_(_f16(b[:, 2:4]))


def _fifth_bits(low: Tensor, high: Tensor) -> Tensor:
    """Of 32 numbers the low four bits and, bit i of 32, the fifth."""
    return _unpack(low, 4, 16) | (_unpack(high, 1, 1) << 4)


def _q5_0(b: Tensor) -> Tensor:
    return _scaled(_f16(b[:, :2]), _fifth_bits(b[:, 6:], b[:, 2:6]).to(torch.int8) - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _fifth_bits(b[:, 8:], b[:, 4:8]).float().mul_(_f16(b[:, :2])).add_(_f16(b[:, 2:4]))


def _q8_0(b: Tensor) -> Tensor:
    return b[:, 2:].view(torch.int8).float().mul_(_f16(b[:, :2]))


# ---- K kinds: 256 numbers, of which 16 or 32 share a scale that is itself quantised


def _q2_k(b: Tensor) -> Tensor:
    d, least = _f16(b[:, 80:82]), _f16(b[:, 82:84])
    lows = least * (b[:, :16] >> 4).float()
    quants = _unpack(b[:, 16:80], 2, 32)
    return _scaled(d * (b[:, :16] & 15).float(), quants).view(-1, 16, 16).sub_(lows[..., None]).flatten(1)


def _q3_k(b: Tensor) -> Tensor:
    scales = _unpack(b[:, 96:104], 4, 8) | (_unpack(b[:, 104:108], 2, 4) << 4)
    quants = _unpack(b[:, 32:96], 2, 32) | (_unpack(b[:, :32], 1, 32) << 2)
    return _scaled(_f16(b[:, 108:]) * (scales.to(torch.int8) - 32).float(), quants.to(torch.int8) - 4)


def _scales_and_lows(b: Tensor) -> tuple[Tensor, Tensor]:
    """What 4_K and 5_K multiply by and subtract: 8 scales and 8 minima of 6 bits in 12 bytes, the last four of each
    with their upper two bits in those of the first four."""
    packed = b[:, 4:16]
    a, m, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((a & 63, (both & 15) | ((a >> 2) & 48)), dim=1)
    lows = torch.cat((m & 63, (both >> 4) | ((m >> 2) & 48)), dim=1)
    return _f16(b[:, :2]) * scales.float(), _f16(b[:, 2:4]) * lows.float()


def _q4_k(b: Tensor) -> Tensor:
    scales, lows = _scales_and_lows(b)
    return _scaled(scales, _unpack(b[:, 16:], 4, 32)).view(-1, 8, 32).sub_(lows[..., None]).flatten(1)


def _q5_k(b: Tensor) -> Tensor:
    scales, lows = _scales_and_lows(b)
    quants = _unpack(b[:, 48:], 4, 32) | (_unpack(b[:, 16:48], 1, 32) << 4)
    return _scaled(scales, quants).view(-1, 8, 32).sub_(lows[..., None]).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    quants = _unpack(b[:, :128], 4, 64) | (_unpack(b[:, 128:192], 2, 32) << 4)
    return _scaled(_f16(b[:, 208:]) * b[:, 192:208].view(torch.int8).float(), quants.to(torch.int8) - 32)


# ---- kinds of 4 bits as blocks of Q4_1, for those who compute with them: [n, bytes] → [n or more, 20]


def _q4_0_as_q4_1(b: Tensor) -> Tensor:
    steps = b[:, :2].contiguous()
    return torch.cat((steps, (steps.view(torch.float16) * -8).view(torch.uint8), b[:, 2:]), dim=1)


def _q4_k_as_q4_1(b: Tensor) -> Tensor:
    """Its steps and least numbers, products of two, are rounded to fp16."""
    scales, lows = _scales_and_lows(b)
    steps, leasts = (x.half().view(-1, 1).view(torch.uint8) for x in (scales, -lows))
    return torch.cat((steps, leasts, _pack(_unpack(b[:, 16:], 4, 32).view(-1, 32), 4, 16)), dim=1)


AS_Q4_1: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0_as_q4_1,
    "Q4_1": lambda b: b,
    "Q4_K": _q4_k_as_q4_1,
}


# ---- numbers from a table of 16

_IQ4_VALUES = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]).float()
# Twice the values of E2M1 (Open Compute Project, Microscaling Formats 1.0).
_E2M1_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]).float()


def _half_e8m0() -> Tensor:
    """Half of 2^(x - 127) for each byte x; below 2^-126 fp32 has no exponent of its own."""
    bits = [1 << 21 << x if x < 2 else (x - 1) << 23 for x in range(256)]
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def _half_e4m3() -> Tensor:
    """Half of what each byte means as an unsigned number of 4 bits of exponent and 3 of mantissa."""
    values = [(x & 7) / 512 if x >> 3 & 15 == 0 else (1 + (x & 7) / 8) * 2.0 ** ((x >> 3 & 15) - 7) for x in range(256)]
    values[0x7F] = 0.0  # not a number
    return torch.tensor(values) / 2


_HALF_E8M0, _HALF_E4M3 = _half_e8m0(), _half_e4m3()


def _iq4_nl(b: Tensor) -> Tensor:
    return _scaled(_f16(b[:, :2]), _IQ4_VALUES[_unpack(b[:, 2:], 4, 16).int()])


def _iq4_xs(b: Tensor) -> Tensor:
    high = _shifted(_int16(b[:, 2:4]), range(0, 16, 2), 3).flatten(1)
    low = _unpack(b[:, 4:8], 4, 1)
    scales = _f16(b[:, :2]) * ((low | high << 4) - 32).float()
    return _scaled(scales, _IQ4_VALUES[_unpack(b[:, 8:], 4, 16).int()])


def _mxfp4(b: Tensor) -> Tensor:
    return _scaled(_HALF_E8M0[b[:, :1].int()], _E2M1_DOUBLED[_unpack(b[:, 1:], 4, 16).int()])


def _nvfp4(b: Tensor) -> Tensor:
    return _scaled(_HALF_E4M3[b[:, :4].int()], _E2M1_DOUBLED[_unpack(b[:, 4:], 4, 8).int()])


# ---- three values


def _tq1_0(b: Tensor) -> Tensor:
    """Five digits of base 3 a byte, as a fraction of 256, the first digit the highest; four in the last bytes."""
    digits = []
    for part, group, count in ((b[:, :32], 32, 5), (b[:, 32:48], 16, 5), (b[:, 48:52], 4, 4)):
        powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8)[:, None]
        digits.append((part.reshape(len(b), -1, 1, group) * powers).flatten(1))
    return _scaled(_f16(b[:, 52:]), ((torch.cat(digits, dim=1).int() * 3) >> 8) - 1)


def _tq2_0(b: Tensor) -> Tensor:
    return _scaled(_f16(b[:, 64:]), _unpack(b[:, :64], 2, 32).to(torch.int8) - 1)


# ---- IQ kinds: groups of 4 or 8 numbers that are a point of a grid, and their signs

# Seven signs of a group; the eighth makes the number of negative ones even.
_EVEN_SIGNS = torch.tensor([i | (i.bit_count() & 1) << 7 for i in range(128)], dtype=torch.uint8)


def _signs(bits: Tensor) -> Tensor:
    """Bytes [n, ...] → +1 and -1 for each bit, [n, 8 k]"""
    return 1 - 2 * _unpack(bits.flatten(1), 1, 1).float()


def _on_grid(name: str, scales: Tensor, points: Tensor, signs: Tensor) -> Tensor:
    """[n, s] scales, [n, k] indices of points, a sign a number"""
    return _scaled(scales, GRIDS[name][points].flatten(1)).mul_(signs)


def _nibble_scales(b: Tensor) -> Tensor:
    return _unpack(b, 4, 1).float()


def _iq2_xxs(b: Tensor) -> Tensor:
    words = _int32(b[:, 2:]).view(len(b), 8, 2)  # four indices; four times seven signs and a scale
    signs = _EVEN_SIGNS[_shifted(words[..., 1], range(0, 28, 7), 127)]
    scales = _f16(b[:, :2]) * (0.5 + (words[..., 1] >> 28 & 15).float()) * 0.25
    points = b[:, 2:].reshape(len(b), 8, 8)[..., :4].flatten(1).int()
    return _on_grid("IQ2_XXS", scales, points, _signs(signs))


def _iq2_xs(b: Tensor) -> Tensor:
    words = _int16(b[:, 2:66])
    scales = _f16(b[:, :2]) * (0.5 + _nibble_scales(b[:, 66:])) * 0.25
    return _on_grid("IQ2_XS", scales, words & 511, _signs(_EVEN_SIGNS[words >> 9]))


def _iq2_s(b: Tensor) -> Tensor:
    points = b[:, 2:34].int() | _unpack(b[:, 66:74], 2, 1).int() << 8
    scales = _f16(b[:, :2]) * (0.5 + _nibble_scales(b[:, 74:])) * 0.25
    return _on_grid("IQ2_S", scales, points, _signs(b[:, 34:66]))


def _iq3_xxs(b: Tensor) -> Tensor:
    words = _int32(b[:, 66:])
    signs = _EVEN_SIGNS[_shifted(words, range(0, 28, 7), 127)]
    scales = _f16(b[:, :2]) * (0.5 + (words >> 28 & 15).float()) * 0.5
    return _on_grid("IQ3_XXS", scales, b[:, 2:66].int(), _signs(signs))


def _iq3_s(b: Tensor) -> Tensor:
    points = b[:, 2:66].int() | _unpack(b[:, 66:74], 1, 1).int() << 8
    return _on_grid("IQ3_S", _f16(b[:, :2]) * (1 + 2 * _nibble_scales(b[:, 106:])), points, _signs(b[:, 74:106]))


_IQ1_SHIFT = 0.125


def _shifted_grid(scales: Tensor, points: Tensor, shifts: Tensor) -> Tensor:
    """[n, s] scales, [n, k] indices of points, [n, t] shifts of the points' coordinates"""
    shifted = GRIDS["IQ1_S"][points].view(*shifts.shape, -1) + shifts[..., None]
    return _scaled(scales, shifted.flatten(1))


def _iq1_s(b: Tensor) -> Tensor:
    high = _int16(b[:, 34:])
    scales = _f16(b[:, :2]) * (2 * (high >> 12 & 7) + 1).float()
    points = b[:, 2:34].int() | _shifted(high, range(0, 12, 3), 7).flatten(1) << 8
    return _shifted_grid(scales, points, _IQ1_SHIFT - 2 * _IQ1_SHIFT * (high >> 15).float())


def _iq1_m(b: Tensor) -> Tensor:
    packed = _int16(b[:, 48:])  # four times four scales, and in the upper bits a quarter of the block's own
    d = torch.zeros(len(b), 1, dtype=torch.int32)
    for i in range(4):
        d |= (packed[:, i : i + 1] >> 12) << (4 * i)
    scales = (
        _f16(d.to(torch.int16).view(torch.uint8).view(len(b), 2))
        * (2 * _shifted(packed, range(0, 12, 3), 7).flatten(1) + 1).float()
    )
    high = _unpack(b[:, 32:48], 4, 1).int()
    points = b[:, :32].int() | (high & 7) << 8
    return _shifted_grid(scales, points, _IQ1_SHIFT - 2 * _IQ1_SHIFT * (high >> 3).float())


_DEQUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}


# ---- quantising, one scale a block: as ggml does, to the bit


def _reciprocal(d: Tensor) -> Tensor:
    """1 / d; 0 where a block is all zeros, or so small that 1 / d is no number and d no fp16 either."""
    return torch.where(d.abs() < torch.finfo(torch.float32).tiny, 0.0, 1 / d)


def _to_f16(d: Tensor) -> Tensor:
    return d.half().view(torch.uint8)


def _from_extreme(levels: int) -> Callable[[Tensor], list[Tensor]]:
    """The number of largest magnitude becomes the lowest level, which has no positive counterpart."""

    def quantise_blocks(x: Tensor) -> list[Tensor]:
        extreme = x.gather(1, x.abs().argmax(dim=1, keepdim=True))
        d = extreme / -(levels // 2)
        quants = (x * _reciprocal(d) + (levels / 2 + 0.5)).trunc_().clamp_(0, levels - 1).to(torch.uint8)
        return [_to_f16(d), *_nibbles_and_fifth(quants, levels)]

    return quantise_blocks


def _from_range(levels: int) -> Callable[[Tensor], list[Tensor]]:
    """The least number becomes the lowest level and the largest the highest."""

    def quantise_blocks(x: Tensor) -> list[Tensor]:
        least, most = x.aminmax(dim=1, keepdim=True)
        d = (most - least) / (levels - 1)
        quants = ((x - least) * _reciprocal(d) + 0.5).trunc_().clamp_(0, levels - 1).to(torch.uint8)
        return [_to_f16(d), _to_f16(least), *_nibbles_and_fifth(quants, levels)]

    return quantise_blocks


def _nibbles_and_fifth(quants: Tensor, levels: int) -> list[Tensor]:
    high = [_pack_bits(quants >> 4)] if levels == 32 else []
    return [*high, _pack(quants & 15, 4, 16)]


def _pack_bits(bits: Tensor) -> Tensor:
    """[n, 8 k] of 0 and 1 → [n, k], the first the lowest."""
    return _pack(bits, 1, 1)


def _to_q8_0(x: Tensor) -> list[Tensor]:
    d = x.abs().amax(dim=1, keepdim=True) / 127
    scaled = x * _reciprocal(d)
    size = scaled.abs()
    floor = size.floor()
    rounded = scaled.sign() * (floor + (2 * (size - floor)).floor())  # halves away from zero
    return [_to_f16(d), rounded.to(torch.int8).view(torch.uint8)]


# ---- quantising, K kinds: least squares over candidates

_CANDIDATES = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)
"""Steps by which the range of the levels is made wider or narrower than that of the numbers. Their best scale (and
minimum) follow from least squares, and the candidate that leaves the least error is taken: the idea of llama.cpp's
make_qkx2_quants and make_qx_quants, without their weights, so that the error minimised is the one measured. Three times
as many candidates gain another 0.4 % and take three times as long."""


def _best_scales_and_lows(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """scale and low ≥ 0 such that x ≈ scale · q - low with q from 0 to levels - 1: [n, g, k] → twice [n, g]"""
    least, most = x.amin(dim=-1, keepdim=True).clamp(max=0.0), x.amax(dim=-1, keepdim=True)
    inverse = _reciprocal(most - least)
    best_scale, best_low = (most - least) / (levels - 1), -least
    best_error = torch.full_like(best_scale, torch.inf)
    count, total = x.shape[-1], x.sum(dim=-1, keepdim=True)
    for step in _CANDIDATES:
        q = ((x - least) * ((levels - 1 + step) * inverse)).round_().clamp_(0, levels - 1)
        q_sum, qq, xq = q.sum(-1, keepdim=True), (q * q).sum(-1, keepdim=True), (x * q).sum(-1, keepdim=True)
        determinant = _reciprocal(count * qq - q_sum * q_sum)
        scale = (count * xq - total * q_sum) * determinant
        low = (q_sum * xq - qq * total) * determinant
        scale = torch.where(low < 0, xq * _reciprocal(qq), scale)
        low = low.clamp_(min=0.0)
        error = (q.mul_(scale) - low - x).square_().sum(-1, keepdim=True)
        better = (error < best_error) & (determinant > 0) & (scale > 0)
        best_error = torch.where(better, error, best_error)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, low, best_low)
    return best_scale.squeeze(-1), best_low.squeeze(-1)


def _rounded_shares(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Values ≥ 0 [n, g] as d · q: d in fp16 [n, 1], the integers q [n, g] up to `most`."""
    d = (values.amax(dim=1, keepdim=True) / most).half().float()
    return d, (values * _reciprocal(d)).round_().clamp_(0, most)


def _to_k_with_lows(levels: int) -> Callable[[Tensor], list[Tensor]]:
    """Q4_K and Q5_K: the scales and lows are rounded to 6 bits, then each number to the nearest level that is left."""

    def quantise_blocks(x: Tensor) -> list[Tensor]:
        groups = x.view(-1, 8, 32)
        scales, lows = _best_scales_and_lows(groups, levels)
        (d, s), (d_low, m) = _rounded_shares(scales, 63), _rounded_shares(lows, 63)
        offset = groups + (d_low * m)[..., None]
        q = (offset * _reciprocal(d * s)[..., None]).round_().clamp_(0, levels - 1).to(torch.uint8).flatten(1)
        s, m = s.to(torch.uint8), m.to(torch.uint8)
        packed = [
            s[:, :4] | (s[:, 4:] >> 4 << 6),
            m[:, :4] | (m[:, 4:] >> 4 << 6),
            (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4,
        ]
        high = [_pack(q >> 4, 1, 32)] if levels == 32 else []
        return [_to_f16(d), _to_f16(d_low), *packed, *high, _pack(q & 15, 4, 32)]

    return quantise_blocks


def _to_q6_k(x: Tensor) -> list[Tensor]:
    groups = x.view(-1, 16, 16)
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    best_scale = extreme / -32
    best_error = torch.full_like(extreme, torch.inf)
    for step in _CANDIDATES:
        q = (groups * ((-32 + 2 * step) * _reciprocal(extreme))).round_().clamp_(-32, 31)
        scale = (groups * q).sum(-1, keepdim=True) * _reciprocal((q * q).sum(-1, keepdim=True))
        error = (scale * q - groups).square_().sum(-1, keepdim=True)
        best_scale = torch.where(error < best_error, scale, best_scale)
        best_error = torch.minimum(error, best_error)
    scales = best_scale.squeeze(-1)
    d = (scales.gather(1, scales.abs().argmax(dim=1, keepdim=True)) / -128).half().float()
    s = (scales * _reciprocal(d)).round_().clamp_(-128, 127)
    q = (groups * _reciprocal(d * s)[..., None]).round_().clamp_(-32, 31).flatten(1).to(torch.int8) + 32
    q = q.view(torch.uint8)
    return [_pack(q & 15, 4, 64), _pack(q >> 4, 2, 32), s.to(torch.int8).view(torch.uint8), _to_f16(d)]


_QUANTISERS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "Q4_0": _from_extreme(16),
    "Q4_1": _from_range(16),
    "Q5_0": _from_extreme(32),
    "Q5_1": _from_range(32),
    "Q8_0": _to_q8_0,
    "Q4_K": _to_k_with_lows(16),
    "Q5_K": _to_k_with_lows(32),
    "Q6_K": _to_q6_k,
}
WRITABLE = ("F32", "F16", "BF16", *_QUANTISERS)
"""The kinds that a model's weights can be written as."""
