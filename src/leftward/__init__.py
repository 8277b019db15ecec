"""leftward: the whole life of decoder-only language models, from raw text to a model that is seen through.

    import leftward as lw
    run = lw.train("recipe.yaml")
    model = lw.load("runs/my-run")
    print(model.generate("Once upon a time", max_tokens=60))

The public names are imported when first used, so that `import leftward` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leftward.config import Config as Config
    from leftward.generation.completions import Completion as Completion
    from leftward.generation.contrastive import Contrastive as Contrastive
    from leftward.generation.engine import Engine as Engine
    from leftward.generation.requests import Request as Request
    from leftward.generation.settings import Sampler as Sampler
    from leftward.generation.settings import Sampling as Sampling
    from leftward.inspection.attribution import logit_attribution as logit_attribution
    from leftward.inspection.heads import entropies as entropies
    from leftward.inspection.heads import head_scores as head_scores
    from leftward.inspection.heads import stream_statistics as stream_statistics
    from leftward.inspection.interventions import activation_patching as activation_patching
    from leftward.inspection.lens import logit_lens as logit_lens
    from leftward.inspection.trace import Trace as Trace
    from leftward.inspection.trace import trace as trace
    from leftward.language_model import LanguageModel as LanguageModel
    from leftward.language_model import load as load
    from leftward.model.decoder import Decoder as Decoder
    from leftward.planning import plan as plan
    from leftward.presets import preset as preset
    from leftward.proofs.checking import check as check
    from leftward.runs import Run as Run
    from leftward.runs import resume as resume
    from leftward.runs import train as train
    from leftward.text.tokenizer import Tokenizer as Tokenizer
    from leftward.training.progress import Observer as Observer
    from leftward.training.recipe import Recipe as Recipe

__version__ = "0.1.0"

_HOME = {
    "Completion": "leftward.generation.completions",
    "Config": "leftward.config",
    "Contrastive": "leftward.generation.contrastive",
    "Decoder": "leftward.model.decoder",
    "Engine": "leftward.generation.engine",
    "LanguageModel": "leftward.language_model",
    "Observer": "leftward.training.progress",
    "Recipe": "leftward.training.recipe",
    "Request": "leftward.generation.requests",
    "Run": "leftward.runs",
    "Sampler": "leftward.generation.settings",
    "Sampling": "leftward.generation.settings",
    "Tokenizer": "leftward.text.tokenizer",
    "Trace": "leftward.inspection.trace",
    "activation_patching": "leftward.inspection.interventions",
    "check": "leftward.proofs.checking",
    "entropies": "leftward.inspection.heads",
    "head_scores": "leftward.inspection.heads",
    "load": "leftward.language_model",
    "logit_attribution": "leftward.inspection.attribution",
    "logit_lens": "leftward.inspection.lens",
    "plan": "leftward.planning",
    "preset": "leftward.presets",
    "resume": "leftward.runs",
    "stream_statistics": "leftward.inspection.heads",
    "trace": "leftward.inspection.trace",
    "train": "leftward.runs",
}

__all__ = [
    "Completion",
    "Config",
    "Contrastive",
    "Decoder",
    "Engine",
    "LanguageModel",
    "Observer",
    "Recipe",
    "Request",
    "Run",
    "Sampler",
    "Sampling",
    "Tokenizer",
    "Trace",
    "__version__",
    "activation_patching",
    "check",
    "entropies",
    "head_scores",
    "load",
    "logit_attribution",
    "logit_lens",
    "plan",
    "preset",
    "resume",
    "stream_statistics",
    "trace",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
