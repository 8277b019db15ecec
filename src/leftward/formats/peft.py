"""Adapters of LoRA as the PEFT library has them: adapter_config.json and adapter_model.safetensors.

A matrix of ours may be several of a Hugging Face class: q, k and v, or gate and up. What is added to it is B A, whose
rows come of the rows of B, so that each of theirs has the same A and its own rows of B: exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from leftward import files
from leftward.config import Config
from leftward.formats.family import HALVES_APART, QKV_APART, QKV_GROUPED, SAME, TRANSPOSED, VOCABULARY
from leftward.formats.hf import family_of, meta_state, places
from leftward.formats.tensors import write_tensors
from leftward.model.lora import A, B

_BY_ROWS = (SAME, QKV_APART, QKV_GROUPED, HALVES_APART, VOCABULARY)
"""Operations that part or reorder the rows of a weight, and so those of B."""


def save_adapter(
    directory: Path,
    config: Config,
    adapters: Mapping[str, Tensor],
    *,
    rank: int,
    alpha: float,
    dropout: float,
    base: str,
    model_type: str | None,
) -> None:
    """Write an adapter that PEFT loads onto the Hugging Face class of `config`, where `why_no_adapter` finds nothing.

    Args:
        adapters: our names → A [rank, in] and B [out, rank].
        base: the name or path of the model that was adapted.
        model_type: the class to prefer, where several can say all of `config`.

    Raises:
        UserError: the disk refuses.
    """
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    names = [name.removesuffix(A) for name in adapters if name.endswith(A)]
    for module, theirs, op in _places(config, names, model_type):
        a, b = adapters[module + A], adapters[module + B]
        for their, rows in zip(theirs, [b] if op is TRANSPOSED else op.write(config, b), strict=True):
            modules.append(their)
            # Copies, since a file holds no tensor twice.
            tensors[f"base_model.model.{their}.lora_A.weight"] = a.clone()
            tensors[f"base_model.model.{their}.lora_B.weight"] = rows.contiguous()
    values: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "bias": "none",
        # GPT-2's matrices are kept [in, out].
        "fan_in_fan_out": any(op is TRANSPOSED for _, _, op in _places(config, names, model_type)),
        "target_modules": _targets(config, modules, model_type),
        "inference_mode": True,
    }
    with files.writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    files.write_json(directory / "adapter_config.json", values)
    write_tensors(directory / "adapter_model.safetensors", tensors)


def why_no_adapter(config: Config, names: Iterable[str], model_type: str | None) -> str | None:
    """Why PEFT has no place for adapters of the modules `names`; None where it has."""
    if family_of(config) is None:
        return "no Hugging Face class has this architecture"
    for module, theirs, op in _places(config, names, model_type):
        if module == "head" and theirs != ["lm_head"]:
            return f"versions of transformers differ in the name of the head, {theirs[0]} in files"
        if module.endswith(".router") or op not in (*_BY_ROWS, TRANSPOSED):
            return f"{module} is no linear of the Hugging Face class"
    return None


def _places(config: Config, names: Iterable[str], model_type: str | None) -> list[tuple[str, list[str], Any]]:
    """Our modules, theirs, and what is done on the way."""
    end = ".weight"
    found = places(config, [name + end for name in names], model_type)
    return [(ours.removesuffix(end), [name.removesuffix(end) for name in theirs], op) for ours, theirs, op in found]


def _targets(config: Config, modules: list[str], model_type: str | None) -> list[str]:
    """The last parts of the modules' names, as everybody has them, where that says the same; otherwise whole names."""
    theirs = [name for _, names, _ in places(config, meta_state(config), model_type) for name in names]
    last = {module.rpartition(".")[2] for module in modules}
    meant = {name.removesuffix(".weight") for name in theirs if name.endswith(".weight")}
    meant = {name for name in meant if name.rpartition(".")[2] in last}
    return sorted(last if meant == set(modules) else modules)
