"""Recipe: everything that a training run depends on, as one validated value that YAML files and the command line fill.

A recipe with a seed gives one result. Unknown keys and wrong types are refused, naming the key and the nearest valid
one. No torch in here: `--help` and a wrong recipe answer at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from leftward.config import Config, ConfigError, field_meanings
from leftward.data.settings import Settings
from leftward.errors import UserError, nearest
from leftward.overrides import YAML_FAULTS, parse_yaml
from leftward.presets import preset_settings

Fraction = Annotated[float, Field(ge=0, le=1)]
Paths = str | list[str]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class DataSection(Section):
    """What text to learn from."""

    path: Paths | None = None
    """A file, directory, glob, "-" (standard input), "builtin:python-reference", or a list of them. Plain text, .jsonl
    and .parquet, each also as .gz or .zst."""
    val_path: Paths | None = None
    """Text to validate on; without it, a part of `path` is held out."""
    text_field: str = "text"
    """The field of .jsonl and the column of .parquet that holds the text."""
    document_separator: str | None = None
    """Text that ends a document inside a file, for instance "<|endoftext|>". Without it a text file is one document."""
    bad_lines: Literal["stop", "skip"] = "stop"
    """What to do with a line of .jsonl that cannot be read: stop and name it, or skip and count it."""
    val_fraction: Fraction = 0.1
    """The share of the text held out for validation, by whole documents (the tail, where there is only one)."""


class TokenizerSection(Section):
    """How text becomes tokens."""

    kind: Literal["bpe", "char", "word"] = "bpe"
    """bpe: byte-level byte-pair encoding, fits any text. char: one token a character. word: one token a word."""
    vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Tokens in the vocabulary. null: chosen from the amount of text."""
    special_tokens: list[str] = ["<|endoftext|>"]
    """Control tokens, which text can never produce. The first one begins and separates documents."""
    byte_fallback: bool = True
    """word only: spell unknown words as bytes (256 more tokens) instead of refusing them."""


class OptimizerSection(Section):
    """How gradients move weights."""

    name: Literal["muon", "adamw"] = "muon"
    """muon: Muon (Jordan et al. 2024) for the matrices of the blocks and AdamW for the rest. adamw: AdamW for all."""
    lr: Annotated[float, Field(gt=0)] = 0.02
    """Peak learning rate of Muon; unused with adamw."""
    adamw_lr: Annotated[float, Field(gt=0)] = 0.01
    """Peak learning rate of AdamW."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Muon's Nesterov momentum."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """AdamW's decay rates of the first and second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay of the matrices of the blocks. Norms, biases and embeddings are never decayed."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """The largest norm of the whole gradient. 0: unlimited."""


class ScheduleSection(Section):
    """The learning rate over the run, as a fraction of its peak."""

    decay: Literal["trapezoid", "cosine", "constant"] = "trapezoid"
    """trapezoid: hold the peak, then fall linearly (Hägele et al. 2024, arXiv 2405.18392). cosine: Loshchilov and
    Hutter 2017, arXiv 1608.03983."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps of linear rise; the last of them is at the peak. null: 10, or a tenth of a shorter run."""
    decay_fraction: Fraction = 0.6
    """trapezoid only: the part of the run that falls."""
    final_fraction: Fraction = 0.0
    """Where the fall ends, as a fraction of the peak."""


class TrainingSection(Section):
    """How long, in what portions, and in which arithmetic."""

    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps. null: as many as fit in `minutes`."""
    minutes: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Wall time to train for; the number of steps is settled from the measured speed when the decay has to begin.
    null, and no max_steps either: 5."""
    seq_len: Annotated[int, Field(ge=1)] | None = None
    """Tokens in a training sequence. null: the model's max_seq_len."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Sequences in an optimizer step."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Sequences in memory at a time; the rest of the batch is accumulated. null: all."""
    eval_interval: Annotated[int, Field(ge=0)] | None = None
    """Steps between evaluations over the whole validation split. null: ten over the run; 0: only at the end."""
    save_interval: Annotated[int, Field(ge=1)] | None = None
    """Steps between checkpoints. null: at each evaluation, and at least every 2 minutes."""
    balance_loss: Annotated[float, Field(ge=0)] = 0.01
    """What the loss is charged for experts that are used unevenly (Fedus et al. 2021, arXiv 2101.03961); only where
    model.n_experts is above 0. Reported losses leave it out."""
    log_interval: Annotated[int, Field(ge=1)] = 10
    """Steps between lines of metrics.jsonl."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Arithmetic of the forward and backward pass (weights, optimizer and statistics are always fp32). auto: whichever
    is measured to be faster here when the run starts."""
    compile: bool = False
    """Compile the model with torch.compile; where that fails, the plain path is taken and said."""

    @model_validator(mode="before")
    @classmethod
    def _has_an_end(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("max_steps") is None and values.get("minutes") is None:
            return {**values, "minutes": 5.0}
        return values


class Recipe(Section):
    """A training run. `Recipe.from_dict` gives errors for people; the constructor gives pydantic's."""

    out: str | None = None
    """The run directory. null: runs/ and the name of the data, numbered."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    data: DataSection = DataSection()
    tokenizer: TokenizerSection = TokenizerSection()
    model: dict[str, Any] = {}
    """The architecture: fields of Config, or `preset` and a name from `leftward plan --list`, whose fields the others
    are laid over. vocab_size comes from the tokenizer."""
    training: TrainingSection = TrainingSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()

    @model_validator(mode="before")
    @classmethod
    def _preset_spelled_out(cls, values: Any) -> Any:
        """So that the saved recipe says what the model is, whatever presets become later."""
        model = values.get("model") if isinstance(values, dict) else None
        if not isinstance(model, dict) or "preset" not in model:
            return values
        try:
            preset = preset_settings(model["preset"])
        except UserError as error:
            raise ValueError(f"model.preset: {error}") from None
        fields = {**preset, **{key: value for key, value in model.items() if key != "preset"}}
        if "vocab_size" not in model:
            fields.pop("vocab_size", None)
        return {**values, "model": fields}

    @model_validator(mode="after")
    def _fields_agree(self) -> Recipe:
        training, schedule = self.training, self.schedule
        problems = []
        if training.max_steps is not None and training.minutes is not None:
            problems.append(
                "training.max_steps and training.minutes both say when to end: give one, and null for the other"
            )
        if training.minutes is not None and schedule.decay == "cosine":
            problems.append("training.minutes needs schedule.decay trapezoid or constant: a cosine must know its end")
        if training.max_steps is not None and (schedule.warmup_steps or 0) > training.max_steps:
            problems.append(
                f"schedule.warmup_steps {schedule.warmup_steps} is more than training.max_steps {training.max_steps}"
            )
        micro = training.micro_batch_size
        if micro is not None and training.batch_size % micro:
            problems.append(f"training.batch_size {training.batch_size} is not divisible by micro_batch_size {micro}")
        if self.optimizer.name == "adamw" and self.optimizer.lr != OptimizerSection().lr:
            problems.append("optimizer.lr is Muon's: with optimizer.name adamw set optimizer.adamw_lr")
        if not _as_tuple(self.data.path) or "" in _as_tuple(self.data.path):
            problems.append("data.path is missing: give the text to train on (--data PATH)")
        if "vocab_size" in self.model:
            problems.append("model.vocab_size comes from the tokenizer: set tokenizer.vocab_size")
        try:
            config = self.config(vocab_size=1)
        except ConfigError as error:
            unknown = "unknown key "
            problems += [
                f"{unknown}model.{problem.removeprefix(unknown)}" if problem.startswith(unknown) else f"model.{problem}"
                for problem in str(error).split("; ")
            ]
        else:
            if training.seq_len is not None and training.seq_len > config.max_seq_len:
                problems.append(f"training.seq_len {training.seq_len} is above model.max_seq_len {config.max_seq_len}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def config(self, vocab_size: int) -> Config:
        return Config.from_dict({**self.model, "vocab_size": vocab_size})

    def fingerprint(self) -> str:
        """Equal for recipes that give the same run, wherever it is kept."""
        values = {**self.model_dump(exclude={"out"}), "model": self.config(vocab_size=1).to_dict()}
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def seq_len(self) -> int:
        """Tokens in a training sequence."""
        return self.training.seq_len or self.config(vocab_size=1).max_seq_len

    def data_settings(self) -> Settings:
        """What the data floor needs of this recipe."""
        return Settings(
            paths=_as_tuple(self.data.path),
            val_paths=_as_tuple(self.data.val_path),
            text_field=self.data.text_field,
            document_separator=self.data.document_separator,
            bad_lines=self.data.bad_lines,
            val_fraction=self.data.val_fraction,
            tokenizer=self.tokenizer.kind,
            vocab_size=self.tokenizer.vocab_size,
            special_tokens=tuple(self.tokenizer.special_tokens),
            byte_fallback=self.tokenizer.byte_fallback,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Raises: UserError naming every problem, and the nearest valid key of each unknown one."""
        try:
            return cls.model_validate(dict(values))
        except pydantic.ValidationError as error:
            problems = [_explain(problem) for problem in error.errors()]
            raise UserError("recipe: " + "; ".join(dict.fromkeys(problems))) from None

    def to_yaml(self) -> str:
        """The recipe whole, each field with its meaning as a comment."""
        return "\n".join(_commented(self)) + "\n"


def read_yaml(path: Path) -> dict[str, Any]:
    """Raises: UserError where the file is missing or is not a YAML mapping."""
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no recipe at {path}") from None
    except OSError as error:
        raise UserError(f"cannot read the recipe {path}: {error.strerror}") from None
    except YAML_FAULTS as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path} is not a recipe: it must be a mapping of names to values")
    return values


def _as_tuple(paths: Paths | None) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else tuple(paths or ())


def _explain(problem: Any) -> str:
    """One of pydantic's errors in one line, with the key as the user writes it."""
    # Members of a union ("str", "list[str]", "constrained-int") stand in the location like keys; ours are identifiers.
    place = [str(part) for part in problem["loc"] if re.fullmatch(r"\w+", str(part))]
    place = [part for part in place if part not in ("str", "int", "float", "list")]
    key = ".".join(place)
    if problem["type"] == "extra_forbidden":
        fields = _fields_of(place[:-1])
        elsewhere = [f"{name}.{place[-1]}" for name in _SECTIONS if place[-1] in _fields_of([name])]
        if elsewhere:
            return f"unknown key {key}: did you mean {' or '.join(elsewhere)}?"
        return f"unknown key {key}: {nearest(place[-1], fields)}"
    message = problem["msg"].removeprefix("Value error, ")
    if not key:
        return message
    return f"{key} is {problem['input']!r}: {message[0].lower()}{message[1:]}"


_SECTIONS = ("data", "tokenizer", "model", "training", "optimizer", "schedule")


def _fields_of(place: list[str]) -> list[str]:
    """The valid keys at a place in the recipe."""
    if not place:
        return list(Recipe.model_fields)
    if place[0] == "model":
        return [field.name for field in dataclasses.fields(Config)]
    section = Recipe.model_fields[place[0]].annotation
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, Section) else []


def _commented(section: Section, indent: str = "") -> Iterable[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield f"\n{indent}# {type(value).__doc__}"
            yield f"{indent}{name}:"
            yield from _commented(value, indent + "  ")
            continue
        for line in (field.description or "").splitlines():
            yield f"{indent}# {line.strip()}"
        if accepted := _type_name(field.annotation):
            yield f"{indent}# {accepted}; default {_scalar(field.default)}"
        if name == "model":
            yield f"{indent}model:"
            yield from _commented_model(value)
        else:
            yield f"{indent}{name}: {_scalar(value)}"


def _commented_model(values: dict[str, Any]) -> Iterable[str]:
    """Every field of the Config that `values` make; vocab_size is left to the tokenizer."""
    settled = Config.from_dict({**values, "vocab_size": 1}).to_dict()
    meanings = field_meanings()
    for field in dataclasses.fields(Config):
        if field.name == "vocab_size":
            continue
        for line in meanings.get(field.name, "").splitlines():
            yield f"  # {line.strip()}"
        choices = typing.get_type_hints(Config)[field.name]
        is_derived = values.get(field.name) is None and field.default is None
        default = _scalar(field.default) + (f", here {settled[field.name]}" if is_derived else "")
        yield f"  # {_type_name(choices)}; default {default}"
        # What follows from other fields stays open, so that changing those in a copy changes it too.
        yield f"  {field.name}: {'null' if is_derived else _scalar(settled[field.name])}"


def _scalar(value: Any) -> str:
    """`value` as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True).removesuffix("...\n").strip()


def _type_name(annotation: Any) -> str:
    """A type as a reader of YAML would say it: "int or null", "one of bpe, char, word"."""
    if annotation is type(None):
        return "null"
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(typing.get_args(annotation))
    if typing.get_origin(annotation) is Annotated:
        return _type_name(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        return f"list of {typing.get_args(annotation)[0].__name__}"
    return "" if typing.get_origin(annotation) is dict else str(getattr(annotation, "__name__", annotation))
