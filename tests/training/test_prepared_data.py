"""Training on what `leftward data prepare` made: the same run as on the text, mixtures, and rows of documents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import leftward as lw
from leftward import Config
from leftward.data import prepare as preparing
from leftward.data.batches import IGNORED, Dataset, evaluation_rows
from leftward.data.order import Order
from leftward.data.prepare import Settings, prepare
from leftward.errors import UserError
from leftward.text.tokenizer import Tokenizer
from leftward.training.loss import evaluate, loss_sum, tensors
from leftward.training.progress import Interrupted, Observer
from leftward.training.recipe import Recipe
from random_models import random_decoder

TEXTS = {
    "sheep": [f"The {n} sheep saw {'all ' * (n % 9)}the {n % 13} wolves." for n in range(120)],
    "birds": [f"Bird {n} sang {n * n % 7} songs." for n in range(80)],
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("prepared")
    tokenizer = Tokenizer.train([text for texts in TEXTS.values() for text in texts], kind="char")
    for name, texts in TEXTS.items():
        path = directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare(Settings(paths=(str(path),)), directory / name, seed=1, tokenizer=tokenizer)
    return {name: directory / name for name in TEXTS}


def history(run: lw.Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "elapsed_s"} for line in run.history]


def with_data(recipe: dict[str, Any], out: Path, **data: Any) -> dict[str, Any]:
    return {"out": str(out), "data": data, **{name: recipe[name] for name in ("model", "training")}}


def test_prepared_text_trains_as_the_text_does(recipe: dict[str, Any], tmp_path: Path) -> None:
    direct = lw.train(recipe, observer=Observer())
    settings = Recipe.from_dict(recipe).data_settings()
    prepare(settings, tmp_path / "data", seed=1)
    run = lw.train(with_data(recipe, tmp_path / "again", path=str(tmp_path / "data")), observer=Observer())
    assert history(run) == history(direct)
    assert sorted(path.name for path in (run.directory / "tokens").iterdir()) == [
        "dataset.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert run.model.generate("The", max_tokens=5, temperature=0) == direct.model.generate(
        "The", max_tokens=5, temperature=0
    )
    assert run.held_out_beginnings(2) == direct.held_out_beginnings(2)


@pytest.mark.parametrize("packing", ["concatenate", "documents"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_mixture_trains_goes_on_and_counts_its_epochs(
    recipe: dict[str, Any], tmp_path: Path, prepared: dict[str, Path], packing: str, dtype: str
) -> None:
    recipe["training"] |= {"dtype": dtype, "micro_batch_size": 4}
    mix = {str(prepared["sheep"]): 3.0, str(prepared["birds"]): 1.0}
    whole = lw.train(with_data(recipe, tmp_path / "whole", mix=mix, packing=packing), observer=Observer())
    dataset = Dataset.open(whole.directory / "tokens")
    order = Order(dataset, 32, 1, packing)  # type: ignore[arg-type]
    assert whole.summary["epochs"] == order.epochs(12 * 8)
    targets = [order.batch(position, 8)[0].n_targets for position in range(0, 96, 8)]
    assert whole.summary["tokens"] == sum(targets)
    assert (sum(targets) < 12 * 8 * 32) == (packing == "documents")

    class Interrupting(Observer):
        def stepped(self, progress: Any) -> None:
            if progress.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        lw.train(with_data(recipe, tmp_path / "parted", mix=mix, packing=packing), observer=Interrupting())
    parted = lw.resume(tmp_path / "parted", observer=Observer())
    assert history(parted) == history(whole)
    ours, theirs = (run.model.decoder.state_dict() for run in (parted, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_micro_batches_of_unequal_counts_do_not_change_the_run(
    recipe: dict[str, Any], tmp_path: Path, prepared: dict[str, Path]
) -> None:
    """Rows of documents hold unequal numbers of targets: means of means would differ [torchtitan PR4167]."""
    runs = []
    for micro in (None, 4, 1):
        values = with_data(recipe, tmp_path / str(micro), path=str(prepared["sheep"]), packing="documents")
        values["training"] = {**recipe["training"], "micro_batch_size": micro, "max_steps": 6}
        runs.append([line.get("loss", line.get("val_loss")) for line in history(lw.train(values, observer=Observer()))])
    assert runs[1] == pytest.approx(runs[0], rel=1e-4)
    assert runs[2] == pytest.approx(runs[0], rel=1e-4)


@pytest.fixture(scope="module")
def decoder() -> Any:
    return random_decoder(Config(vocab_size=64, max_seq_len=32, n_layers=2, d_model=32, n_heads=2)).eval()


def pieces_of(batch: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The documents of a batch, each as a row of its own: inputs and targets [1, t]."""
    inputs, targets, documents = tensors(batch, torch.device("cpu"))
    assert documents is not None
    return [
        (row[numbers == number][None], wanted[numbers == number][None])
        for row, wanted, numbers in zip(inputs, targets, documents, strict=True)
        for number in numbers.unique()
    ]


def test_a_row_of_documents_is_the_documents_alone(prepared: dict[str, Path], decoder: Any) -> None:
    """The loss of a packed batch, and its gradient, are the sums of those of its documents, each by itself."""
    batch, _ = Order(Dataset.open(prepared["sheep"]), 32, 0, "documents").batch(3, 6)
    inputs, targets, documents = tensors(batch, torch.device("cpu"))
    together = loss_sum(decoder(inputs, documents=documents), targets)
    apart = sum(loss_sum(decoder(row), wanted) for row, wanted in pieces_of(batch) if (wanted != IGNORED).any())
    assert torch.is_tensor(apart)
    assert together.item() == pytest.approx(apart.item(), rel=1e-5)
    weights = list(decoder.parameters())
    for ours, theirs in zip(torch.autograd.grad(together, weights), torch.autograd.grad(apart, weights), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max())


def test_evaluation_reads_documents_alone(prepared: dict[str, Path], decoder: Any) -> None:
    val = Dataset.open(prepared["sheep"]).val.apart()
    evaluation = evaluate(decoder, val, 32, torch.device("cpu"))
    assert evaluation is not None and evaluation.tokens == len(val) - 1
    with torch.inference_mode():
        nats = sum(
            loss_sum(decoder(row), wanted).item()
            for batch in evaluation_rows(val, 32, 3)
            for row, wanted in pieces_of(batch)
            if (wanted != IGNORED).any()
        )
    assert evaluation.nats == pytest.approx(nats, rel=1e-5)
    windows = evaluate(decoder, Dataset.open(prepared["sheep"]).val, 32, torch.device("cpu"))
    assert windows is not None and windows.nats != pytest.approx(nats, rel=1e-5)


@pytest.mark.parametrize(
    ("data", "other", "message"),
    [
        ({"val_fraction": 0.2}, {}, "is prepared already, so data.val_fraction has no effect: leave it out"),
        ({"dedup": "exact"}, {}, "so data.dedup has no effect"),
        ({}, {"tokenizer": {"kind": "char"}}, "so tokenizer.kind has no effect"),
        ({"path": ["SHEEP", "text.txt"]}, {}, "data.path names prepared data and more: give each directory a weight"),
        ({"path": None, "mix": {"SHEEP": 1.0, "nowhere": 1.0}}, {}, r"nowhere/dataset\.json is missing"),
        ({"mix": {"SHEEP": 1.0}}, {}, "data.path and data.mix both say what to train on"),
        ({"path": None, "mix": {"SHEEP": 0.0}}, {}, r"data\.mix\.?\w* is 0\.0: input should be greater than 0"),
        ({"path": None, "mix": {}}, {}, "data.path is missing"),
        ({"packing": "packed"}, {}, "data.packing is 'packed'"),
    ],
)
def test_what_does_not_go_together(
    recipe: dict[str, Any], tmp_path: Path, prepared: dict[str, Path], data: Any, other: Any, message: str
) -> None:
    sheep = str(prepared["sheep"])
    values = with_data(recipe, tmp_path / "run", **{"path": sheep, **data}) | other
    values = json.loads(json.dumps(values).replace("SHEEP", sheep).replace("nowhere", str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match=message) as caught:
        lw.train(values, observer=Observer())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_size_may_ask_for_a_vocabulary(recipe: dict[str, Any], tmp_path: Path, prepared: dict[str, Path]) -> None:
    values = {
        "out": str(tmp_path / "run"),
        "size": "100K",
        "data": {"path": str(prepared["sheep"])},
        "model": {"max_seq_len": 32},
        "training": {"max_steps": 1, "batch_size": 2, "dtype": "fp32"},
    }
    assert lw.train(values, observer=Observer()).summary["steps"] == 1


def test_other_tokens_than_the_run_began_with(
    recipe: dict[str, Any], tmp_path: Path, prepared: dict[str, Path]
) -> None:
    """Prepared anew with another seed: a run that goes on must notice."""
    path = tmp_path / "farm.txt"
    settings = Settings(paths=(str(path),), tokenizer="char")
    prepare(settings, tmp_path / "data", seed=1)
    run = lw.train(with_data(recipe, tmp_path / "run", path=str(tmp_path / "data")), observer=Observer())
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"data/dataset\.json is missing"):
        lw.resume(run.directory)
    prepare(settings, tmp_path / "data", seed=2)
    with pytest.raises(UserError, match="does not hold the tokens that it held when"):
        lw.resume(run.directory)


def test_a_killed_preparation_goes_on_with_the_run(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was encoded before a kill is in the run's directory and is not encoded again."""
    script = """
import json, os, signal, sys
import leftward as lw
from leftward.data import merge
merge._Merge.write = lambda self: os.kill(os.getpid(), signal.SIGKILL)
lw.train(json.loads(sys.argv[1]), observer=lw.Observer())
"""
    killed = subprocess.run([sys.executable, "-c", script, json.dumps(recipe)])
    assert killed.returncode == -signal.SIGKILL
    monkeypatch.setattr(preparing, "_encode", None)
    run = lw.resume(recipe["out"], observer=Observer())
    assert run.summary["steps"] == 12
    assert not list(run.directory.glob("tokens.*"))
