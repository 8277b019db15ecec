"""One small table a family of Hugging Face models. The first that can express a Config is the one it is saved as; the
last, our own, expresses all."""

from __future__ import annotations

from leftward.formats.families.gpt2 import GPT2
from leftward.formats.families.leftward import LEFTWARD
from leftward.formats.families.llama import LLAMA
from leftward.formats.families.qwen3 import QWEN3
from leftward.formats.families.starcoder2 import STARCODER2

FAMILIES = (QWEN3, LLAMA, GPT2, STARCODER2, LEFTWARD)

__all__ = ["FAMILIES", "LEFTWARD"]
