"""A whole run: what it leaves, that it learns, and that the ways of cutting a batch do not change it."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

import leftward as lw
from leftward.data.batches import Dataset
from leftward.errors import UserError
from leftward.training import checkpoint, directory, loop
from leftward.training.progress import Interrupted, Observer
from leftward.training.recipe import Recipe


def merged(recipe, **sections):
    return {**recipe, **{name: {**recipe.get(name, {}), **fields} for name, fields in sections.items()}}


def losses(run):
    return [(line["step"], line.get("loss"), line.get("val_loss")) for line in run.history]


def test_a_run_learns_and_leaves_all_its_files(recipe):
    run = lw.train(merged(recipe, training={"max_steps": 80, "eval_interval": 20}))
    validation = [line["val_loss"] for line in run.history if "val_loss" in line]
    assert len(validation) == 4 and validation[-1] < validation[0] < 3.6  # ln 37 = 3.61
    model = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    training = ["recipe.yaml", "metrics.jsonl", "summary.json", "checkpoints", "tokens"]
    assert {*model, *training} <= set(os.listdir(run.directory))
    summary = run.summary
    assert summary["val_loss"] == min(validation)
    assert summary["tokens"] == 80 * 8 * 32 and summary["steps"] == 80
    assert summary["params"] == sum(p.numel() for p in run.model.decoder.parameters())
    assert summary["wall_s"] >= summary["training_s"] > 0


def test_the_saved_model_is_the_best_one_and_the_last_is_kept_apart(recipe, monkeypatch):
    values = iter([2.0, 1.0, 3.0])  # the second of three evaluations is the best
    real = loop.evaluate

    def fake(*arguments):
        evaluation = real(*arguments)
        return type(evaluation)(next(values) * evaluation.tokens, evaluation.tokens, evaluation.bytes)

    monkeypatch.setattr(loop, "evaluate", fake)
    run = lw.train(recipe)
    assert run.summary["best_step"] == 8 and run.summary["val_loss"] == 1.0 and run.summary["final_val_loss"] == 3.0
    best = run.model.decoder.state_dict()
    state, weights, _ = checkpoint.load_latest(run.directory)
    assert state.step == 12
    assert not torch.equal(best["embed.weight"], weights["embed.weight"])


def test_one_seed_one_result(recipe, tmp_path):
    first = lw.train(merged(recipe, model={"dropout": 0.1}))
    second = lw.train({**merged(recipe, model={"dropout": 0.1}), "out": str(tmp_path / "again")})
    other = lw.train({**merged(recipe, model={"dropout": 0.1}), "out": str(tmp_path / "other"), "seed": 2})
    assert losses(first) == losses(second) != losses(other)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_accumulation_does_not_change_the_run(recipe, tmp_path, dtype):
    whole = lw.train(merged(recipe, training={"dtype": dtype}))
    cut = lw.train({**merged(recipe, training={"dtype": dtype, "micro_batch_size": 2}), "out": str(tmp_path / "cut")})
    tolerance = 1e-4 if dtype == "fp32" else 2e-2
    for (step, *values), (other_step, *others) in zip(losses(whole), losses(cut), strict=True):
        assert step == other_step
        for value, other in zip(values, others, strict=True):
            assert value == pytest.approx(other, rel=tolerance) if value is not None else other is None


VARIANTS = {
    "gpt-3": {"positions": "learned", "norm": "layernorm", "qk_norm": "none", "feed_forward": "gelu", "window": 8},
    "gemma-3": {
        "window": 8,
        "attention_pattern": "LG",
        "block": "sandwich",
        "norm_weight": "one_plus",
        "feed_forward": "geglu_tanh",
        "embed_scale": 5.6,
        "rope_local_base": 100.0,
    },
    "mixtral": {"n_experts": 4, "qk_norm": "none"},
    "gpt-oss": {
        "n_experts": 4,
        "attn_sinks": True,
        "feed_forward": "swiglu_clamped",
        "qkv_bias": True,
        "ff_bias": True,
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 16},
    },
    "bloom": {"positions": "alibi", "norm": "layernorm", "embed_norm": True, "feed_forward": "gelu_tanh"},
    "gpt-1": {"positions": "learned", "norm": "layernorm", "block": "post", "feed_forward": "gelu_tanh"},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_variant_trains_and_loads(recipe, name, dtype):
    run = lw.train(merged(recipe, model=VARIANTS[name], training={"dtype": dtype}))
    assert run.summary["val_loss"] < 3.33  # ln 28
    assert run.model.config == Recipe.from_dict(merged(recipe, model=VARIANTS[name])).config(28)
    assert run.model.generate("The", max_tokens=20, temperature=0)
    balances = [line["balance_loss"] for line in run.history if "balance_loss" in line]
    assert len(balances) == (12 if "n_experts" in VARIANTS[name] else 0)


def test_the_balance_loss_spreads_the_load(recipe):
    model = {"n_experts": 8, "n_layers": 1}
    uneven = []
    for charge in (0.0, 0.3):
        out = recipe["out"] + str(charge)
        run = lw.train(
            merged({**recipe, "out": out}, model=model), "training.max_steps=40", f"training.balance_loss={charge}"
        )
        balances = [line["balance_loss"] for line in run.history if "balance_loss" in line]
        uneven.append(sum(balances) / len(balances) - 1)
    assert uneven[1] < uneven[0] / 3


def test_the_first_loss_is_that_of_guessing(recipe):
    run = lw.train(recipe)
    vocab_size = run.model.config.vocab_size
    assert run.history[0]["loss"] == pytest.approx(torch.tensor(float(vocab_size)).log().item(), rel=0.02)


def test_a_budget_of_minutes_is_kept_and_settles(recipe):
    run = lw.train(merged(recipe, training={"max_steps": None, "minutes": 0.05, "save_interval": None}))
    assert run.history[-2]["lr_fraction"] < 0.2  # it came down before the end


def test_compile_falls_back_to_the_plain_path(recipe, monkeypatch):
    def broken(module):
        def call(*args):
            raise RuntimeError("no compiler here")

        return call

    monkeypatch.setattr(torch, "compile", broken)

    notes = []
    observer = Observer()
    observer.note = notes.append
    run = lw.train(merged(recipe, training={"compile": True}), observer=observer)
    assert any("torch.compile failed" in note for note in notes)
    assert run.summary["steps"] == 12


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was(recipe, monkeypatch):
    real, calls = loop.head_loss, []

    def poisoned(*arguments):
        calls.append(1)
        return real(*arguments) * (float("nan") if len(calls) == 8 else 1.0)

    monkeypatch.setattr(loop, "head_loss", poisoned)
    with pytest.raises(UserError, match="the loss became nan .* at step 8"):
        lw.train(recipe)
    weights = lw.load(recipe["out"]).decoder.state_dict()
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_sigint_saves_within_a_step(recipe):
    class Press(Observer):
        def stepped(self, progress):
            if progress.step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted) as caught:
        lw.train(recipe, observer=Press())
    assert str(caught.value.directory) == recipe["out"]
    assert checkpoint.load_latest(caught.value.directory)[0].step == 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # as it was before
    lw.load(recipe["out"])


def test_it_trains_in_a_thread_too(recipe):
    result = []
    thread = threading.Thread(target=lambda: result.append(lw.train(recipe)))
    thread.start()
    thread.join()
    assert result[0].summary["steps"] == 12


@pytest.mark.parametrize(
    "section, expected",
    [
        ({"model": {"max_seq_len": 100_000}}, "fewer than one window"),
        ({"tokenizer": {"kind": "bpe", "vocab_size": 50_000}}, "corpus"),
        ({"data": {"path": "no-such-file.txt"}}, "no-such-file.txt"),
        ({"training": {"device": "cuda"}}, "cuda"),
    ],
)
def test_what_cannot_be_trained_is_one_line_and_leaves_no_directory(recipe, section, expected):
    if expected == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=expected) as caught:
        lw.train(merged(recipe, **section))
    assert "\n" not in str(caught.value)
    assert not os.path.exists(recipe["out"])


def test_a_gradient_that_is_not_finite_is_not_saved(recipe, monkeypatch):
    real, calls = loop.Optimizer.accumulate, []

    def poisoned(self):
        real(self)
        calls.append(1)
        if len(calls) == 6:  # a step that is saved
            next(iter(self.grads.values())).fill_(float("nan"))

    monkeypatch.setattr(loop.Optimizer, "accumulate", poisoned)
    with pytest.raises(UserError, match="gradient's norm nan at step 6"):
        lw.train(recipe)
    weights = lw.load(recipe["out"]).decoder.state_dict()
    assert all(tensor.isfinite().all() for tensor in weights.values())
    monkeypatch.undo()
    assert lw.resume(recipe["out"]).summary["steps"] == 12


def test_overrides_are_laid_over_any_kind_of_recipe(recipe):
    for given in (recipe, Recipe.from_dict(recipe)):
        with pytest.raises(UserError, match="did you mean max_steps"):
            lw.train(given, "training.max_step=3")
    assert lw.train(Recipe.from_dict(recipe), "training.max_steps=3").summary["steps"] == 3


def test_a_tokenizer_of_another_run_is_noticed(recipe, tmp_path):
    run = lw.train(recipe)
    other = lw.Tokenizer.train(["other text"], kind="char")
    other.save(run.directory / "tokens")
    with pytest.raises(UserError, match="is not the tokenizer"):
        lw.resume(run.directory)


def test_a_model_larger_than_the_machine_is_refused_before_it_is_built(recipe):
    for section in (
        {"model": {"n_layers": 10**9}},
        {"model": {"d_model": 10**6}},
        {"training": {"batch_size": 10**15}},
    ):
        with pytest.raises(UserError, match="this machine has"):
            lw.train(merged(recipe, **section))


def test_a_diverged_step_is_not_saved(recipe):
    with pytest.raises(UserError):  # whichever is seen first: the loss, the gradient or the weights
        lw.train(merged(recipe, optimizer={"lr": 1e38, "adamw_lr": 1e38}, training={"save_interval": 1}))
    weights = lw.load(recipe["out"]).decoder.state_dict()
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_trained_model_without_its_checkpoints_is_not_trained_over(recipe):
    run = lw.train(recipe)
    before = (run.directory / "model.safetensors").read_bytes()
    shutil.rmtree(run.directory / "checkpoints")
    with pytest.raises(UserError, match="its checkpoints are gone"):
        lw.resume(run.directory)
    assert (run.directory / "model.safetensors").read_bytes() == before


def test_a_recipe_that_was_changed_is_not_resumed(recipe):
    run = lw.train(recipe)
    path = run.directory / "recipe.yaml"
    path.write_text(path.read_text().replace("max_steps: 12", "max_steps: 20"))
    with pytest.raises(UserError, match="is not the recipe that this run was begun with"):
        lw.resume(run.directory)


def test_files_of_a_run_have_the_mode_that_the_user_gives(recipe):
    run = lw.train(recipe)
    modes = {(run.directory / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1


def test_a_link_to_an_empty_directory_is_a_directory(recipe, tmp_path):
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk", recipe["out"])
    with pytest.raises(UserError, match="none.txt"):
        lw.train(merged(recipe, data={"path": "none.txt"}))
    assert os.listdir(recipe["out"]) == []
    assert lw.train(recipe).summary["steps"] == 12


def test_a_missing_history_is_named(recipe):
    run = lw.train(recipe)
    (run.directory / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="metrics.jsonl"):
        run.history  # noqa: B018


def test_a_directory_whose_run_was_killed_before_it_had_a_recipe_is_free(recipe):
    directory = Path(recipe["out"])
    directory.mkdir(parents=True)
    (directory / ".lock").touch()
    (directory / "recipe.yaml.tmp").write_text("seed: ")
    lw.train(recipe)
    assert not list(directory.glob("*.tmp"))


def test_a_run_goes_to_the_home_directory(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = lw.train({**recipe, "out": "~/runs/a"})
    assert run.directory == tmp_path / "home" / "runs" / "a"
    assert run.summary["steps"] == recipe["training"]["max_steps"]


def test_a_used_directory_is_never_written_to(recipe):
    run = lw.train(recipe)
    before = sorted(os.listdir(run.directory))
    with pytest.raises(UserError, match="is already used"):
        lw.train(recipe)
    assert sorted(os.listdir(run.directory)) == before


def test_a_second_process_is_refused(recipe):
    with directory.new(Recipe.from_dict(recipe)) as path:
        with pytest.raises(UserError, match="in use by another process"), directory.existing(path):
            pass


def test_a_full_disk_in_a_save_keeps_the_last_checkpoint(recipe, monkeypatch):
    real = checkpoint.write_tensors

    def full(path, tensors):
        if "step-00000006" in str(path) and path.name.startswith("optimizer"):
            raise OSError(28, "No space left on device", str(path))
        real(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(UserError, match="the disk is full"):
        lw.train(recipe)
    monkeypatch.undo()
    assert checkpoint.load_latest(Path(recipe["out"]))[0].step == 4


def test_metrics_are_json_lines(recipe):
    run = lw.train(recipe)
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in lines if "val_loss" in line] == [4, 8, 12]


def test_the_validation_loss_covers_the_whole_split(recipe):
    run = lw.train(recipe)
    dataset = Dataset.open(run.directory / "tokens")
    ids = torch.from_numpy(dataset.val.slice(0, len(dataset.val)).astype("int64"))
    decoder, seq_len, nats = run.model.decoder, 32, 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, seq_len):
            window = ids[start : start + seq_len + 1]
            log_p = decoder(window[None, :-1])[0].log_softmax(-1)
            nats -= log_p[torch.arange(len(window) - 1), window[1:]].sum().item()
    loss = nats / (len(ids) - 1)
    assert run.summary["val_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("kind", ["bpe", "char", "word"])
def test_a_run_directory_is_a_hugging_face_model_directory(recipe, kind):
    transformers = pytest.importorskip("transformers")
    run = lw.train(merged(recipe, tokenizer={"kind": kind}, training={"max_steps": 30, "eval_interval": 30}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run.directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.directory)
    text = "The 12 sheep of farm 3 saw the 7 wolves.\n"
    ids = run.model.tokenizer.encode(text)
    bos = run.model.tokenizer.bos_id
    assert tokenizer(text)["input_ids"] == [bos, *ids]  # once, as in `generate` and `score`
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids and tokenizer.decode(ids) == text
    ids = torch.tensor([ids[:32]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, run.model.decoder(ids), atol=1e-4, rtol=0)
    prompt = tokenizer("The 12 ", return_tensors="pt")
    greedy = theirs.generate(**prompt, max_new_tokens=10, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    expected = tokenizer.decode(greedy, skip_special_tokens=True)
    assert run.model.generate("The 12 ", max_tokens=10, temperature=0) == expected
