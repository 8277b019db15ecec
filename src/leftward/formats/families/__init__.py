"""One small table a family of Hugging Face models. The first that can express a Config is the one it is saved as; the
last, our own, expresses all."""

from __future__ import annotations

from leftward.formats.families.bloom import BLOOM
from leftward.formats.families.cohere import COHERE
from leftward.formats.families.falcon import FALCON, FALCON_40B
from leftward.formats.families.gemma import GEMMA
from leftward.formats.families.gemma2 import GEMMA2
from leftward.formats.families.gemma3 import GEMMA3
from leftward.formats.families.gpt2 import GPT2
from leftward.formats.families.gpt_neo import GPT_NEO
from leftward.formats.families.gpt_neox import GPT_NEOX
from leftward.formats.families.gpt_oss import GPT_OSS
from leftward.formats.families.gptj import GPTJ
from leftward.formats.families.granite import GRANITE
from leftward.formats.families.leftward import LEFTWARD
from leftward.formats.families.llama import LLAMA
from leftward.formats.families.mistral import MISTRAL
from leftward.formats.families.mixtral import MIXTRAL
from leftward.formats.families.mpt import MPT
from leftward.formats.families.olmo import OLMO
from leftward.formats.families.olmo2 import OLMO2
from leftward.formats.families.openai_gpt import OPENAI_GPT
from leftward.formats.families.opt import OPT
from leftward.formats.families.phi import PHI
from leftward.formats.families.phi3 import PHI3
from leftward.formats.families.qwen2 import QWEN2
from leftward.formats.families.qwen3 import QWEN3
from leftward.formats.families.qwen3_moe import QWEN3_MOE
from leftward.formats.families.smollm3 import SMOLLM3
from leftward.formats.families.stablelm import STABLELM
from leftward.formats.families.starcoder2 import STARCODER2

FAMILIES = (
    *(QWEN3, LLAMA, GPT2, MISTRAL, QWEN2, STARCODER2, GEMMA3, GEMMA2, GEMMA, MIXTRAL, QWEN3_MOE, GPT_OSS),
    *(PHI3, PHI, GPT_NEOX, GPTJ, FALCON, FALCON_40B, BLOOM, MPT, OPT, OPENAI_GPT, GPT_NEO),
    *(OLMO2, OLMO, SMOLLM3, STABLELM, COHERE, GRANITE),
    LEFTWARD,
)

__all__ = ["FAMILIES", "LEFTWARD"]
