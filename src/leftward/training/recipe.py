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
from leftward.training import size as sizes

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
    and .parquet, each also as .gz or .zst. Or a directory that `leftward data prepare` has made."""
    mix: dict[str, Annotated[float, Field(gt=0)]] | None = None
    """Instead of path: several directories that `leftward data prepare` has made, each with a weight. Tokens are drawn
    in this proportion: {data/web: 0.7, data/code: 0.3}."""
    packing: Literal["concatenate", "documents"] = "concatenate"
    """What a training sequence is. concatenate: a window on all documents one behind the other, each of which sees the
    ones before it. documents: whole documents, as they fit, which don't see each other."""
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
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Decides which documents are held out. null: as `seed` does; a number holds them fixed where that varies."""
    dedup: Literal["none", "exact", "near"] = "none"
    """Leave out documents that are copies of another one: exact ones; near ones too (pip install 'leftward[dedup]')."""


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


class LoraSection(Section):
    """Train a few directions beside matrices that stay as they are: LoRA (Hu et al. 2021, arXiv 2106.09685)."""

    rank: Annotated[int, Field(ge=1)] | None = None
    """Directions a matrix: 8, say; only with init_from. null: no LoRA, all weights train."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """What is added counts alpha / rank times. null: twice the rank."""
    targets: Annotated[list[str], Field(min_length=1)] = ["qkv", "o", "up", "down"]
    """Which linears, by the end of their names: qkv, o, up (gate and up), down, router, head; of one layer:
    blocks.0.attn.qkv. The others, and all that is no matrix, stay as they are."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of what the added directions read."""

    @property
    def scale(self) -> float:
        """What the product of the two small matrices is multiplied by."""
        return 2.0 if self.alpha is None or self.rank is None else self.alpha / self.rank


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
    """Optimizer steps. null: as many as fit in `minutes` or `max_epochs`."""
    max_epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Times through the training text after which the run ends, where max_steps does not end it sooner. Of a mixture,
    through whichever comes round first."""
    minutes: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Wall time to train for; the number of steps is settled from the measured speed when the decay has to begin.
    null, and no other end either: 5."""
    seq_len: Annotated[int, Field(ge=1)] | None = None
    """Tokens in a training sequence. null: the model's max_seq_len."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Sequences in an optimizer step."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Sequences in memory at a time; the rest of the batch is accumulated. null: all."""
    eval_interval: Annotated[int, Field(ge=0)] | None = None
    """Steps between evaluations over the whole validation split. null: ten over the run; 0: only at the end."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """End the run after so many evaluations in a row without a better one. null: never."""
    sample_prompts: list[str] = []
    """Texts that the model goes on with after each evaluation, into RUN/samples.jsonl. "": a new text."""
    save_interval: Annotated[int, Field(ge=1)] | None = None
    """Steps between checkpoints. null: at each evaluation, and at least every 2 minutes."""
    keep: Annotated[int, Field(ge=1)] = 1
    """Checkpoints that stay: so many of the newest. May be changed between the sessions of a run."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """A checkpoint at every so many steps, which stays whatever becomes newer. May be changed likewise. null: none."""
    skip_spikes: Annotated[float, Field(gt=0)] | None = None
    """Leave out a step whose loss or gradient norm is more than so many standard deviations (6, say) above the mean of
    the last 128 steps, as OLMo does; the first 64 are all taken. null: leave out none."""
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
        if isinstance(values, dict) and all(values.get(end) is None for end in ("max_steps", "max_epochs", "minutes")):
            return {**values, "minutes": 5.0}
        return values


class ParallelSection(Section):
    """How a model is spread over the ranks that torchrun starts (docs/scale-out.md): weights and rows of the batch over
    all of them, unless said otherwise. May be changed between the sessions of a run."""

    tensor: Annotated[int, Field(ge=1)] = 1
    """Ranks that share out the heads and hidden units of each layer, and the tokens between them: those of a node."""
    replicate: Annotated[int, Field(ge=1)] = 1
    """Groups of ranks that have the whole model each, so that weights are gathered within a group only."""
    recompute: Literal["none", "blocks"] = "none"
    """blocks: keep only what goes into each block for the backward pass, and compute its inside again: less memory for
    a third more time. In one process too."""


class LoggingSection(Section):
    """Who is told of a run beside metrics.jsonl. May be changed between the sessions of a run."""

    trackers: list[Literal["tensorboard", "wandb"]] = []
    """tensorboard: into RUN/tensorboard. wandb: Weights & Biases, as `wandb login` and its environment variables say.
    Each needs its extra: pip install 'leftward[tensorboard]'."""
    project: str = "leftward"
    """wandb only: where the run is listed."""


class Recipe(Section):
    """A training run. `Recipe.from_dict` gives errors for people; the constructor gives pydantic's."""

    out: str | None = None
    """The run directory. null: runs/ and the name of the data, numbered."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    size: int | str | None = None
    """About how many parameters: 10M, 1.5B. Settles what is left open of vocabulary, shape, batch, rates and length
    (docs/training.md); what it settled stands below like anything that was given."""
    init_from: str | None = None
    """Begin from this model and its tokenizer: a run or model directory, .gguf, .bin or owner/name on the hub. null:
    from nothing."""
    lora: LoraSection = LoraSection()
    data: DataSection = DataSection()
    tokenizer: TokenizerSection = TokenizerSection()
    model: dict[str, Any] = {}
    """The architecture: fields of Config, or `preset` and a name from `leftward plan --list`, whose fields the others
    are laid over. vocab_size comes from the tokenizer. With init_from it is that model's; max_seq_len may be shorter,
    and dropout another."""
    training: TrainingSection = TrainingSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    parallel: ParallelSection = ParallelSection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, values: Any) -> Any:
        """So that the saved recipe says what is trained, whatever presets and the rules of sizes become later."""
        if not isinstance(values, dict):
            return values
        values = with_preset(values)
        if values.get("init_from") is not None:
            return _with_defaults(values, fine_tuning(values))
        if values.get("size") is None:
            return values
        try:
            return sizes.spelled_out(values)
        except ConfigError as error:
            raise ValueError("; ".join(_model_problems(error))) from None
        except UserError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _fields_agree(self) -> Recipe:
        training, schedule = self.training, self.schedule
        problems = []
        for end in ("max_steps", "max_epochs"):
            if getattr(training, end) is not None and training.minutes is not None:
                problems.append(
                    f"training.{end} and training.minutes both say when to end: give one, and null for the other"
                )
        if training.patience is not None and training.eval_interval == 0:
            problems.append(
                "training.patience counts evaluations, and with eval_interval 0 there is one: set it higher"
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
            problems.append(
                "optimizer.lr is Muon's: with optimizer.name adamw set optimizer.adamw_lr, and leave optimizer.lr at "
                f"{OptimizerSection().lr}"
            )
        if self.data.mix is not None and self.data.path is not None:
            problems.append("data.path and data.mix both say what to train on: give one, and null for the other")
        if not _as_tuple(self.data.path or list(self.data.mix or ())) or "" in _as_tuple(self.data.path):
            problems.append("data.path is missing: give the text to train on (--data PATH)")
        if "vocab_size" in self.model:
            problems.append("model.vocab_size comes from the tokenizer: set tokenizer.vocab_size")
        problems += self._beginning_problems()
        try:
            config = self.config(vocab_size=1) if self.is_settled else None
        except ConfigError as error:
            problems += _model_problems(error)
        else:
            if config and training.seq_len is not None and training.seq_len > config.max_seq_len:
                problems.append(f"training.seq_len {training.seq_len} is above model.max_seq_len {config.max_seq_len}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _beginning_problems(self) -> list[str]:
        """What does not go with init_from, or without it."""
        if self.init_from is None:
            lora = self.lora.model_dump(exclude_defaults=True)
            return [f"lora.{name} is for a run that begins from a model: set init_from (--from)" for name in lora][:1]
        problems = [] if self.size is None else ["size is for a new model: with init_from leave it out"]
        if self.lora.rank is None and self.lora != LoraSection():
            problems.append("lora.rank is missing, without which lora's other fields have no effect: 8, say")
        problems += [
            f"tokenizer.{name} has no effect with init_from, whose tokenizer is taken: leave it out"
            for name in self.tokenizer.model_dump(exclude_defaults=True)
        ]
        fields = {field.name for field in dataclasses.fields(Config)}
        unknown = [key for key in self.model if key not in fields]
        return problems + [f"unknown key model.{key}: {nearest(key, fields)}" for key in unknown]

    @property
    def is_settled(self) -> bool:
        """Whether `model` says the whole architecture: with init_from only once that was opened (finetuning.py)."""
        fields = {field.name for field in dataclasses.fields(Config)} - {"vocab_size"}
        return self.init_from is None or fields <= self.model.keys()

    def config(self, vocab_size: int) -> Config:
        return Config.from_dict({**self.model, "vocab_size": vocab_size})

    def fingerprint(self) -> str:
        """Equal for recipes that give the same run, wherever and however much of it is kept, and whoever is told of it.

        Of what is not at its default, so that fields that are added later change no fingerprint.
        """
        training = self.training.model_copy(update={"keep": 1, "keep_every": None})
        same = self.model_copy(update={"training": training})
        values = same.model_dump(
            exclude={"out", "size", "init_from", "model", "parallel", "logging"}, exclude_defaults=True
        )
        default = Config(vocab_size=1).to_dict()
        values["model"] = {k: v for k, v in self.config(vocab_size=1).to_dict().items() if v != default[k]}
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def seq_len(self) -> int:
        """Tokens in a training sequence."""
        return self.training.seq_len or self.config(vocab_size=1).max_seq_len

    @property
    def split_seed(self) -> int:
        """Decides which documents are held out."""
        return self.seed if self.data.seed is None else self.data.seed

    def data_settings(self) -> Settings:
        """What the data floor needs of this recipe."""
        return Settings(
            paths=_as_tuple(self.data.path or list(self.data.mix or ())),
            val_paths=_as_tuple(self.data.val_path),
            text_field=self.data.text_field,
            document_separator=self.data.document_separator,
            bad_lines=self.data.bad_lines,
            val_fraction=self.data.val_fraction,
            dedup=self.data.dedup,
            tokenizer=self.tokenizer.kind,
            vocab_size=self.tokenizer.vocab_size,
            special_tokens=tuple(self.tokenizer.special_tokens),
            byte_fallback=self.tokenizer.byte_fallback,
        )

    def check_takes_prepared(self, path: str) -> None:
        """Raises: UserError where a field says how to prepare text, and the directory `path` holds tokens already."""
        data, tokenizer = ({**section.model_dump(exclude_defaults=True)} for section in (self.data, self.tokenizer))
        asked = [f"data.{name}" for name in data if name not in ("path", "mix", "packing")]
        # A size asks for a vocabulary too, but as a wish.
        asked += [f"tokenizer.{name}" for name in tokenizer if name != "vocab_size" or self.size is None]
        if asked:
            raise UserError(
                f"{path} is prepared already, so {asked[0]} has no effect: leave it out, or prepare the text again "
                "with it (leftward data prepare)"
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


def read_recipe(name: Path | str) -> dict[str, Any]:
    """The fields of a .yaml file, or of the recipe of this name that comes with leftward. Raises: UserError."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return read_yaml(path)
    ours = recipes()
    if str(name) in ours:
        return read_yaml(ours[str(name)])
    raise UserError(
        f"{name} is neither a recipe file (.yaml) nor one that comes with leftward ({', '.join(ours)}): text to train "
        "on goes behind --data, a glob in quotes, and settings are written key.sub=value without spaces"
    )


def recipes() -> dict[str, Path]:
    """The recipes that come with leftward, by name."""
    # The wheel has them inside the package, a checkout beside src/.
    package = Path(__file__).parents[1]
    directory = next((d for d in (package / "recipes", package.parents[1] / "recipes") if d.is_dir()), package)
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


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


def fine_tuning(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What is left open means another thing where a run begins from a model: measured, see docs/fine-tuning.md.

    Args:
        values: the fields of a recipe with init_from, as people give them.

    Returns:
        sections → fields → values
    """
    given = (values.get(name) for name in ("lora", "optimizer"))
    lora, optimizer = (section if isinstance(section, Mapping) else {} for section in given)
    rates = {"adamw_lr": 1e-4} if lora.get("rank") is None else {"adamw_lr": 2e-3}
    if optimizer.get("name") == "muon":
        rates |= {"lr": 2e-3}
    return {"training": {"batch_size": 8}, "optimizer": {"name": "adamw", **rates}}


def _with_defaults(values: dict[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`values` over `defaults`, section by section. What is no section is left for validation to refuse."""
    result = dict(values)
    for name, fields in defaults.items():
        section = values.get(name)
        if isinstance(section, BaseModel):
            continue
        if section is None or isinstance(section, Mapping):
            result[name] = {**fields, **(section or {})}
    return result


def with_preset(values: dict[str, Any]) -> dict[str, Any]:
    """`model.preset` spelled out. Raises: ValueError, as pydantic wants it."""
    model = values.get("model")
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


def _model_problems(error: ConfigError) -> list[str]:
    """A Config's problems with its fields as a recipe names them."""
    unknown = "unknown key "
    return [
        f"{unknown}model.{problem.removeprefix(unknown)}" if problem.startswith(unknown) else f"model.{problem}"
        for problem in str(error).split("; ")
    ]


def _as_tuple(paths: Paths | None) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else tuple(paths or ())


def _explain(problem: Any) -> str:
    """One of pydantic's errors in one line, with the key as the user writes it."""
    place = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        *section, name = place  # as people wrote it, whatever that is
        elsewhere = [f"{other}.{name}" for other in _SECTIONS if name in _fields_of([other])]
        meant = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else nearest(name, _fields_of(section))
        return f"unknown key {'.'.join(place)}: {meant}"
    # Members of a union ("str", "list[str]", "constrained-int") stand in the location like keys; ours are identifiers.
    place = [part for part in place if re.fullmatch(r"\w+", part) and part not in ("str", "int", "float", "list")]
    key = ".".join(place)
    message: str = problem["msg"].removeprefix("Value error, ")
    if not key:
        return message
    return f"{key} is {problem['input']!r}: {message[0].lower()}{message[1:]}"


_SECTIONS = ("lora", "data", "tokenizer", "model", "training", "optimizer", "schedule", "parallel", "logging")


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
            yield ""
            yield from (f"{indent}# {line.strip()}" for line in (type(value).__doc__ or "").splitlines())
            yield f"{indent}{name}:"
            yield from _commented(value, indent + "  ")
            continue
        for line in (field.description or "").splitlines():
            yield f"{indent}# {line.strip()}"
        if accepted := _type_name(field.annotation):
            yield f"{indent}# {accepted}; default {_scalar(field.default)}"
        if name == "model" and getattr(section, "is_settled", True):
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
        return "list of " + _type_name(typing.get_args(annotation)[0]).removeprefix("one of ")
    if typing.get_origin(annotation) is dict:
        value = typing.get_args(annotation)[1]
        return "" if value is Any else f"mapping to {_type_name(value)}"
    return str(getattr(annotation, "__name__", annotation))
