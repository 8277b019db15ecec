"""A run that begins from a model: what its recipe leaves open is the model's, and what the model isn't is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leftward.config import Config, ConfigError
from leftward.errors import UserError
from leftward.formats.loading import Loaded, open_config, open_model, shortened, with_context
from leftward.formats.model_directory import build_decoder
from leftward.formats.peft import save_adapter, why_no_adapter
from leftward.model.decoder import Decoder
from leftward.model.lora import A, adapt, is_adapter, merged
from leftward.planner import count_parameters
from leftward.text.tokenizer import Tokenizer
from leftward.training.optim import Optimizer
from leftward.training.precision import check_fits
from leftward.training.recipe import LoraSection, Recipe
from leftward.training.size import micro_batch

ADAPTER = "adapter"
_MAX_SEQ_LEN = 512  # of a training sequence, where the recipe says nothing: a context of 128k fits no laptop
# What a run may set as it likes: the others are in the weights.
_FREE = ("max_seq_len", "dropout")


def settled(recipe: Recipe) -> Recipe:
    """`recipe` with the architecture, and what follows from it, of the model that it begins from; as it is where it
    begins from nothing. Reads no weights.

    Raises:
        UserError: there is no such model, or the recipe contradicts it.
    """
    return recipe if recipe.init_from is None else _settled(recipe, _path(recipe.init_from))[0]


def _settled(recipe: Recipe, path: str) -> tuple[Recipe, Config]:
    own = open_config(path)
    given = {name: value for name, value in recipe.model.items() if value is not None}
    context = given.get("max_seq_len", own.max_seq_len)
    if type(context) is not int or not 1 <= context <= own.max_seq_len:
        raise UserError(f"recipe: model.max_seq_len is {context!r}: {path} has a context of {own.max_seq_len}")
    own = with_context(own, context)
    wrong = [name for name, value in given.items() if name not in _FREE and not _says(own, name, value)]
    if wrong:
        listed = ", ".join(f"model.{name} is {given[name]!r} and there {getattr(own, name)!r}" for name in wrong)
        raise UserError(f"recipe: {listed}: the architecture is that of {path}, so leave it out")
    try:
        config = Config.from_dict({**own.to_dict(), "dropout": given.get("dropout", own.dropout)})
    except ConfigError as error:
        raise UserError(f"recipe: model.{error}") from None
    training = recipe.training
    seq_len = training.seq_len or min(context, _MAX_SEQ_LEN)
    if seq_len > context:
        raise UserError(f"recipe: training.seq_len {seq_len} is above the context of {context}")
    micro = training.micro_batch_size or micro_batch(config, seq_len, training.batch_size)
    fields = {name: value for name, value in config.to_dict().items() if name != "vocab_size"}
    sections = {
        "init_from": path,
        "model": fields,
        "training": training.model_copy(update={"seq_len": seq_len, "micro_batch_size": micro}),
    }
    return recipe.model_copy(update=sections), config


def _says(config: Config, name: str, value: Any) -> bool:
    try:
        return bool(getattr(Config.from_dict({**config.to_dict(), name: value}), name) == getattr(config, name))
    except ConfigError:
        return False


def _path(name: str) -> str:
    """The same wherever the run goes on."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


@dataclass(frozen=True)
class Base:
    """The model that a run begins from."""

    recipe: Recipe
    """Settled."""
    decoder: Decoder
    """To be trained: with fp32 weights of its own, or with LoRA frozen ones as they are stored and fp32 adapters."""
    frozen: dict[str, Tensor]
    """With LoRA the model's weights, whatever becomes of those in the decoder."""
    tokenizer: Tokenizer
    generation: dict[str, Any]
    model_type: str | None
    fingerprint: str
    """Of weights, architecture and tokenizer: whatever else is in its files may change."""

    @classmethod
    def open(cls, recipe: Recipe) -> Base:
        """Raises: UserError: there is no such model, the recipe contradicts it, or this machine can't hold it."""
        assert recipe.init_from is not None
        path = _path(recipe.init_from)
        recipe, config = _settled(recipe, path)
        lora, total = recipe.lora, count_parameters(config).total
        check_fits(recipe, *((total, 0) if lora.rank is None else (_count_adapters(config, lora), total)))
        loaded = open_model(path, torch.float32 if lora.rank is None else None)
        if loaded.tokenizer is None:
            raise UserError(f"{path} has no tokenizer: put its files beside the weights")
        state = shortened(loaded.decoder, config.max_seq_len).state_dict()
        if lora.rank is None:  # the files' memory is not written to
            state = {name: weight.clone() for name, weight in state.items()}
        decoder = build_decoder(config, state).train()
        if lora.rank is not None:
            torch.manual_seed(recipe.seed)
            adapt(decoder, lora.targets, lora.rank, lora.scale * lora.rank, lora.dropout)
        return cls(
            recipe=recipe,
            decoder=decoder,
            frozen={} if lora.rank is None else state,
            tokenizer=loaded.tokenizer,
            generation=loaded.generation,
            model_type=loaded.model_type,
            fingerprint=_fingerprint(loaded),
        )

    @property
    def config(self) -> Config:
        return self.decoder.config

    @property
    def n_learning(self) -> int:
        """Parameters that are trained."""
        return sum(weight.numel() for weight in self.decoder.parameters() if weight.requires_grad)

    def whole(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """All weights of the model whose learned ones are `weights`."""
        return merged(self.frozen, weights, self.recipe.lora.scale) if self.frozen else weights

    def describe_lora(self, optimizer: Optimizer) -> list[str]:
        """What trains and what it takes, in lines for people; none without LoRA."""
        lora, frozen = self.recipe.lora, [weight for weight in self.decoder.parameters() if not weight.requires_grad]
        if lora.rank is None:
            return []
        lines = [
            f"LoRA: {self.n_learning:,} of {self.decoder.n_parameters:,} parameters train, rank {lora.rank} on "
            f"{', '.join(lora.targets)}; with gradients and averages they take {optimizer.nbytes / 1e6:,.1f} MB, "
            f"and the frozen ones {sum(weight.nbytes for weight in frozen) / 1e6:,.1f} MB"
        ]
        if (reason := self._why_no_adapter(optimizer.masters)) is not None:
            lines.append(f"{reason}: only the merged model is written, and no adapter for PEFT")
        return lines

    def _why_no_adapter(self, names: Iterable[str]) -> str | None:
        modules = [name.removesuffix(A) for name in names if name.endswith(A)]
        return why_no_adapter(self.config, modules, self.model_type)

    def save_adapter(self, directory: Path, weights: dict[str, Tensor]) -> None:
        """Write the adapters for PEFT, where it has a place for them. Raises: UserError, where the disk refuses."""
        lora = self.recipe.lora
        if lora.rank is None or self._why_no_adapter(weights) is not None:
            return
        save_adapter(
            directory / ADAPTER,
            self.config,
            weights,
            rank=lora.rank,
            alpha=lora.scale * lora.rank,
            dropout=lora.dropout,
            base=str(self.recipe.init_from),
            model_type=self.model_type,
        )


def _count_adapters(config: Config, lora: LoraSection) -> int:
    """Numbers in all adapters. Raises: UserError, where a target is none."""
    assert lora.rank is not None
    with torch.device("meta"):
        decoder = Decoder(config)
        adapt(decoder, lora.targets, lora.rank, 1.0, 0.0)
    return sum(weight.numel() for name, weight in decoder.named_parameters() if is_adapter(name))


def _fingerprint(loaded: Loaded) -> str:
    assert loaded.tokenizer is not None
    state = loaded.decoder.state_dict()
    with ThreadPoolExecutor() as pool:  # hashing leaves Python's lock
        digests = pool.map(_digest, state.values())
    values = [loaded.decoder.config.to_dict(), loaded.tokenizer.fingerprint(), dict(zip(state, digests, strict=True))]
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def _digest(tensor: Tensor) -> str:
    numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(numbers.data, digest_size=16).hexdigest()
