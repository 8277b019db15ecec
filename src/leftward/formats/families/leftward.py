"""Our own: any Config that no Hugging Face class expresses, its fields and tensors under our own names, which hf.py
therefore needs no table for. Loads here only."""

from __future__ import annotations

from leftward.formats.family import Family

LEFTWARD = Family(model_type="leftward", architecture="LeftwardForCausalLM", settings=(), fixed={}, rows=())
