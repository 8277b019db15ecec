"""The dial: what follows from a size, and that whatever is given stays."""

import math

import pytest
import yaml

from leftward.config import Config
from leftward.errors import UserError
from leftward.overrides import override
from leftward.planner import count_parameters
from leftward.training import size as sizes
from leftward.training.recipe import Recipe, read_recipe, recipes

SIZES = [
    "1M",
    "2M",
    "3M",
    "5M",
    "10M",
    "30M",
    "60M",
    "124M",
    "350M",
    "1B",
    "1.5B",
    "3B",
    "8B",
    "13B",
    "34B",
    "70B",
    "100B",
]


def make(*overrides, **fields):
    return Recipe.from_dict(override({"data": {"path": "x.txt"}, **fields}, overrides))


def config_of(recipe):
    return recipe.config(recipe.tokenizer.vocab_size)


def off(recipe):
    """How far the recipe's model is from its size."""
    return abs(count_parameters(config_of(recipe)).total / sizes.parse_size(recipe.size) - 1)


@pytest.mark.parametrize(
    "text, parameters",
    [("10M", 10**7), ("1.5B", 1_500_000_000), ("124m", 124 * 10**6), (2**20, 2**20), ("800 K", 800_000), (1e7, 10**7)],
)
def test_a_size_is_a_number_of_parameters(text, parameters):
    assert sizes.parse_size(text) == parameters


@pytest.mark.parametrize("text", ["", "M", "10X", "-10M", "1", "99K", "100T", True, [], "ten", "1e30", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(UserError, match=r"size is .*: give a number of parameters"):
        make(size=text) if isinstance(text, str | int) and not isinstance(text, bool) else sizes.parse_size(text)


@pytest.mark.parametrize("size", SIZES)
def test_the_model_has_about_its_size_and_its_parts_fit(size):
    recipe = make(size=size)
    config = config_of(recipe)
    assert off(recipe) < 0.05
    assert config.d_model == config.n_heads * config.head_dim and config.n_heads % config.n_kv_heads == 0
    assert config.head_dim in (32, 64, 128) and config.d_ff % 32 == 0
    assert 30 < config.d_model / config.n_layers < 250  # Kaplan et al. 2020, figure 5: within 2 % of the best
    assert 1.9 < config.d_ff / config.d_model < 3.5  # about 8/3, as gated feed-forwards have it
    training = recipe.training
    assert training.batch_size % (training.micro_batch_size or 1) == 0
    tokens = training.max_steps * training.batch_size * recipe.seq_len
    assert tokens / count_parameters(config).total == pytest.approx(20, rel=0.01)  # Hoffmann et al. 2022
    assert training.max_epochs == 4.0 and recipe.schedule.warmup_steps <= 0.05 * training.max_steps


def test_every_size_between_is_met_too():
    sizes_between = [round(1e6 * 1.37**n) for n in range(37)]
    assert sizes_between[-1] > 8e10
    assert max(off(make(size=size)) for size in sizes_between) < 0.05


def test_larger_is_never_less():
    rows = []
    for size in SIZES:
        recipe = make(size=size)
        config = config_of(recipe)
        batch = recipe.training.batch_size * recipe.seq_len
        rows.append(
            (
                count_parameters(config).total,
                config.d_model,
                config.vocab_size,
                config.max_seq_len,
                batch,
                recipe.training.max_steps * batch,
                -recipe.optimizer.adamw_lr,
            )
        )
    for column in zip(*rows, strict=True):
        assert list(column) == sorted(column)


def test_known_models_are_near():
    """Where published models of a size are, by their papers' tables."""
    for size, layers, width in [("124M", 12, 768), ("8B", 32, 4096), ("405B", 126, 16384)]:
        config = config_of(make(size=size))
        assert config.n_layers == pytest.approx(layers, rel=0.2) and config.d_model == pytest.approx(width, rel=0.2)


def test_the_rules_by_hand():
    recipe = make(size="124M")
    tokens = 20 * count_parameters(config_of(recipe)).total
    # Li et al. 2025: 0.58 D^0.571 tokens a step, to the nearest power of two of sequences
    assert recipe.training.batch_size == 2 ** round(math.log2(0.58 * tokens**0.571 / 1024)) == 128
    assert recipe.optimizer.lr == 0.02
    assert recipe.optimizer.adamw_lr == pytest.approx(0.01 * 320 / 896, rel=0.02)
    adamw = make("optimizer.name=adamw", size="124M")
    non_embedding = count_parameters(config_of(adamw)).non_embedding
    tokens = adamw.training.max_steps * adamw.training.batch_size * adamw.seq_len
    assert adamw.optimizer.adamw_lr == pytest.approx(1.79 * non_embedding**-0.713 * tokens**0.307, rel=0.05)
    assert adamw.optimizer.lr == 0.02  # Muon's, untouched


DERIVED = {
    "tokenizer.vocab_size": 2000,
    "model.n_layers": 4,
    "model.d_model": 256,
    "model.n_heads": 8,
    "model.n_kv_heads": 2,
    "model.d_ff": 800,
    "model.max_seq_len": 128,
    "training.batch_size": 24,
    "training.max_steps": 77,
    "training.max_epochs": 2.0,
    "training.micro_batch_size": 4,
    "schedule.warmup_steps": 5,
    "optimizer.lr": 0.03,
    "optimizer.adamw_lr": 0.001,
}


@pytest.mark.parametrize("key", DERIVED)
def test_whatever_is_given_stays_and_the_size_is_met(key):
    recipe = make(f"{key}={DERIVED[key]}", size="10M")
    section, name = key.split(".")
    value = recipe.model[name] if section == "model" else getattr(getattr(recipe, section), name)
    assert value == DERIVED[key]
    assert off(recipe) < 0.1
    assert key not in sizes.derived({"size": "10M", section: {name: DERIVED[key]}})


def test_everything_that_can_be_derived_is_tried_above():
    assert set(sizes.derived({"size": "10M"})) == set(DERIVED)


def test_given_fields_lead():
    deep = config_of(make("model.n_layers=20", size="10M"))
    assert deep.n_layers == 20 and deep.d_model < 250
    kept = config_of(make("model.head_dim=16", "model.qk_norm=none", "model.positions=learned", size="10M"))
    assert kept.head_dim == 16 and kept.positions == "learned"
    experts = make("model.n_experts=8", size="60M")
    assert off(experts) < 0.1 and config_of(experts).n_experts == 8
    characters = make("tokenizer.kind=char", size="1M")
    assert characters.tokenizer.vocab_size is None
    assert count_parameters(characters.config(65)).total == pytest.approx(1e6, rel=0.1)
    short = make("training.seq_len=2000", size="10M")
    assert short.config(8).max_seq_len == 2000
    minutes = make("training.minutes=3", size="10M")
    assert minutes.training.max_steps is None and minutes.training.batch_size == 16


def test_a_shape_that_is_given_whole_must_have_the_size():
    recipe = make("model.preset=gpt2", "tokenizer.vocab_size=50257", size="124M")
    assert recipe.config(50257) == Config.from_dict({**recipe.config(50257).to_dict(), "d_ff": 3072, "n_heads": 12})
    assert count_parameters(recipe.config(50257)).total == 124_439_808
    with pytest.raises(UserError, match=r"size is 10M, but .* the nearest has 92,133,888 parameters: leave n_layers"):
        # 124,439,808 − (50,257 − 8,192) · 768
        make("model.preset=gpt2", "tokenizer.vocab_size=8192", size="10M")
    with pytest.raises(UserError, match="leave n_layers or d_model to size"):
        make("model.n_layers=1000", size="1M")


def test_the_saved_recipe_says_it_all_and_stays_the_same():
    recipe = make(size="10M")
    saved = yaml.safe_load(recipe.to_yaml())
    again = Recipe.from_dict(saved)
    assert again.fingerprint() == recipe.fingerprint() and config_of(again) == config_of(recipe)
    assert saved["model"]["n_layers"] == recipe.model["n_layers"] and saved["size"] == "10M"
    with pytest.raises(UserError, match="size is 20M, but .* leave n_layers or d_model to size, or set size to null"):
        Recipe.from_dict(override(saved, ["size=20M"]))
    assert Recipe.from_dict(override(saved, ["size=null"])).fingerprint() == recipe.fingerprint()


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["model.n_layers=x"], "model.n_layers"),
        (["model.n_layer=3"], "unknown key model.n_layer: did you mean n_layers"),
        (["model.d_model=100", "model.n_heads=3"], "model.d_model 100 is not divisible by n_heads 3"),
        (["training.batch_size=many"], "training.batch_size is 'many'"),
        (["training=3"], "training"),
        (["tokenizer.kind=[]"], "tokenizer.kind"),
        (["tokenizer.vocab_size=0"], "tokenizer.vocab_size is 0"),
        (["training.max_steps=-1"], "training.max_steps is -1"),
        (["model.preset=gtp2"], "model.preset"),
        (["model.n_kv_heads=999"], "no width near it has heads that fit model's n_kv_heads 999"),
        (["model.n_heads=1000000000"], "below 2^31"),
        (["model.n_heads=4", "model.n_kv_heads=3"], "model.n_heads 4 is not divisible by n_kv_heads 3"),
        (["size=[1]"], "size"),
    ],
)
def test_a_mistake_beside_a_size_is_one_line(overrides, expected):
    with pytest.raises(UserError) as caught:
        Recipe.from_dict(override({"size": "10M", "data": {"path": "x"}}, overrides))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


# ---- recipes that come with it

PARAMETERS = {
    # At the 2,048 tokens that its text gives. 3 layers: q, k, v 576 × 192, o 192², SwiGLU 3 × 512 × 192; tables; norms
    "quickstart": 3 * (110_592 + 36_864 + 294_912 + 384 + 64) + 2 * 2048 * 192 + 192,
    # 66 tokens. 2 layers: q, k, v 160 × 96, o 96², SwiGLU 3 × 160 × 96, norms 2 × 96 and 2 × 32; two tables; a norm
    "shakespeare-char": 2 * (15_360 + 9_216 + 46_080 + 192 + 64) + 2 * 66 * 96 + 96,
    "characters": 4 * (24_576 + 16_384 + 98_304 + 256 + 64) + 2 * 66 * 128 + 128,
    "stories-10m": 10e6,
    "gpt2-124m": 124_439_808,
    "1b": 1e9,
    "8b": 8_030_261_248,  # Llama 3 8B
    "70b": 70_553_706_496,  # Llama 3 70B
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_recipe_is_one_and_has_its_size(name):
    recipe = Recipe.from_dict(override(read_recipe(name), ["data.path=text.txt"]))
    vocab_size = recipe.tokenizer.vocab_size or {"quickstart": 2048, "shakespeare-char": 66, "characters": 66}[name]
    total = count_parameters(recipe.config(vocab_size)).total
    exact = name in ("quickstart", "gpt2-124m", "8b", "70b", "shakespeare-char", "characters")
    assert total == (PARAMETERS[name] if exact else pytest.approx(PARAMETERS[name], rel=0.05))
    assert recipe.training.max_steps or recipe.training.minutes


def test_no_recipe_is_forgotten():
    assert set(recipes()) == set(PARAMETERS)


def test_a_name_that_is_none_is_answered_with_all():
    with pytest.raises(UserError, match=r"gpt3 is neither a recipe file \(.yaml\) nor one that comes .*gpt2-124m"):
        read_recipe("gpt3")
