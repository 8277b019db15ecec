"""A step that makes no numbers: the run stops, says which rows it was, and keeps them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import leftward as lw
from leftward.errors import UserError
from leftward.text.tokenizer import Tokenizer
from leftward.training import divergence, loop
from leftward.training.progress import Diverged

RARE = "§"  # in every ninth line


@pytest.fixture
def poisoned(recipe, monkeypatch):
    """A recipe whose model can't read one rare character: its embedding is infinite."""
    path = Path(recipe["data"]["path"])
    lines = path.read_text(encoding="utf-8").splitlines()
    text = "".join(f"{line}{RARE * (n % 9 == 0)}\n" for n, line in enumerate(lines))
    path.write_text(text, encoding="utf-8")
    recipe["model"]["tie_embeddings"] = False
    recipe["training"] |= {"eval_interval": 0, "save_interval": 1000}
    make = loop.Decoder

    def poison(config):
        decoder = make(config)
        with torch.no_grad():
            decoder.embed.weight[Tokenizer.load(Path(recipe["out"]) / "tokens").encode(RARE)] = math.inf
        return decoder

    monkeypatch.setattr(loop, "Decoder", poison)
    return recipe, text


def kept(run):
    (path,) = Path(run).glob("bad-batch-*.safetensors")
    return path, load_file(path), json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_the_rows_that_hold_the_bad_token_are_named_and_the_batch_is_kept(poisoned, micro, packing):
    recipe, text = poisoned
    recipe["training"]["micro_batch_size"] = micro
    recipe["data"] |= {"packing": packing, "document_separator": "\n"} if packing == "documents" else {}
    with pytest.raises(Diverged) as caught:
        lw.train(recipe)
    path, tensors, description = kept(recipe["out"])
    tokenizer = Tokenizer.load(Path(recipe["out"]) / "tokens")
    (rare,) = tokenizer.encode(RARE)
    bad = [row for row in range(8) if rare in tensors["ids"][row]]
    assert bad and len(bad) < 8  # or the test would show nothing
    assert tensors["ids"].shape == tensors["targets"].shape == (8, 32)
    assert [row for row in range(8) if not tensors["losses"][row].isfinite()] == bad
    assert description["suspects"] == bad and description["step"] == int(path.stem.rpartition("-")[2])
    assert description["loss"] == "nan" and description["position"] == 8 * (description["step"] - 1)
    for row, told in enumerate(description["rows"]):
        assert told["row"] == row and tokenizer.decode(tensors["ids"][row].tolist()).startswith(told["text"])
        assert told["loss"] == ("nan" if row in bad else pytest.approx(tensors["losses"][row].item()))
        if packing == "concatenate":
            assert told["text"] in text and tensors["ids"][row, 1:].equal(tensors["targets"][row, :-1])
    assert ("documents" in tensors) == (packing == "documents")
    message = str(caught.value)
    assert "\n" not in message and f"load_file({str(path)!r})" in message and str(path.with_suffix(".json")) in message
    shown = ", ".join(map(str, bad[:5])) + " …" * (len(bad) > 5)
    begins = " ".join(description["rows"][bad[0]]["text"][:60].split())
    assert f"in row {shown} of 0 to 7, which begins {begins!r}" in message


def test_where_no_row_repeats_it_the_micro_batch_is_named(recipe, monkeypatch):
    real, calls = loop.head_loss, []

    def poison(*arguments):
        calls.append(1)
        return real(*arguments) * (math.inf if len(calls) == 8 else 1.0)

    monkeypatch.setattr(loop, "head_loss", poison)
    recipe["training"]["micro_batch_size"] = 4
    with pytest.raises(Diverged, match="the loss became inf .* at step 4, in row 4, 5, 6, 7 of 0 to 7"):
        lw.train(recipe)
    _, tensors, description = kept(recipe["out"])
    assert tensors["losses"].isfinite().all() and description["suspects"] == [4, 5, 6, 7]
    assert description["loss"] == "inf"


def test_a_gradient_alone_names_no_row_but_keeps_the_batch(recipe, monkeypatch):
    real = loop.Optimizer.grad_norm
    monkeypatch.setattr(loop.Optimizer, "grad_norm", lambda self: math.nan if real(self) else 0.0)
    with pytest.raises(Diverged, match="gradient's norm nan at step 1, with a finite loss in each of 8 rows"):
        lw.train(recipe)
    _, tensors, description = kept(recipe["out"])
    assert description["suspects"] == [] and description["grad_norm"] == "nan"
    # At the start everything is equally likely: the loss is the logarithm of the vocabulary, in each row.
    np.testing.assert_allclose(tensors["losses"], math.log(28), rtol=0.05)
    assert description["loss"] == pytest.approx(tensors["losses"].mean().item(), rel=1e-5)


def test_a_full_disk_does_not_hide_what_happened(recipe, monkeypatch):
    def full(path, tensors):
        raise UserError(f"cannot write {path}: the disk is full")

    monkeypatch.setattr(divergence, "write_tensors", full)
    monkeypatch.setattr(loop.Optimizer, "grad_norm", lambda self: math.nan)
    with pytest.raises(Diverged, match="gradient's norm nan at step 1.* could not be kept .*the disk is full"):
        lw.train(recipe)
