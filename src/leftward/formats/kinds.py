"""The kinds of numbers that a GGUF tensor can hold, and how many bytes they take. Sizes only, no torch: quants.py says
what the bytes mean."""

from __future__ import annotations

from typing import Literal, NamedTuple

Weights = Literal["stored", "fp32", "bf16", "q8", "q4"]
"""What a model's weights may be loaded as (language_model.load)."""


class Kind(NamedTuple):
    """A tensor is a sequence of blocks; a row is a whole number of them."""

    number: int
    """What stands for the kind in a file (enum ggml_type in ggml.h)."""
    block: int
    """Elements in a block."""
    nbytes: int
    """Bytes of a block."""


KINDS = {
    "F32": Kind(0, 1, 4),
    "F16": Kind(1, 1, 2),
    "Q4_0": Kind(2, 32, 18),
    "Q4_1": Kind(3, 32, 20),
    "Q5_0": Kind(6, 32, 22),
    "Q5_1": Kind(7, 32, 24),
    "Q8_0": Kind(8, 32, 34),
    "Q8_1": Kind(9, 32, 40),
    "Q2_K": Kind(10, 256, 84),
    "Q3_K": Kind(11, 256, 110),
    "Q4_K": Kind(12, 256, 144),
    "Q5_K": Kind(13, 256, 176),
    "Q6_K": Kind(14, 256, 210),
    "Q8_K": Kind(15, 256, 292),
    "IQ2_XXS": Kind(16, 256, 66),
    "IQ2_XS": Kind(17, 256, 74),
    "IQ3_XXS": Kind(18, 256, 98),
    "IQ1_S": Kind(19, 256, 50),
    "IQ4_NL": Kind(20, 32, 18),
    "IQ3_S": Kind(21, 256, 110),
    "IQ2_S": Kind(22, 256, 82),
    "IQ4_XS": Kind(23, 256, 136),
    "I8": Kind(24, 1, 1),
    "I16": Kind(25, 1, 2),
    "I32": Kind(26, 1, 4),
    "I64": Kind(27, 1, 8),
    "F64": Kind(28, 1, 8),
    "IQ1_M": Kind(29, 256, 56),
    "BF16": Kind(30, 1, 2),
    "TQ1_0": Kind(34, 256, 54),
    "TQ2_0": Kind(35, 256, 66),
    "MXFP4": Kind(39, 32, 17),
    "NVFP4": Kind(40, 64, 36),
    "Q1_0": Kind(41, 128, 18),
}
