"""Every fault is caught, by the proof that is about it, under its name; and sound models pass."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import faulty_models as faulty
import leftward as lw
from faulty_models import CONFIG, GPT, LOCAL, Captions, Decoder, Mask, Recurrent, blocking, healthy, masked
from leftward import Config
from leftward.data.batches import Windows
from leftward.errors import UserError
from leftward.language_model import LanguageModel
from leftward.model import decoder as decoder_module
from leftward.model.cache import KVCache
from leftward.presets import PRESETS
from leftward.proofs import checking, overlap, storing
from leftward.proofs.checking import CLAIMS, check
from leftward.proofs.report import Claim, Fails, Proof, Report, Skips, prove, show
from leftward.proofs.small import scaled_down
from leftward.proofs.subject import Subject
from leftward.proofs.training import expected_first_loss, first_loss
from leftward.text.tokenizer import Tokenizer
from leftward.training import loop, loss, optim
from random_models import configs, random_decoder

TEXT = "The quick brown fox jumps over the lazy dog; é, ß and 𝄞 too.\n"
LEARNS = "learns the next token"  # takes a second or two: only the tests that need it let it run


@pytest.fixture
def trains() -> None:
    """Let a test train."""


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "trains" not in request.fixturenames:
        monkeypatch.setattr(checking, "CLAIMS", [claim for claim in CLAIMS if claim.name != LEARNS])


def failed(report: Report) -> dict[str, str]:
    return {proof.name: proof.measured for proof in report.proofs if proof.outcome == "fail"}


def skipped(report: Report) -> set[str]:
    return {proof.name for proof in report.proofs if proof.outcome == "skip"}


# ---- faults of our Decoder: the model, and what each failing proof says

SIGHT = "each layer's sight"
CHANGE, GRADIENT = "leftward, by change", "leftward, by gradient"

DECODERS: dict[str, tuple[Callable[[], Decoder], dict[str, str]]] = {
    "upside down": (
        lambda: masked(faulty.UpsideDown, 0, 1, 2),
        dict.fromkeys((CHANGE, GRADIENT, SIGHT), "sees only the future: its mask is upside down"),
    ),
    "upside down in one layer": (
        lambda: masked(faulty.UpsideDown, 1),
        {
            CHANGE: "sees the whole future: no mask, or one upside down",
            GRADIENT: "sees the whole future",
            SIGHT: "layer 1: sees only the future: its mask is upside down",
        },
    ),
    "off by one": (
        lambda: masked(faulty.OffByOne, 0, 1, 2),
        {
            CHANGE: "position t sees t+3",  # one to the right in each of three layers
            GRADIENT: "position t sees t+3",
            SIGHT: "layers 0, 1, 2: position t sees t+1: the mask is off by one",
        },
    ),
    "off by one in one layer": (
        lambda: masked(faulty.OffByOne, 2),
        {CHANGE: "position t sees t+1", GRADIENT: "position t sees t+1", SIGHT: "layer 2: position t sees t+1"},
    ),
    "dropped in one layer": (
        lambda: masked(faulty.Dropped, 1),
        {CHANGE: "sees the whole future", GRADIENT: "sees the whole future", SIGHT: "layer 1: sees the whole future"},
    ),
    "causal: false": (
        lambda: healthy(dataclasses.replace(CONFIG, causal=False)),
        {CHANGE: "no mask", GRADIENT: "no mask", SIGHT: "layers 0, 1, 2: sees the whole future: no mask"},
    ),
    "window too wide": (
        lambda: faulty.windowed(7),
        {SIGHT: "layers 0, 1: a window of 7, and the Config says 6: 1 too wide"},
    ),
    "window too narrow": (
        lambda: faulty.windowed(5),
        {SIGHT: "layers 0, 1: a window of 5, and the Config says 6: 1 too narrow"},
    ),
    "a window where none is": (
        lambda: masked(Mask, 2, window=9),
        {SIGHT: "layer 2: a window of 9, and the Config has none here"},
    ),
    "neighbours": (
        lambda: healthy(cls=faulty.Coupled),
        {"alone = in a batch": "a row changes with its neighbours' tokens"},
    ),
    "wrong padding side": (
        lambda: healthy(cls=faulty.PadsLeft),
        {
            "padding is unseen": "a row of 12 tokens changes with the 12 of padding to its right",
            "rows of unequal length": "the row of 1 tokens beside one of 12, in its prompt",
        },
    ),
    "documents": (
        lambda: healthy(cls=faulty.LeakingDocuments),
        {"documents are apart": "document 2 of 3 in a row; its own first token already differs"},
    ),
    "dropout": (lambda: healthy(cls=faulty.Dropping), {"repeatable": "something random is at work in evaluation mode"}),
    "length": (
        lambda: healthy(cls=faulty.GrowsWithLength),
        {"prefix = beginning": "the first 1 outputs are others when 23 tokens follow"},
    ),
    "no limit": (
        lambda: healthy(cls=faulty.Boundless),
        {"too long is an error": "give logits, though max_seq_len is 40"},
    ),
    "untied": (faulty.untied, {"head is tied": "they are two tensors: equal still, but training parts them"}),
    "frozen": (
        lambda: faulty.frozen("blocks.1.attn.qkv.weight"),
        {"gradients reach all": "frozen (requires_grad is false): blocks.1.attn.qkv.weight"},
    ),
    "detached": (faulty.detached, {"gradients reach all": "given no gradient: they never learn: blocks.1."}),
    "NaN": (faulty.poisoned, {"finite": "NaN or infinity in blocks.1.ff.down.weight"}),
}


# A cache holds what the Config's window needs, so that another window differs behind it, too; and so does a scale that
# follows from a length.
FAR_REACHING = {"window too wide", "window too narrow", "a window where none is", "length"}


@pytest.mark.parametrize("fault", DECODERS)
def test_a_fault_of_our_decoder_is_named(fault: str) -> None:
    make, expected = DECODERS[fault]
    report = check(make())
    found = failed(report)
    for name, words in expected.items():
        assert words in found.get(name, "passed"), (name, found)
    if fault not in FAR_REACHING:
        assert found.keys() == expected.keys(), {k: v for k, v in found.items() if k not in expected}
    assert not report.passed


def test_a_cache_written_one_position_late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVCache._write

    def late(cache: KVCache, held: Any, new: Any) -> None:
        lengths = cache.lengths
        cache.lengths = [length + 1 for length in lengths]
        real(cache, held, new)
        cache.lengths = lengths

    monkeypatch.setattr(KVCache, "_write", late)
    report = check(healthy())
    assert failed(report).keys() == {"cache = full"}
    assert (
        "the prompt agrees, but not the first token behind the cache (position 12)" in report["cache = full"].measured
    )
    assert report["greedy = recomputed"].measured == '"cache = full" fails, and with it this'


def test_a_rotation_from_the_wrong_offset_behind_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    real = decoder_module.rotary_angles
    monkeypatch.setattr(
        decoder_module,
        "rotary_angles",
        lambda config, positions, *rest: real(config, positions - positions[:, :1], *rest),
    )
    report = check(healthy())
    assert failed(report).keys() == {"cache = full"}
    assert "the prompt agrees" in report["cache = full"].measured


def test_document_positions_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        decoder_module,
        "document_positions",
        lambda documents: torch.arange(documents.shape[1]).expand_as(documents),
    )
    # Rotary positions are relative, so that only others can tell.
    assert check(healthy()).passed
    report = check(healthy(dataclasses.replace(CONFIG, positions="learned")))
    assert failed(report).keys() == {"documents are apart"}


def test_forks_that_share_and_rewinding_that_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "rewind", lambda cache, lengths: None)
        assert failed(check(healthy())).keys() == {"rewound cache"}
    real = KVCache.fork

    def shallow(cache: KVCache, rows: list[int]) -> KVCache:
        child = real(cache, rows)
        child.values = [values.flip(0) * 0 for values in child.values]
        return child

    monkeypatch.setattr(KVCache, "fork", shallow)
    assert failed(check(healthy())).keys() == {"forked cache"}


def test_a_ring_that_overwrites_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVCache.__init__

    def short(cache: KVCache, config: Config, *args: Any, **options: Any) -> None:
        real(cache, config, *args, **options)
        if cache._rolls:
            cache._ring -= 3
            cache.keys = [k[:, :, : cache._ring] if config.is_local(i) else k for i, k in enumerate(cache.keys)]
            cache.values = [v[:, :, : cache._ring] if config.is_local(i) else v for i, v in enumerate(cache.values)]

    monkeypatch.setattr(KVCache, "__init__", short)
    assert "rolled window" in failed(check(healthy(LOCAL)))


def test_init_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    real = decoder_module.initialise

    def large(config: Config, weights: dict[str, Tensor]) -> None:
        real(config, weights)
        nn.init.normal_(weights["embed.weight"])  # what nn.Embedding does by itself

    monkeypatch.setattr(decoder_module, "initialise", large)
    report = check(healthy())
    assert failed(report).keys() == {"first loss"}
    assert "a fresh model's loss is" in report["first loss"].measured


def test_groups_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = optim.parameter_groups

    def without(decoder: nn.Module) -> Any:
        groups = real(decoder)
        groups["vectors"].remove("norm.weight")
        return groups

    def double(decoder: nn.Module) -> Any:
        groups = real(decoder)
        groups["vectors"].append("embed.weight")
        return groups

    for faulted, words in (
        (without, "in no group: the optimizer never moves them: norm"),
        (double, "moved twice a step: embed"),
    ):
        monkeypatch.setattr(optim, "parameter_groups", faulted)
        assert words in failed(check(healthy()))["optimizer groups"]


def test_a_users_optimizer() -> None:
    model = GPT()
    assert check(model, optimizer=torch.optim.AdamW(model.parameters()))["optimizer groups"].outcome == "pass"
    partial = torch.optim.AdamW(model.blocks.parameters())
    assert "in no group" in failed(check(model, optimizer=partial))["optimizer groups"]


def test_saving_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = storing.load_model

    def rounded(*args: Any) -> Any:
        decoder, *rest = real(*args)
        decoder.blocks[0].attn.o.weight.data.add_(1e-7)
        return decoder, *rest

    monkeypatch.setattr(storing, "load_model", rounded)
    assert "1 of 27 weights come back changed: blocks.0.attn.o.weight" in failed(check(healthy()))["saved = loaded"]


# ---- losses


def test_padding_in_our_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    real = loss.loss_sum
    monkeypatch.setattr(loss, "loss_sum", lambda logits, targets: real(logits, targets.clamp(min=0)))
    assert "padding is counted" in failed(check(healthy()))["padding is not counted"]


@pytest.mark.usefixtures("trains")
def test_targets_that_our_training_does_not_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    real = loss.head_loss
    monkeypatch.setattr(loop, "head_loss", lambda model, x, targets, n: real(model, x[:, 1:], targets[:, :-1], n))
    report = check(healthy())
    assert failed(report).keys() == {LEARNS}
    assert "the model says the present token" in report[LEARNS].measured
    monkeypatch.setattr(loop, "head_loss", lambda model, x, targets, n: real(model, x[:, :-1], targets[:, 1:], n))
    assert "the model says the token after the next" in failed(check(healthy()))[LEARNS]


LOSSES = {
    "present": (faulty.present_token_loss, "that of the present token: targets are not shifted"),
    "twice": (faulty.twice_shifted_loss, "the token after the next: targets are shifted twice"),
    "rolled": (faulty.rolled_loss, "the last position is asked for the first token"),
    "summed": (faulty.summed_loss, "the loss is the sum over 69 tokens, not their mean"),
}


@pytest.mark.parametrize("fault", LOSSES)
@pytest.mark.parametrize("make", [healthy, GPT])
def test_a_loss_is_named(fault: str, make: Callable[[], nn.Module]) -> None:
    loss_fn, words = LOSSES[fault]
    assert words in failed(check(make(), loss_fn=loss_fn))["targets are next tokens"]


def test_losses_and_padding() -> None:
    name = "padding is not counted"
    counting = check(GPT(), loss_fn=faulty.next_token_loss, pad_id=0)
    assert failed(counting).keys() == {name} and "padding is counted" in counting[name].measured
    sound = check(GPT(), loss_fn=functools.partial(faulty.next_token_loss, pad_id=0), pad_id=0)
    assert sound.passed and sound[name].outcome == "pass"
    means = check(GPT(), loss_fn=faulty.mean_of_means_loss, pad_id=0)
    assert "mean of the rows' means" in failed(means)[name]
    assert "give its pad_id" in check(GPT(), loss_fn=faulty.next_token_loss)[name].measured


# ---- plain modules

PLAIN: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "upside down": (
        lambda: GPT(blocking(lambda q, k: k >= q)),
        dict.fromkeys((CHANGE, GRADIENT, SIGHT), "sees only the future: its mask is upside down"),
    ),
    "transposed by one": (
        lambda: GPT(lambda length: torch.triu(torch.full((length, length), -torch.inf), diagonal=2)),
        {
            CHANGE: "t sees t+2: the mask is off by one in 2 layers",
            GRADIENT: "position t sees t+2",
            SIGHT: "layers 0, 1: position t sees t+1",
        },
    ),
    "none": (
        lambda: GPT(lambda length: torch.zeros(length, length)),
        {
            CHANGE: "sees the whole future",
            GRADIENT: "sees the whole future",
            SIGHT: "layers 0, 1: sees the whole future",
        },
    ),
    "none in one layer": (
        faulty.one_layer_leaks,
        {CHANGE: "sees the whole future", GRADIENT: "sees the whole future", SIGHT: "layer 1: sees the whole future"},
    ),
    "batch norm": (
        faulty.BatchNormed,
        {"alone = in a batch": "with its neighbours' tokens"},
    ),
}


@pytest.mark.parametrize("fault", PLAIN)
def test_a_fault_of_a_plain_module_is_named(fault: str) -> None:
    make, expected = PLAIN[fault]
    found = failed(check(make()))
    for name, words in expected.items():
        assert words in found.get(name, "passed"), (name, found)
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("make", [GPT, Captions, Recurrent])
def test_sound_plain_modules_pass(make: Callable[[], nn.Module]) -> None:
    report = check(make())
    assert not failed(report)
    assert {"runs", "finite", CHANGE, GRADIENT, "alone = in a batch", "padding is unseen", "gradients reach all"} <= {
        proof.name for proof in report.proofs if proof.outcome == "pass"
    }
    assert "cache = full" in skipped(report)


def test_a_module_that_sees_each_token_alone_is_told() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    report = check(model)
    assert report.passed
    assert "each sees itself only" in report[CHANGE].measured


def test_a_module_without_an_embedding() -> None:
    class OneHot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rnn = nn.Parameter(torch.randn(20, 8)), nn.GRU(8, 20, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.rnn(nn.functional.one_hot(ids, 20).float() @ self.table)[0]

    report = check(OneHot())
    assert report.passed
    assert "no nn.Embedding reads the ids" in report[GRADIENT].measured


def test_a_module_that_does_not_run_is_one_failure() -> None:
    for model in (nn.Linear(3, 4), nn.Sequential(nn.Embedding(20, 8), nn.Flatten())):
        report = check(model)
        assert failed(report).keys() == {"runs"}
        assert {CHANGE, GRADIENT, SIGHT, "alone = in a batch", "gradients reach all"} <= skipped(report)


# ---- transformers


def tiny_llama(**values: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    special = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **special, **values}))


def tiny_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def tiny_mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 6}
    return MistralForCausalLM(MistralConfig(**sizes, **heads, initializer_range=0.2))


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tiny_mistral])
def test_sound_models_of_transformers_pass(make: Callable[[], Any]) -> None:
    report = check(make(), loss_fn=lambda model, ids: model(ids, labels=ids).loss)
    assert not failed(report)
    tried = {"cache = full", "chunks = whole", "greedy = recomputed", SIGHT, "head is tied", "targets are next tokens"}
    assert not tried & skipped(report), [report[name] for name in tried & skipped(report)]
    refuses = make is tiny_mistral  # a window of transformers' that has rolled can't go back
    assert ("rewound cache" in skipped(report)) == refuses


def test_faults_of_transformers_models() -> None:
    model = tiny_llama()
    shifted = check(model, loss_fn=lambda model, ids: model(ids[:, :-1], labels=ids[:, 1:]).loss)
    assert "shifted twice" in failed(shifted)["targets are next tokens"]
    model.config.tie_word_embeddings = True
    assert "two tensors: different already" in failed(check(model))["head is tied"]
    model = tiny_llama()
    model.model.layers[1].self_attn.is_causal = False
    assert failed(check(model))[SIGHT].startswith("layer 1: sees the whole future")


# ---- sound models of ours


@hypothesis.settings(max_examples=12)
@hypothesis.given(config=configs(), kind=hypothesis.strategies.sampled_from(["random", "fresh", "bf16", "config"]))
def test_every_variant_passes(config: Config, kind: str) -> None:
    if config.window == 1:  # where queries and keys have no say
        config = dataclasses.replace(config, window=2)
    target = {
        "random": lambda: random_decoder(config, std=0.3),
        "fresh": lambda: Decoder(config),
        "bf16": lambda: random_decoder(config).bfloat16(),
        "config": lambda: config,
    }[kind]()
    report = check(target)
    assert not failed(report), config


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_passes(name: str) -> None:
    assert not failed(check(name))


@pytest.mark.usefixtures("trains")
@pytest.mark.parametrize("name", ["gpt1", "bloom-560m", "phi-3-mini-128k", "gpt-oss-20b"])
def test_presets_pass(name: str) -> None:
    report = check(name)
    assert not failed(report)
    assert report[LEARNS].outcome == "pass"
    assert report.subject.startswith(f"{name}, scaled down")


def test_zeros_of_a_fresh_model_hide_nothing() -> None:
    decoder = Decoder(CONFIG)
    decoder.blocks[1].register_forward_pre_hook(
        lambda module, args: (args[0], [faulty.changed(mask, faulty.Dropped) for mask in args[1]], *args[2:])
    )
    before = decoder(torch.arange(20)[None])
    after = decoder(torch.cat((torch.arange(19), torch.tensor([40])))[None])
    assert torch.equal(before[:, :19], after[:, :19])  # its blocks add nothing yet
    assert "layer 1: sees the whole future" in failed(check(decoder))[SIGHT]


def test_the_models_own_dtype_is_tried() -> None:
    class Coarse(Decoder):
        def logits(self, hidden: Tensor) -> Tensor:
            return super().logits(hidden.roll(1, dims=1) if hidden.dtype == torch.bfloat16 else hidden)

    assert check(healthy().bfloat16()).passed
    found = failed(check(healthy(cls=Coarse).bfloat16()))
    assert found.keys() == {"own precision = fp32", GRADIENT}
    assert "in one pass logits are" in found["own precision = fp32"]


def test_check_leaves_the_model_as_it_was() -> None:
    decoder = healthy(LOCAL).train()
    decoder.blocks[0].eval()
    decoder.blocks[1].attn.qkv.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    modes = [module.training for module in decoder.modules()]
    asks = [p.requires_grad for p in decoder.parameters()]
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    check(decoder)
    check(CONFIG)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in decoder.state_dict().items())
    assert [module.training for module in decoder.modules()] == modes
    assert [p.requires_grad for p in decoder.parameters()] == asks
    assert all(p.grad is None for p in decoder.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in decoder.modules())
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, grad)


def test_a_seed_gives_one_report() -> None:
    assert check(healthy(), seed=3) == check(healthy(), seed=3)
    assert check(healthy(), seed=3) != check(healthy(), seed=4)


def test_a_proof_that_raises_is_a_failure_and_the_others_go_on() -> None:
    class Odd(Decoder):
        def hidden(self, ids: Tensor, *args: Any, **options: Any) -> Tensor:
            if len(ids) == 3:
                raise RuntimeError("three\n rows")
            return super().hidden(ids, *args, **options)

    report = check(healthy(cls=Odd))
    assert report["alone = in a batch"].measured == "RuntimeError: three rows"
    assert report["cache = full"].outcome == "pass"


def test_tokens_of_the_users_own() -> None:
    asked: list[Tensor] = []
    decoder = healthy()
    decoder.embed.register_forward_hook(lambda module, args, output: asked.append(args[0]))
    tokens = [7, 8, 9] * 40
    assert check(decoder, tokens=tokens).passed
    assert asked[0].tolist() == [tokens[:24]]
    with pytest.raises(UserError, match="token id 50 is not in the model's vocabulary of 50"):
        check(decoder, tokens=[*tokens, 50])
    with pytest.raises(UserError, match="tokens must be ids"):
        check(decoder, tokens=[0.5])  # type: ignore[list-item]
    with pytest.raises(UserError, match="tokens must be ids"):
        check(decoder, tokens="text")  # type: ignore[arg-type]
    assert failed(check(nn.Linear(3, 4), tokens=tokens)).keys() == {"runs"}


def test_tiny_contexts_and_vocabularies() -> None:
    for values in ({"max_seq_len": 1}, {"max_seq_len": 2}, {"max_seq_len": 3}, {"vocab_size": 1}, {"vocab_size": 2}):
        report = check(healthy(Config(**{**CONFIG.to_dict(), **values})))
        assert failed(report).keys() <= {"gradients reach all"}, (values, failed(report))


def test_what_cannot_be_checked() -> None:
    with pytest.raises(UserError, match="cannot check a int"):
        check(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="seed is -1"):
        check(CONFIG, seed=-1)
    with pytest.raises(UserError, match="no preset is called 'llama3-8c': did you mean llama3-8b"):
        check("llama3-8c")


# ---- small copies


@hypothesis.settings(max_examples=60)
@hypothesis.given(config=configs())
def test_scaled_down_keeps_every_choice(config: Config) -> None:
    small = scaled_down(config)
    sizes = {"vocab_size", "vocab_multiple", "max_seq_len", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim"}
    sizes |= {"window", "attn_scale", "rope_scaling", "d_ff", "n_experts", "n_experts_per_token", "d_shared"}
    sizes |= {"embed_scale"}
    for name, value in config.to_dict().items():
        if name not in sizes:
            assert getattr(small, name) == value, name
    assert small.n_heads // small.n_kv_heads == config.n_heads // config.n_kv_heads
    assert (small.window is None) == (config.window is None)
    assert (small.n_experts > 0) == (config.n_experts > 0)
    assert scaled_down(small).d_model == small.d_model


def test_scaled_down_by_hand() -> None:
    llama = Config(
        vocab_size=128256, max_seq_len=131072, n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_ff=14336,
        rope_scaling={"kind": "llama3", "factor": 8.0, "original_max_seq_len": 8192},
    )  # fmt: skip
    small = scaled_down(llama)
    assert (small.n_layers, small.n_heads, small.n_kv_heads) == (2, 8, 2)
    assert small.rope_scaling.original_max_seq_len == 3  # 48 · 8192 / 131072
    assert small.attn_scale == small.head_dim**-0.5
    gemma = Config(
        vocab_size=262144, n_layers=26, d_model=1152, n_heads=4, n_kv_heads=1, head_dim=256, window=512,
        attention_pattern="LLLLLG" * 4 + "LL", embed_scale=1152**0.5, max_seq_len=32768,
    )  # fmt: skip
    small = scaled_down(gemma)
    assert small.attention_pattern == "LLLLLG" and small.n_layers == 6
    assert small.window == 6 and small.embed_scale == small.d_model**0.5
    assert small.head_dim * small.n_heads != small.d_model


# ---- the first loss


def test_the_first_loss_by_hand() -> None:
    """An untied head: ln V + σ²/2 with σ = 0.02 · √256 = 0.32. Tied: ln(V − 1 + e^5.12) − 5.12 / V, about."""
    untied = Config(vocab_size=65, d_model=256, tie_embeddings=False)
    assert expected_first_loss(untied) == pytest.approx(np.log(65) + 0.32**2 / 2, abs=1e-3)
    tied = Config(vocab_size=65, d_model=256)
    assert expected_first_loss(tied) == pytest.approx(np.log(64 + np.exp(5.12)) - 5.12 / 65, abs=0.03)


@pytest.mark.parametrize("values", [{"tie_embeddings": False}, {}, {"positions": "learned"}, {"block": "sandwich"}])
def test_the_first_loss_of_a_real_size(values: dict[str, Any]) -> None:
    config = Config(vocab_size=512, d_model=512, n_heads=8, n_layers=2, max_seq_len=64, **values)
    assert first_loss(Subject(Decoder(config)))


# ---- tokenizers and data


def language_model(kind: str = "bpe", **values: Any) -> LanguageModel:
    tokenizer = Tokenizer.train([TEXT * 3], kind=kind, vocab_size=280 if kind == "bpe" else None)  # type: ignore[arg-type]
    return LanguageModel(healthy(dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size + 20)), tokenizer)


@pytest.mark.parametrize("kind", ["bpe", "char", "word"])
def test_a_language_model_passes(kind: str) -> None:
    report = check(language_model(kind))
    assert not failed(report)
    assert report["text comes back"].outcome == report["greedy = recomputed"].outcome == "pass"
    if kind != "char":  # which lacks the characters of the control token's name
        assert report["control tokens are text"].outcome == "pass"


def test_faults_of_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model()
    encode = Tokenizer.encode
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", lambda self, text, **o: encode(self, text.replace("\r\n", "\n"), **o))
        assert "line ends: comes back changed from character 3" in failed(check(model))["text comes back"]
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", lambda self, text, **o: encode(self, text, **{"parse_special": True, **o}))
        assert (
            "'<|endoftext|>' in a text becomes the control token 0" in failed(check(model))["control tokens are text"]
        )


def words(n: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(f"{rng.choice('bcdfghjklm')}{rng.choice('aeiou')}{rng.randrange(1000)}" for _ in range(n))


def run_on(tmp_path: Path, train: list[str], val: list[str], kind: str = "bpe") -> lw.Run:
    for name, documents in (("train", train), ("val", val)):
        lines = "\n".join(json.dumps({"text": text}) for text in documents)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    recipe = {
        "out": str(tmp_path / "run"),
        "data": {"path": str(tmp_path / "train.jsonl"), "val_path": str(tmp_path / "val.jsonl")},
        "tokenizer": {"kind": kind, "vocab_size": 400 if kind == "bpe" else None},
        "model": {"n_layers": 1, "d_model": 16, "n_heads": 2, "max_seq_len": 32},
        "training": {"max_steps": 2, "batch_size": 2, "dtype": "fp32", "eval_interval": 0},
    }
    return lw.train(recipe, observer=lw.Observer())


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_a_sound_run_passes(tmp_path: Path, kind: str) -> None:
    run = run_on(tmp_path, [words(100, i) for i in range(40)], [words(100, i) for i in range(100, 110)], kind)
    report = check(run)
    assert not failed(report)
    assert "0 of 10 documents" in report["documents not shared"].measured
    assert "0.00% of" in report["windows not shared"].measured
    assert not skipped(check(str(run.directory))) - {"rolled window", "own precision = fp32", "control tokens are text"}


def test_shared_documents_windows_and_passages(tmp_path: Path) -> None:
    train = [words(100, i) for i in range(40)]
    fresh = [words(100, i) for i in range(100, 110)]
    copied = train[3]
    changed = " ".join(word if i % 12 else "x" for i, word in enumerate(train[5].split()))
    report = check(run_on(tmp_path, train, [*fresh, copied, changed]))
    found = failed(report)
    assert found.keys() == {"documents not shared", "windows not shared", "passages not near"}
    assert "1 of 12 documents of validation are in training too (8.33%)" in found["documents not shared"]
    assert f"such as “{copied[:60]}" in found["documents not shared"]
    # One document of twelve is a copy; the other has no 128 bytes in a row but most of its shorter runs.
    share = float(found["windows not shared"].split("%")[0])
    assert 5 < share < 12
    near = float(found["passages not near"].split("(")[1].split("%")[0])
    assert near > share


def test_a_little_overlap_is_told_and_passes(tmp_path: Path) -> None:
    train = [words(100, i) for i in range(40)]
    shared = " ".join(train[7].split()[:40])
    report = check(run_on(tmp_path, train, [words(100, i) for i in range(100, 140)] + [shared + " " + words(60, 99)]))
    assert not failed(report)
    measured = report["windows not shared"].measured
    assert "such as “" in measured and 0 < float(measured.split("%")[0]) < 5


def test_a_single_document_cut_in_two(tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text(words(3000, 1), encoding="utf-8")
    recipe = {
        "out": str(tmp_path / "run"),
        "data": {"path": str(text)},
        "model": {"n_layers": 1, "d_model": 16, "n_heads": 2, "max_seq_len": 32},
        "training": {"max_steps": 1, "batch_size": 2, "dtype": "fp32", "eval_interval": 0},
    }
    report = check(lw.train(recipe, observer=lw.Observer()))
    assert not failed(report)
    assert "a single document" in report["documents not shared"].measured


def test_batches_that_are_not_shifted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_on(tmp_path, [words(100, i) for i in range(10)], [words(100, i) for i in range(100, 104)])
    real = overlap.evaluation_batches

    def unshifted(*args: Any) -> Any:
        return ((inputs, inputs) for inputs, _ in real(*args))

    with monkeypatch.context() as patch:
        patch.setattr(overlap, "evaluation_batches", unshifted)
        assert "targets are the inputs themselves" in failed(check(run))["batches are shifted"]
    batch = Windows.batch
    monkeypatch.setattr(Windows, "batch", lambda self, *args: (batch(self, *args)[0][:, ::-1], 0))
    assert "the windows of training are not whole" in failed(check(run))["batches are shifted"]


def test_hashes_of_runs_find_exactly_the_runs() -> None:
    """Against strings: which runs of 8 tokens of one stream stand in another."""
    rng = np.random.default_rng(0)
    ours, theirs = rng.integers(0, 3, (4, 30)), rng.integers(0, 3, (1, 4000))
    wanted = overlap._Wanted(overlap._hashes(ours, (8,))[0])
    wanted.look_in(overlap._hashes(theirs, (8,))[0][0])
    stream = "".join(map(str, theirs[0]))
    expected = [["".join(map(str, row[i : i + 8])) in stream for i in range(23)] for row in ours]
    assert wanted.found().tolist() == expected
    assert 0 < np.mean(expected) < 1


# ---- reports


def test_a_report() -> None:
    def fails(subject: int) -> str:
        raise Fails("3 is odd")

    def skips(subject: int) -> str:
        raise Skips("no reason")

    claims = [
        Claim("holds", str, (), "a"),
        Claim("is even", fails, (), "it can't be halved"),
        Claim("skipped", skips, (), "c"),
        Claim("follows", str, ("is even",), "d"),
        Claim("follows too", str, ("follows",), "e"),
    ]
    report = Report("3", tuple(prove(claims, 3)))
    assert not report.passed and report.summary == "1 hold, 1 fail, 3 skipped"
    assert report["follows too"].measured == '"is even" fails, and with it this'
    assert json.loads(json.dumps(report.to_dict()))["proofs"][1] == {
        "name": "is even", "outcome": "fail", "measured": "3 is odd", "meaning": "it can't be halved",
    }  # fmt: skip
    text = str(report).splitlines()
    assert text[0].split() == ["✓", "holds", "3"] and text[-1] == "3: 1 hold, 1 fail, 3 skipped"
    assert text[1].startswith("✗ is even") and text[2].strip() == "it can't be halved"
    assert text[1].index("3 is odd") == text[2].index("it")
    assert max(map(len, show(Proof("a", "fail", "word " * 50, "b"), 80).splitlines())) <= 80
    with pytest.raises(KeyError):
        report["nothing"]


def test_names_fit_their_column_and_are_one_each() -> None:
    names = [claim.name for claim in CLAIMS]
    assert len(set(names)) == len(names)
    proof = check(CONFIG).proofs[0]
    column = show(proof).index(proof.measured)
    assert max(map(len, names)) <= column - 3
    for claim in CLAIMS:
        assert set(claim.needs) <= set(names[: names.index(claim.name)])


def test_a_run_without_its_data(tmp_path: Path) -> None:
    run = run_on(tmp_path, [words(100, i) for i in range(10)], [words(100, i) for i in range(100, 104)])
    (run.directory / "tokens" / "train-00000.npy").unlink()
    with pytest.raises(UserError, match="train-00000.npy is missing"):
        check(run)
