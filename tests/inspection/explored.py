"""What the tests of the page, its server and its reports share: a small model, and a server that has it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

import leftward as lw
from leftward.inspection.server import Explorer, app
from leftward.language_model import LanguageModel
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder

TEXT = "the cat sat on the mat and the dog sat on the log. "


def small_model(**fields: Any) -> LanguageModel:
    tokenizer = Tokenizer.train([TEXT * 20], kind="char", special_tokens=["<|end|>"])
    shape: dict[str, Any] = {"n_layers": 3, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 64}
    config = lw.Config(vocab_size=tokenizer.vocab_size, **(shape | fields))
    return LanguageModel(random_decoder(config), tokenizer)


def explorer(prompt: str = "the cat s", **fields: Any) -> Explorer:
    made = Explorer(small_model(**fields), "small")
    made.first(prompt, max_tokens=20, min_tokens=20, seed=1)
    return made


@contextlib.contextmanager
def listening(explorer: Explorer) -> Iterator[str]:
    """Its address."""
    hosts: set[str] = set()
    server = uvicorn.Server(uvicorn.Config(app(explorer, hosts), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    hosts.add(f"localhost:{port}")
    yield f"http://localhost:{port}/"
    server.should_exit = True
    thread.join(10)
