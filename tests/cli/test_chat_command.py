"""`leftward chat` from outside: a pipe, a terminal, and Ctrl-C, which stops the answer and not the conversation."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from leftward import Config
from leftward.cli import main
from leftward.formats.model_directory import save_model
from leftward.language_model import load
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder

TEXT = "The quick brown fox jumps over the lazy dog; é, ß and 𝄞 too.\n"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
PROGRAM = [sys.executable, "-m", "leftward.cli.main", "chat"]


def save(path: Path, max_seq_len: int, template: str | None = TEMPLATE) -> Path:
    trained = Tokenizer.train([TEXT * 3], vocab_size=300, special_tokens=("<|im_end|>", "<|im_start|>"))
    tokenizer = Tokenizer(trained._library, {"eos_token": "<|im_end|>", "chat_template": template})
    config = Config(vocab_size=tokenizer.vocab_size, max_seq_len=max_seq_len, n_layers=2, d_model=32, n_heads=4)
    save_model(path, config, random_decoder(config, std=0.3).state_dict(), tokenizer)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), 512)


class Done(NamedTuple):
    returncode: int
    stdout: bytes
    stderr: bytes


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """The command with its streams, in this process: torch takes seconds to import."""

    def run(*arguments: str | Path, stdin: str | bytes = "") -> Done:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        out, err = io.BytesIO(), io.BytesIO()
        monkeypatch.setattr(sys, "argv", ["leftward", "chat", *map(str, arguments)])
        for name, stream in (("stdin", io.BytesIO(data)), ("stdout", out), ("stderr", err)):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding="utf-8", write_through=True))
        with pytest.raises(SystemExit) as left:
            main.run()
        sys.stdout.flush()
        sys.stderr.flush()
        return Done(int(left.value.code or 0), out.getvalue(), err.getvalue())

    return run


def test_a_line_in_is_an_answer_out(chat: Callable[..., Done], model: Path) -> None:
    loaded = load(model)
    settings = {"max_tokens": 12, "temperature": 0}
    history = [{"role": "system", "content": "Be ß."}]
    expected = []
    for line in ("Hello", "é fox", "Hello"):
        if len(expected) == 2:
            del history[1:]  # the third comes after /reset
        history.append({"role": "user", "content": line})
        expected.append(loaded.chat(history, **settings))
        history.append({"role": "assistant", "content": expected[-1]})
    arguments = (model, "--system", "Be ß.", "--greedy", "--max-tokens", "12")
    done = chat(*arguments, "--json", stdin="Hello\n\né fox\r\n/reset\nHello\n/exit\nnever\n")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.decode().split("\n") if line]
    assert [answer["content"] for answer in answers] == expected
    assert {answer["finish_reason"] for answer in answers} <= {"stop", "length"}
    assert done.stderr.decode() == "[the conversation is forgotten]\n"
    plain = chat(*arguments, stdin="Hello\né fox")
    assert plain.stdout.decode() == f"{expected[0]}\n{expected[1]}\n"


def test_a_seed_gives_the_same_conversation(chat: Callable[..., Done], model: Path) -> None:
    runs = [chat(model, "--seed", "5", "--max-tokens", "9", stdin="Hi\nHi\n") for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout and runs[0].returncode == 0


def test_guesses_change_no_greedy_answer(chat: Callable[..., Done], model: Path) -> None:
    asked = (model, "--greedy", "--max-tokens", "9")
    plain = chat(*asked, stdin="fox fox fox\n")
    assert plain.returncode == 0 and plain.stdout.strip()
    for guesses in (("--speculative", "prompt-lookup"), ("--draft", model)):
        assert chat(*asked, *guesses, stdin="fox fox fox\n") == plain
    done = chat(model, "--speculative", "draft", stdin="Hi\n")
    assert (done.returncode, done.stderr) == (2, b"leftward: speculative is 'draft': valid: prompt-lookup\n")


def test_a_template_may_be_given(chat: Callable[..., Done], model: Path, tmp_path: Path) -> None:
    bare = save(tmp_path / "bare", 128, template=None)
    done = chat(bare, stdin="Hi\n")
    assert done.returncode == 2 and b"this model has no chat template" in done.stderr
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    done = chat(bare, "--template", tmp_path / "own.jinja", "--greedy", "--max-tokens", "5", stdin="The fox\n")
    assert done.stdout.decode() == load(bare).generate("The fox", max_tokens=5, temperature=0) + "\n"


def test_mistakes_are_one_line_and_exit_code_2(chat: Callable[..., Done], model: Path, tmp_path: Path) -> None:
    for arguments, stdin, words in [
        ((model, "--top-p", "7"), "Hi\n", b"top_p is 7.0"),
        ((model, "--dtype", "fp16"), "Hi\n", b"dtype is 'fp16'"),
        ((tmp_path / "nothing",), "Hi\n", b"does not exist"),
        ((model, "--template", tmp_path / "nothing"), "Hi\n", b"cannot read"),
        ((model,), b"Hi\n\xff\n", b"line 2 on stdin is not UTF-8 text (byte 0)"),
        ((model,), "fox " * 600, b"more than the model's context of 512"),
    ]:
        done = chat(*arguments, "--max-tokens", "3", stdin=stdin)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr and len(done.stderr.splitlines()) == 1


def test_mistakes_and_help_do_not_wait_for_torch() -> None:
    code = """
import sys
from leftward.cli import main
sys.argv = ["leftward", "chat", "nowhere"]
try:
    main.run()
finally:
    assert "torch" not in sys.modules and "jinja2" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 2


class Terminal:
    """A person at the command: types, and reads what is shown."""

    def __init__(self, *arguments: str | Path) -> None:
        leader, follower = pty.openpty()
        self._leader = leader
        # In a session of its own, whose terminal this is, so that Ctrl-C reaches it.
        self.process = subprocess.Popen(
            [*PROGRAM, *map(str, arguments)],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(follower)
        self.shown = ""
        self._until = time.monotonic() + 120

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def read(self) -> None:
        assert time.monotonic() < self._until, self.shown
        if select.select([self._leader], [], [], 0.5)[0]:
            self.shown += os.read(self._leader, 65536).decode(errors="replace")

    def wait_for(self, text: str, after: int = 0) -> int:
        """The place behind `text` in what is shown."""
        while (place := self.shown.find(text, after)) < 0:
            self.read()
        return place + len(text)

    def close(self) -> int:
        code = self.process.wait(timeout=60)
        os.close(self._leader)
        return code


def test_ctrl_c_stops_the_answer_and_then_leaves(tmp_path: Path) -> None:
    terminal = Terminal(save(tmp_path, 100_000), "--seed", "1", "--max-tokens", "90000", "--temperature", "2")
    place = terminal.wait_for("> ")
    assert "/reset forgets" in terminal.shown
    terminal.type("Hello\n")
    place = terminal.wait_for("Hello\r\n", place)
    while len(terminal.shown) < place + 40:  # it is writing
        terminal.read()
    terminal.process.send_signal(signal.SIGINT)
    place = terminal.wait_for("\r\n> ", place)
    terminal.type("/reset\n")
    place = terminal.wait_for("forgotten", place)
    place = terminal.wait_for("> ", place)
    for _ in range(10):  # one that comes before the prompt waits for a key is seen at the next
        terminal.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            terminal.process.wait(timeout=5)
            break
    assert terminal.close() == 0
    assert "Traceback" not in terminal.shown


def test_ctrl_d_leaves(model: Path) -> None:
    terminal = Terminal(model)
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.close() == 0


def test_ctrl_c_in_a_pipe_ends_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, str(save(tmp_path, 100_000)), "--seed", "1", "--max-tokens", "90000", "--temperature", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"Hello\n")
    process.stdin.flush()
    os.read(process.stdout.fileno(), 1)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in errors
