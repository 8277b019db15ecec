"""The loss of texts: every token once, as by hand, whatever the windows and the batches; and of a run's own split."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import leftward as lw
from leftward import Config
from leftward.data import sources
from leftward.errors import UserError
from leftward.language_model import LanguageModel
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder

TEXT = "The quick brown fox jumps over the lazy dog; é, ß and 𝄞 too.\n"
TOKENIZER = Tokenizer.train([TEXT * 3], kind="bpe", vocab_size=280)
CONFIG = Config(vocab_size=TOKENIZER.vocab_size, max_seq_len=16, n_layers=2, d_model=32, n_heads=4)
MODEL = LanguageModel(random_decoder(CONFIG, std=0.3), TOKENIZER)
TEXTS = [TEXT, "fox", TEXT * 3, "é", "dog " * 40]


def by_hand(model: LanguageModel, text: str, stride: int) -> tuple[float, int]:
    """Nats and tokens of a text, window by window, each token behind all that its first window holds before it."""
    ids = model.tokenizer.encode(text, add_bos=True)
    context, nats = model.config.max_seq_len, 0.0
    for target in range(1, len(ids)):
        # the first window that holds it: [0, context], then [stride, stride + context] …
        start = 0 if target <= context else stride * -(-(target - context) // stride)
        with torch.inference_mode():
            logits = model.decoder(torch.tensor([ids[start:target]]))[0, -1]
        nats -= logits.double().log_softmax(-1)[ids[target]].item()
    return nats, len(ids) - 1


@pytest.mark.parametrize("stride", [1, 3, 8, 15, 16, None])
def test_every_token_is_scored_once_behind_what_its_window_holds(stride: int | None) -> None:
    got = MODEL.evaluate(TEXTS, stride=stride)
    expected = [by_hand(MODEL, text, stride or 8) for text in TEXTS]
    assert got.tokens == sum(tokens for _, tokens in expected)
    assert got.nats == pytest.approx(sum(nats for nats, _ in expected), rel=1e-5)
    assert got.bytes == sum(len(text.encode()) for text in TEXTS)
    assert got.loss == got.nats / got.tokens and got.perplexity == pytest.approx(math.exp(got.loss))


@pytest.mark.parametrize("text", TEXTS)
def test_one_text_is_what_score_says(text: str) -> None:
    score, got = MODEL.score(text), MODEL.evaluate([text])
    assert (got.tokens, got.bytes) == (len(score.ids), score.n_bytes)
    assert got.nats == pytest.approx(score.nll, rel=1e-6)
    assert got.bits_per_byte == pytest.approx(score.bits_per_byte, rel=1e-6)


def test_batches_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    together = MODEL.evaluate(TEXTS * 5, stride=2)
    monkeypatch.setattr("leftward.language_model._READ_AT_ONCE", 1)
    alone = MODEL.evaluate(TEXTS * 5, stride=2)
    assert alone.tokens == together.tokens and alone.nats == pytest.approx(together.nats, rel=1e-6)


def test_pieces_of_a_document_are_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.txt"
    path.write_text(TEXT * 50 + "<|x|>" + TEXT)
    monkeypatch.setattr(sources, "_PIECE", 200)
    pieces = list(sources.read(sources.find([path], sources.Report()), sources.Report(), document_separator="<|x|>"))
    assert len(pieces) > 10 and sum(piece.ends_document for piece in pieces) == 2
    got, whole = MODEL.evaluate(pieces), MODEL.evaluate([TEXT * 50, TEXT])
    assert got.bytes == whole.bytes
    assert got.nats == pytest.approx(whole.nats, rel=1e-3)  # a token may be cut where pieces meet


def test_a_tokenizer_without_a_beginning_predicts_all_but_the_first() -> None:
    tokenizer = Tokenizer.train([TEXT], kind="char", special_tokens=())
    model = LanguageModel(
        random_decoder(Config(vocab_size=tokenizer.vocab_size, max_seq_len=16, d_model=32)), tokenizer
    )
    got = model.evaluate(["dog", "fox"])
    assert (got.tokens, got.bytes) == (4, 4)
    with pytest.raises(UserError, match="nothing to evaluate"):
        model.evaluate(["d", "f"])


@pytest.mark.parametrize("stride", [0, 17, -1, 1.5, True])
def test_a_stride_out_of_range_is_named(stride: int) -> None:
    with pytest.raises(UserError, match="stride is .*: it must be a whole number from 1 to the context, 16"):
        MODEL.evaluate(["The"], stride=stride)


@pytest.mark.parametrize("texts", [[], [""]])
def test_nothing_to_evaluate_is_said(texts: list[str]) -> None:
    with pytest.raises(UserError, match="nothing to evaluate"):
        MODEL.evaluate(texts)


# ---- a run's own split


FARM = [f"The {n} sheep of farm {n % 7} saw the {n * n % 13} wolves.\n" * 3 for n in range(200)]


@pytest.fixture(scope="module", params=[("fp32", "concatenate"), ("fp32", "documents"), ("bf16", "concatenate")])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> lw.Run:
    path = tmp_path_factory.mktemp("farm") / "farm.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in FARM))
    return lw.train(
        {
            "out": str(path.parent / "run"),
            "data": {"path": str(path), "packing": request.param[1]},
            "tokenizer": {"kind": "char"},
            "model": {"n_layers": 1, "d_model": 32, "n_heads": 2, "max_seq_len": 32},
            "training": {"dtype": request.param[0], "max_steps": 30, "batch_size": 8, "seq_len": 24},
        },
        observer=lw.Observer(),
    )


def test_a_runs_own_split_gives_its_summary(run: lw.Run) -> None:
    got, rounding = run.evaluate(), {"fp32": 1e-6, "bf16": 1e-3}[run.summary["dtype"]]
    assert got.loss == pytest.approx(run.summary["val_loss"], rel=rounding)
    assert got.bits_per_byte == pytest.approx(run.summary["val_bits_per_byte"], rel=rounding)


def test_a_runs_split_by_documents_is_their_texts(run: lw.Run) -> None:
    held_out = [text for text in run._held_out() if text]
    assert 10 < len(held_out) < 40 and set(held_out) <= set(FARM)
    got, expected = run.evaluate(stride=8, dtype="fp32"), run.model.evaluate(held_out, stride=8)
    assert (got.tokens, got.bytes, got.nats) == (expected.tokens, expected.bytes, pytest.approx(expected.nats))
