"""Recipes: read, overridden, refused, and written out whole."""

import pytest
import yaml

from leftward.errors import UserError
from leftward.overrides import override
from leftward.training.recipe import Recipe, read_yaml

BASE = {"data": {"path": "text.txt"}, "training": {"max_steps": 100}}


def make(*overrides):
    return Recipe.from_dict(override(BASE, overrides))


def test_overrides_are_typed():
    recipe = make("optimizer.lr=1e-3", "model.n_layers=3", "training.compile=true", "data.path=[a.txt, b.txt]")
    assert recipe.optimizer.lr == 0.001
    assert recipe.model == {"n_layers": 3}
    assert recipe.training.compile is True
    assert recipe.data_settings().paths == ("a.txt", "b.txt")


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["training.max_step=1"], "unknown key training.max_step: did you mean max_steps or max_epochs?"),
        (["modle.n_layers=3"], "unknown key modle: did you mean model?"),
        (["lr=1"], "unknown key lr: did you mean optimizer.lr?"),
        (["model.n_layer=3"], "unknown key model.n_layer: did you mean n_layers"),
        (["str=1"], "unknown key str: valid: data"),
        (["runs/a-b=1"], "unknown key runs/a-b: valid: data"),
        (["data.{}=1"], "unknown key data.{}: valid: bad_lines"),
        (["optimizer.lr=fast"], "optimizer.lr is 'fast'"),
        (["training.batch_size=1.5"], "training.batch_size is 1.5"),
        (["training.batch_size=0"], "training.batch_size is 0"),
        (["training.batch_size=8", "training.micro_batch_size=3"], "8 is not divisible by micro_batch_size 3"),
        (["training.minutes=1"], "both say when to end"),
        (["training.max_steps=null", "training.minutes=1", "schedule.decay=cosine"], "a cosine must know its end"),
        (["schedule.warmup_steps=101"], "warmup_steps 101 is more than training.max_steps 100"),
        (["training.seq_len=512", "model.max_seq_len=256"], "seq_len 512 is above model.max_seq_len 256"),
        (["model.vocab_size=100"], "set tokenizer.vocab_size"),
        (["model.d_model=100", "model.n_heads=6"], "d_model 100 is not divisible by n_heads 6"),
        (["model.n_kv_heads=3"], "n_heads 4 is not divisible by n_kv_heads 3"),
        (["tokenizer.kind=bep"], "tokenizer.kind is 'bep'"),
        (["data.path=null"], "data.path is missing"),
        (["optimizer.name=adamw", "optimizer.lr=3e-4"], "set optimizer.adamw_lr"),
        (["seed=2024-99-99"], "is not YAML"),
        (["seed='!!int x'"], "seed is '!!int x'"),
        ([".x=5"], "write it as key=value"),
        (["model.rope_base=.inf"], "rope_base is inf"),
        (["model.d_ff=1" + "0" * 400], "d_ff is 1"),
        (["training"], "write it as key=value"),
        (["training.=3"], "write it as key=value"),
        (["seed=[1"], "is not YAML"),
        (["data=3", "data.path=x"], "data has no fields"),
        (["training.max_steps=null", "training.minutes=.inf"], "training.minutes is inf"),
        (["optimizer.lr=.nan"], "optimizer.lr is nan"),
        (["optimizer.betas=[1.5, 0.9]"], "optimizer.betas.0 is 1.5"),
    ],
)
def test_each_wrong_setting_is_one_line(overrides, expected):
    with pytest.raises(UserError) as caught:
        make(*overrides)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_problems_are_said_together():
    with pytest.raises(UserError) as caught:
        make("optimizer.lr=fast", "training.max_step=1", "tokenizer.kind=bep")
    assert all(name in str(caught.value) for name in ("optimizer.lr", "max_step:", "tokenizer.kind"))


def test_the_written_recipe_is_the_same_recipe():
    recipe = make("model.n_layers=2", 'out="a: b"', "data.document_separator='<|x|>'", "optimizer.betas=[0.8, 0.9]")
    text = recipe.to_yaml()
    again = Recipe.from_dict(yaml.safe_load(text))
    assert again.fingerprint() == recipe.fingerprint() and again.out == recipe.out
    # the width can be changed in a copy, and what is derived from it follows
    wider = Recipe.from_dict(override(yaml.safe_load(text), ["model.d_model=512"])).config(vocab_size=1)
    assert wider.head_dim == 128
    # every field carries its meaning, type and default
    assert text.count("default ") >= 50
    assert "one of rmsnorm, layernorm" in text


def test_overrides_reach_as_deep_as_the_fields():
    recipe = make("model.rope_scaling.kind=yarn", "model.rope_scaling.factor=4", "model.max_seq_len=64")
    assert recipe.config(8).rope_scaling.factor == 4.0
    assert Recipe.from_dict(yaml.safe_load(recipe.to_yaml())).config(8) == recipe.config(8)


def test_a_preset_is_spelled_out_and_changed_at_will():
    recipe = make("model.preset=gpt2", "model.n_layers=3", "training.seq_len=64")
    config = recipe.config(vocab_size=65)
    assert (config.n_layers, config.d_model, config.positions, config.vocab_size) == (3, 768, "learned", 65)
    assert "preset" not in recipe.model
    assert Recipe.from_dict(yaml.safe_load(recipe.to_yaml())).config(65) == config
    with pytest.raises(UserError, match=r"model\.preset.*gpt2"):
        make("model.preset=gtp2")


def test_no_end_means_five_minutes():
    assert Recipe.from_dict({"data": {"path": "x"}}).training.minutes == 5.0


@pytest.mark.parametrize("text", ["- a", "a: [", "\x00", "3", "1: 2"])
def test_a_file_that_is_no_recipe(tmp_path, text):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match="not"):
        read_yaml(path)


def test_a_key_that_stands_twice_is_named(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model:\n  n_layers: 2\n  n_layers: 3\n")
    with pytest.raises(UserError, match="n_layers stands twice"):
        read_yaml(path)


def test_a_missing_recipe(tmp_path):
    with pytest.raises(UserError, match="no recipe at"):
        read_yaml(tmp_path / "none.yaml")
