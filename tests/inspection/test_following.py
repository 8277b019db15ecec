"""A page beside a run: the newest weights are read as they come, and what the run can't write is not asked of it."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from explored import TEXT, small_model

import leftward as lw
from leftward import files
from leftward.cli.explore import PROMPT, following
from leftward.formats.model_directory import save_model
from leftward.inspection import following as module
from leftward.inspection.server import Explorer
from leftward.inspection.subject import opening
from leftward.language_model import LanguageModel
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder


def publish(directory: Path, seed: int) -> LanguageModel:
    """A run's directory, as training leaves it at an evaluation."""
    shape = small_model()
    model = LanguageModel(random_decoder(shape.config, seed), shape.tokenizer)
    directory.mkdir(exist_ok=True, parents=True)
    (directory / "recipe.yaml").write_text("{}")
    save_model(directory, model.config, model.decoder.state_dict(), model.tokenizer)
    return model


@contextlib.contextmanager
def followed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Explorer]:
    monkeypatch.setattr(module, "_LOOKED_EVERY", 0.05)
    monkeypatch.setattr(module, "_SHARE", 1.0)
    made, ended = Explorer(lw.load(directory), "run", directory=directory, follows=True), threading.Event()
    made.first("the cat", max_tokens=0, temperature=0)
    thread = threading.Thread(target=module.follow, args=(made, directory, ended))
    thread.start()
    try:
        yield made
    finally:
        ended.set()
        thread.join(10)
    assert not thread.is_alive()


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


def newest(explorer: Explorer) -> str:
    return next(reversed(explorer.traces))


def shown(explorer: Explorer) -> Any:
    """What the page says of the last token."""
    return explorer.get(None).part("next", position=7).arrays["logits"]


def logits(model: LanguageModel) -> Any:
    ids = torch.tensor([model.tokenizer.encode("the cat", add_bos=True)])
    with torch.inference_mode():
        return model.decoder(ids)[0, 7].numpy()


def test_newer_weights_are_read_and_the_text_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = publish(tmp_path, seed=1)
    with followed(tmp_path, monkeypatch) as explorer:
        np.testing.assert_allclose(shown(explorer), logits(first), atol=1e-4)
        for number, seed in enumerate((2, 3, 4), 2):
            later = publish(tmp_path, seed)
            until(lambda number=number: newest(explorer) == f"t{number}")  # type: ignore[misc]
            np.testing.assert_allclose(shown(explorer), logits(later), atol=1e-4)
            about = explorer.get(None).part("about").data
            assert (about["prompt"], len(about["tokens"]), about["sampling"]["max_tokens"]) == ("the cat", 8, 0)
        assert len(explorer.traces) == 2  # each holds weights of its own


def answer(directory: Path, step: int, seed: int) -> LanguageModel:
    """The weights of the moment, as training leaves them when it is asked."""
    model = publish(directory / "current" / f"step-{step:08d}", seed)
    for older in (directory / "current").glob("step-*"):
        if int(older.name[5:]) != step:
            shutil.rmtree(older)
    return model


def test_while_a_run_trains_it_is_asked_for_the_weights_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, seed=1)
    with followed(tmp_path, monkeypatch) as explorer:
        time.sleep(0.3)
        assert not (tmp_path / "current").exists()  # nobody trains there
        with files.locked(tmp_path):
            until(lambda: (tmp_path / "current" / "asked").exists())
            for number, step in enumerate((7, 1200), 2):
                now = answer(tmp_path, step, seed=number)
                until(lambda number=number: newest(explorer) == f"t{number}")  # type: ignore[misc]
                np.testing.assert_allclose(shown(explorer), logits(now), atol=1e-4)
                assert explorer.get(None).part("about").data["name"] == f"{tmp_path.name}, step {step:,}"
            best = publish(tmp_path, seed=5)  # which are of an earlier step
            time.sleep(0.3)
            assert newest(explorer) == "t3"
        shutil.rmtree(tmp_path / "current")
        until(lambda: newest(explorer) == "t4")
        np.testing.assert_allclose(shown(explorer), logits(best), atol=1e-4)
        assert explorer.get(None).part("about").data["name"] == tmp_path.name


def test_weights_that_cannot_be_read_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, seed=1)
    with followed(tmp_path, monkeypatch) as explorer:
        (tmp_path / "model.safetensors").write_bytes(b"half")
        time.sleep(0.4)
        assert newest(explorer) == "t1"
        later = publish(tmp_path, seed=2)
        until(lambda: newest(explorer) == "t2")
        np.testing.assert_allclose(shown(explorer), logits(later), atol=1e-4)


def test_a_run_that_has_no_weights_yet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As `train --explore` does it: a process beside the training, which waits, serves, follows, and ends with it."""
    said = ""

    def says(pattern: str) -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return re.search(pattern, said) is not None

    with following(tmp_path / "run"):
        until(lambda: says("waiting for .*model.safetensors"))
        publish(tmp_path / "run", seed=1)
        until(lambda: says(r"\[http://\S+/"))
        url = re.findall(r"http://\S+/", said)[0]
        assert httpx.get(f"{url}api/status").json() == {"trace": "t1", "follows": True}
        publish(tmp_path / "run", seed=2)
        until(lambda: httpx.get(f"{url}api/status").json()["trace"] == "t2")
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    assert "Traceback" not in said + capfd.readouterr().err


def test_what_cannot_be_followed(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    command = [sys.executable, "-m", "leftward", "explore", str(tmp_path / "model.gguf"), "--follow"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "is a file: --follow takes the directory of a run" in done.stderr


# ---- what a page begins with


def model_of(alphabet: str, special_tokens: list[str], **fields: Any) -> LanguageModel:
    tokenizer = Tokenizer.train([alphabet], kind="char", special_tokens=special_tokens)
    shape = {"n_layers": 1, "d_model": 8, "n_heads": 1, "max_seq_len": 256} | fields
    return LanguageModel(random_decoder(lw.Config(vocab_size=tokenizer.vocab_size, **shape)), tokenizer)


@pytest.mark.parametrize(
    ("alphabet", "specials", "context", "wanted"),
    [
        (PROMPT, ["<|end|>"], 256, PROMPT),
        (TEXT, [], 256, "the cat sat on the mat. the dog sat on the"),
        ("abcdefghijklmnopqrstuvwxyz ", [], 256, "the cat sat on the mat the dog sat on the"),
        ("ACGT", [], 256, "TCATATTATTGATT"),
        (PROMPT, [], 20, "The cat sa"),
        ("0123456789+=", ["<|end|>"], 256, ""),
        ("0123456789+=", [], 256, "+"),
    ],
)
def test_it_begins_with_what_the_model_can_read(alphabet: str, specials: list[str], context: int, wanted: str) -> None:
    model = model_of(alphabet, specials, max_seq_len=context)
    ids = opening(model, PROMPT, 4096)
    assert model.tokenizer.decode(ids) == wanted
    assert len(ids) == len(wanted) + len(specials)  # which begins a text
    assert lw.trace(model, ids, max_tokens=1).part("about").data["n_prompt"] == len(ids)
