"""One dial: a number of parameters → vocabulary, shape, batch, rates and length of a run. Arithmetic, no torch.

What is given is kept, and what is derived follows from it: with `n_layers` given, the width is the one that meets the
size. Each rule has its source beside it; docs/training.md has them in a table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from leftward.config import Config
from leftward.errors import UserError
from leftward.planner import count_activations, count_parameters

TOLERANCE = 0.1
"""How far a model may be from its size, as a share of it."""

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_SMALLEST, _LARGEST = 100_000, 10**13

# (up to this width, width of a head, widths are multiples of). Heads of 64 as in GPT-2, of 128 as in Llama, and from
# there on an even number of them.
_HEADS = ((96, 16, 16), (256, 32, 32), (2048, 64, 128), (math.inf, 128, 512))
# Beyond so many heads keys and values are shared, by some eight: grouped-query attention as Llama 3 has it.
_UNSHARED_HEADS, _KV_HEADS = 16, 8
# Tokens a parameter: Hoffmann et al. 2022 (arXiv 2203.15556); Besiroglu et al. 2024 (scaling_laws.py) agree with it.
_TOKENS_PER_PARAMETER = 20
# Text repeated up to four times teaches nearly what new text would (Muennighoff et al. 2023, arXiv 2305.16264).
_MAX_EPOCHS = 4.0
# What a pass may keep for the backward pass, in bytes, in bf16: as much as weights, gradients and two
# averages take, since a machine must have that, within these bounds.
_LEAST_KEPT, _MOST_KEPT = 1 << 30, 8 << 30
# How far the feed-forward's width may move from its rule so that the model meets its size.
_FEED_FORWARD_PLAY = 0.25
# Without a known vocabulary: what train_word takes at most with its bytes; an alphabet.
_OTHER_VOCABULARIES = {"word": 16_384 + 257, "char": 128}
# What others follow from.
_LEADING = (
    ("tokenizer", "vocab_size"),
    *(("model", name) for name in ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff")),
    *(("training", name) for name in ("seq_len", "batch_size", "max_steps")),
)


def parse_size(size: Any) -> int:
    """Parameters: 10_000_000 for "10M". Raises: UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([KMBT]?)", str(size).strip().upper())
    number = float(match[1]) * _UNITS[match[2]] if match and not isinstance(size, bool) else 0
    if not _SMALLEST <= number <= _LARGEST:
        raise UserError(
            f"size is {size!r}: give a number of parameters from 100K to 10T, such as 10M, 1.5B or 124000000"
        )
    return round(number)


def derived(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe's `size` settles of what the recipe leaves open, as {"model.n_layers": 7, …}.

    Args:
        recipe: its fields as plain data, as people give them; None is open. Presets are spelled out.

    Returns:
        Nothing where a field that others follow from is no positive whole number, which is for the recipe to say.

    Raises:
        UserError: the size is no number, or no model that the given fields allow has about so many parameters.
        ConfigError: the given fields make no model.
    """
    size = parse_size(recipe["size"])
    sections = {name: recipe.get(name) or {} for name in ("tokenizer", "model", "training", "optimizer", "schedule")}
    if not all(isinstance(section, Mapping) for section in sections.values()):
        return {}
    given = {name: {k: v for k, v in section.items() if v is not None} for name, section in sections.items()}
    if any(
        type(given[section].get(name, 1)) is not int or given[section].get(name, 1) < 1 for section, name in _LEADING
    ):
        return {}
    kind = str(given["tokenizer"].get("kind", "bpe"))
    vocab_size = given["tokenizer"].get("vocab_size") or _OTHER_VOCABULARIES.get(kind) or _vocabulary(size)
    config = _shape(recipe["size"], size, vocab_size, given["model"], given["training"].get("seq_len") or 1)
    found: dict[str, Any] = {"tokenizer.vocab_size": vocab_size} if kind == "bpe" else {}
    for name in ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "max_seq_len"):
        found[f"model.{name}"] = getattr(config, name)
    found |= _training(config, given["training"], given["optimizer"].get("name", "muon"))
    return {
        key: value
        for key, value in found.items()
        if value is not None and key.split(".")[1] not in given[key.split(".")[0]]
    }


def spelled_out(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """`recipe` with what its size settles filled in. Raises: as `derived`."""
    result = dict(recipe)
    for key, value in derived(recipe).items():
        section, name = key.split(".")
        result[section] = {**(result.get(section) or {}), name: value}
    return result


def _vocabulary(size: int) -> int:
    """Tokens of a bpe vocabulary: a power of two.

    The embedding grows as the 0.83rd power of the rest (Tao et al. 2024, arXiv 2407.13623), through the 216,000 tokens
    that they find for 70B parameters at a width of 8,192.
    """
    embedding = 216_000 * 8192 * (size / 70e9) ** 0.83
    return min(max(_power_of_two(embedding / _usual_width(size)), 512), 1 << 18)


def _aspect(width: float) -> float:
    """Width over depth that is usual at this width.

    64 as in GPT-2 and nanochat up to 1,024; then rising to the 128 of GPT-3 175B and Llama 3 8B (4,096 wide, 32 deep).
    Kaplan et al. 2020 (arXiv 2001.08361, section 3.2): the loss hardly depends on it from some 30 to 250.
    """
    return float(min(max(64.0, 2 * width**0.5), 128.0))


def _usual_width(size: int) -> float:
    """Of a model with nothing but blocks of 12 d² weights, 64 times as wide as deep."""
    return float((size * 64 / 12) ** (1 / 3))


def _shape(name: Any, size: int, vocab_size: int, given: Mapping[str, Any], seq_len: int) -> Config:
    """The Config of about `size` parameters whose aspect is nearest to the usual one."""
    best: tuple[float, float, Config] | None = None
    for width in _widths(size, given):
        config = _of_width(width, size, vocab_size, given, seq_len)
        off = abs(_count(config) / size - 1)
        # What is within half of the tolerance is as good as exact.
        rank = max(off, TOLERANCE / 2), abs(math.log(width / (config.n_layers * _aspect(width))))
        if best is None or rank < best[:2]:
            best = (*rank, config)
    if best is None:
        heads = ", ".join(f"{key} {given[key]}" for key in ("n_heads", "n_kv_heads") if key in given)
        raise UserError(f"size is {name}, but no width near it has heads that fit model's {heads}")
    if best[0] > TOLERANCE:
        raise UserError(
            f"size is {name}, but with what model and tokenizer.vocab_size ({vocab_size:,}) say the nearest has "
            f"{_count(best[2]):,} parameters: leave n_layers or d_model to size, or set size to null"
        )
    return best[2]


def _of_width(width: int, size: int, vocab_size: int, given: Mapping[str, Any], seq_len: int) -> Config:
    """The Config of this width that is nearest to `size`, first by its depth, then by its feed-forward."""
    fields = {**_with_width(width, given, seq_len), "vocab_size": vocab_size}
    # Every layer has as many weights as the next, so that two counts say what any depth has.
    one, two = (_count(Config.from_dict({**fields, "n_layers": n})) for n in (1, 2))
    fields["n_layers"] = given.get("n_layers") or max(1, 1 + round((size - one) / (two - one)))
    config = Config.from_dict(fields)
    if "d_ff" in given or {"n_layers", "d_model"} <= given.keys():  # a shape of its own, as a preset is
        return config
    step = 32 if width < 2048 else 256
    least, most = (config.d_ff * (1 + play) for play in (-_FEED_FORWARD_PLAY, _FEED_FORWARD_PLAY))
    counts = [_count(Config.from_dict({**fields, "d_ff": n * step})) for n in (1, 2)]
    units = 1 + round((size - counts[0]) / (counts[1] - counts[0]))
    d_ff = min(max(units, math.ceil(least / step)), math.floor(most / step)) * step
    return Config.from_dict({**fields, "d_ff": d_ff}) if d_ff else config


def _count(config: Config) -> int:
    return count_parameters(config).total


def _widths(size: int, given: Mapping[str, Any]) -> Iterator[int]:
    """Those that come into question; heads divide them."""
    if "d_model" in given:
        yield given["d_model"]
        return
    usual, heads, kv_heads = _usual_width(size), given.get("n_heads"), given.get("n_kv_heads", 1)
    # A depth that is given can ask for any width; without one, those of an aspect that anybody builds.
    least, most = (1.0, (size / 4) ** 0.5) if "n_layers" in given else (usual / 3, usual * 3)
    width = 0
    while width <= most:
        step = next(step for end, _, step in _HEADS if width < end)
        width += math.lcm(32, 2 * heads) if heads else step
        if width >= least and (heads or _n_heads(width, given) % kv_heads == 0):
            yield width


def _with_width(width: int, given: Mapping[str, Any], seq_len: int) -> dict[str, Any]:
    """The given fields of a Config, and those that follow from its width."""
    heads = _n_heads(width, given)
    # Beyond its square none is as near as 1.
    divisors = [n for n in range(1, min(heads, _KV_HEADS**2) + 1) if heads % n == 0]
    shared = min(divisors, key=lambda n: abs(math.log(n / _KV_HEADS)))
    # The scores' share of a layer's FLOPs, T / 6d, stays about what it is in GPT-2.
    context = max(min(max(_power_of_two(width), 256), 8192), seq_len)
    fields = {"n_heads": heads, "n_kv_heads": heads if heads <= _UNSHARED_HEADS else shared, "max_seq_len": context}
    return {"d_model": width, **fields, **given}


def _n_heads(width: int, given: Mapping[str, Any]) -> int:
    head_dim = given.get("head_dim") or next(head for end, head, _ in _HEADS if width < end)
    return int(given.get("n_heads") or max(1, width // head_dim))


def _training(config: Config, given: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """Batch, length and rates of a run of this model."""
    parameters = count_parameters(config)
    tokens = _TOKENS_PER_PARAMETER * parameters.total
    seq_len = given.get("seq_len") or config.max_seq_len
    found: dict[str, Any] = {}
    if "minutes" not in given:  # how many tokens those are depends on the machine
        steps = given.get("max_steps")
        batch = given.get("batch_size") or _power_of_two(_batch_tokens(tokens, steps) / seq_len)
        steps = steps or math.ceil(tokens / (batch * seq_len))
        tokens = steps * batch * seq_len
        found = {"training.batch_size": batch, "training.max_steps": steps}
        if "max_steps" not in given:
            found["training.max_epochs"] = _MAX_EPOCHS
        # As long as a hundredth of the run, at most the 2,000 steps of Llama 1 (arXiv 2302.13971).
        found["schedule.warmup_steps"] = min(max(steps // 100, 10), 2000, steps)
    micro = micro_batch(config, seq_len, found.get("training.batch_size") or given.get("batch_size", 16))
    found["training.micro_batch_size"] = micro
    if optimizer == "adamw":  # the step law again, of the parameters without tables and head
        return found | {"optimizer.adamw_lr": _rounded(1.79 * parameters.non_embedding**-0.713 * tokens**0.307)}
    # Muon's update has the same effect on a unit input at any width (Bernstein and Newhouse 2024, arXiv 2410.21265), so
    # its rate stays. What AdamW moves beside it learns as 1 / width (Yang et al. 2022, arXiv 2203.03466); 0.01 was
    # measured to be best at a width of 320, and 0.02 at 160 (docs/log.md).
    return found | {"optimizer.lr": 0.02, "optimizer.adamw_lr": _rounded(min(0.02, 0.01 * 320 / config.d_model))}


def _batch_tokens(tokens: int, steps: int | None) -> float:
    """The step law (Li et al. 2025, arXiv 2503.04715): 0.58 D^0.571 tokens a step; with D = B · steps, solved for B."""
    if steps is None:
        return float(0.58 * tokens**0.571)
    return float((0.58 * steps**0.571) ** (1 / (1 - 0.571)))


def micro_batch(config: Config, seq_len: int, batch_size: int) -> int | None:
    """Sequences in memory at a time; None: all of them fit."""
    kept = count_activations(config, seq_len, 1, "bf16")
    fitting = max(1, min(max(16 * _count(config), _LEAST_KEPT), _MOST_KEPT) // kept)
    most = next(n for n in range(min(batch_size, fitting), 0, -1) if batch_size % n == 0)
    return None if most == batch_size else most


def _power_of_two(number: float) -> int:
    """The nearest one, at least 1."""
    return 1 << max(0, round(math.log2(number)))


def _rounded(number: float) -> float:
    """To two digits: more are not known."""
    return float(f"{number:.2g}")
