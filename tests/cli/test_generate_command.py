"""`leftward generate` from outside: what is on stdout, what on stderr, and the exit code."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest

from leftward import Config
from leftward.cli import generate as command
from leftward.cli import main
from leftward.formats.model_directory import save_model
from leftward.generation.settings import Sampling
from leftward.language_model import load
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder

TEXT = "The quick brown fox jumps over the lazy dog; é, ß and 𝄞 too.\n"
PROGRAM = [sys.executable, "-m", "leftward.cli.main", "generate"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.train([TEXT * 3], kind="bpe", vocab_size=280)
    config = Config(vocab_size=tokenizer.vocab_size, max_seq_len=64, n_layers=2, d_model=32, n_heads=4)
    save_model(path, config, random_decoder(config, std=0.3).state_dict(), tokenizer)
    return path


def leftward(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*PROGRAM, *map(str, arguments)], input=stdin, capture_output=True, timeout=120)


def test_stdout_holds_the_new_text_and_nothing_else(model: Path) -> None:
    expected = load(model).generate("The fox", max_tokens=20, seed=4)
    done = leftward(model, "The fox", "--max-tokens", "20", "--seed", "4")
    assert done.returncode == 0
    assert done.stdout.decode() == expected + "\n"
    assert done.stderr == b""


def test_a_context_that_rolls_in_eight_bits(model: Path) -> None:
    how = {"at_context": "roll", "n_keep": 2, "kv_dtype": "int8"}
    expected = load(model).generate("The fox", max_tokens=90, temperature=0, stop_ids=(), **how)
    options = ["--greedy", "--max-tokens", "90", "--at-context", "roll", "--n-keep", "2", "--kv-dtype", "int8"]
    done = leftward(model, "The fox", *options)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == expected + "\n"


def test_stdin_and_json(model: Path) -> None:
    expected = load(model).generate("é fox", max_tokens=5, temperature=0)
    done = leftward(model, "--greedy", "--max-tokens", "5", "--json", stdin="é fox\n".encode())
    assert json.loads(done.stdout) == {
        "sample": 0,
        "seed": json.loads(done.stdout)["seed"],
        "prompt": "é fox",
        "text": expected,
        "tokens": 5,
        "finish_reason": "length",
    }
    again = leftward(model, "-", "--greedy", "--max-tokens", "5", stdin="é fox\n".encode())
    assert again.stdout.decode() == expected + "\n"


def test_logprobs_in_json(model: Path) -> None:
    found = load(model).complete("The", max_tokens=3, temperature=0, logprobs=2, prompt_logprobs=1)
    done = leftward(
        model, "The", "--greedy", "--max-tokens", "3", "--json", "--logprobs", "2", "--prompt-logprobs", "1"
    )
    said = json.loads(done.stdout)
    assert found.logprobs is not None and found.prompt_logprobs is not None
    assert [each["id"] for each in said["logprobs"]] == list(found.ids)
    assert [each["logprob"] for each in said["logprobs"]] == [each.logprob for each in found.logprobs]
    assert "".join(each["token"] for each in said["logprobs"]) == found.text
    assert [[(top["id"], top["logprob"]) for top in each["top"]] for each in said["logprobs"]] == [
        list(each.top) for each in found.logprobs
    ]
    assert [each["ruled_logprob"] for each in said["logprobs"]] == [0.0] * 3  # greedy: certain
    assert [each["logprob"] for each in said["prompt_logprobs"]] == [each.logprob for each in found.prompt_logprobs]


def test_rules_are_the_same_as_in_python(model: Path) -> None:
    rules = ["--logit-bias", "70=5.5", "--logit-bias", "71=-inf", "--bad-word", "fox", "--min-tokens", "4"]
    rules += ["--stop-id", "72", "--frequency-penalty", "0.5", "--presence-penalty", "0.25", "--typical-p", "0.9"]
    done = leftward(model, "The", "--seed", "3", "--max-tokens", "20", *rules, "-n", "2", "--best-of", "3")
    texts = load(model).generate(
        "The",
        seed=3,
        max_tokens=20,
        logit_bias={70: 5.5, 71: float("-inf")},
        bad_words=["fox"],
        min_tokens=4,
        stop_ids=[72],
        frequency_penalty=0.5,
        presence_penalty=0.25,
        typical_p=0.9,
        n=2,
        best_of=3,
    )
    assert done.stdout.decode() == "\n".join(f"--- sample {i + 1} of 2 ---\n{text}\n" for i, text in enumerate(texts))


def test_beams(model: Path) -> None:
    found = load(model).beam_search("The", num_beams=3, n=2, max_tokens=8, length_penalty=0.5, early_stopping="never")
    options = ["--num-beams", "3", "-n", "2", "--max-tokens", "8", "--length-penalty", "0.5"]
    done = leftward(model, "The", *options, "--early-stopping", "never", "--json")
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["text"], each["score"]) for each in said] == [(each.text, each.score) for each in found]
    plain = leftward(model, "The", *options, "--early-stopping", "never")
    assert found[1].text in plain.stdout.decode() and plain.stderr == b""


def test_samples_are_apart_and_in_order(model: Path) -> None:
    texts = load(model).generate("The", n=3, max_tokens=9, seed=2)
    done = leftward(model, "The", "-n", "3", "--max-tokens", "9", "--seed", "2")
    parts = [f"--- sample {i + 1} of 3 ---\n{text}\n" for i, text in enumerate(texts)]
    assert done.stdout.decode() == "\n".join(parts)
    lines = leftward(model, "The", "-n", "3", "--max-tokens", "9", "--seed", "2", "--json").stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts
    seeds = [json.loads(line)["seed"] for line in lines]
    assert load(model).generate("The", max_tokens=9, seed=seeds[2]) == texts[2]


def test_a_drawn_seed_is_said_on_stderr(model: Path) -> None:
    done = leftward(model, "The", "--max-tokens", "20")
    seed = done.stderr.decode().split("[seed ")[1].split("]")[0]
    assert leftward(model, "The", "--max-tokens", "20", "--seed", seed).stdout == done.stdout


def test_a_full_context_is_said_on_stderr(model: Path) -> None:
    done = leftward(model, "The", "--max-tokens", "500", "--greedy")  # which never comes to the end of a text here
    assert "context is full" in done.stderr.decode() and "64 tokens" in done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["The", "--top-p", "7"], "top_p is 7.0"),
        (["The", "-n", "0"], "n is 0"),
        (["The", "-n", "3", "--best-of", "2"], "best_of is 2"),
        (["The", "--logit-bias", "much"], "logit-bias is 'much'"),
        (["The", "--logprobs", "2"], "--logprobs is shown with --json only"),
        (["The", "--length-penalty", "2"], "give --num-beams too"),
        (["The", "--num-beams", "2", "--top-k", "2"], "a beam search has no use for top_k"),
        (["The", "--num-beams", "2", "--early-stopping", "often"], "early-stopping is 'often'"),
        (["The", "--truncate", "right"], "truncate is 'right'"),
        (["The", "--at-context", "rol"], "at-context is 'rol': did you mean roll?"),
        (["The", "--kv-dtype", "int4"], "kv-dtype is 'int4'"),
        (["The", "--n-keep", "-1", "--at-context", "roll"], "n_keep is -1"),
        (["The", "--num-beams", "2", "--kv-dtype", "int8"], "--num-beams goes without"),
        (["The", "--dtype", "fp16"], "dtype is 'fp16'"),
        (["é𝄞ß" * 40], "more than the model's context of 64"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(model: Path, arguments: list[str], words: str) -> None:
    done = leftward(model, *arguments)
    assert done.returncode == 2
    assert done.stdout == b""
    assert words in done.stderr.decode()
    assert len(done.stderr.splitlines()) == 1


def test_no_model_and_no_text(tmp_path: Path, model: Path) -> None:
    done = leftward(tmp_path / "nothing", "The")
    assert done.returncode == 2 and b"does not exist" in done.stderr
    done = leftward(model, stdin=b"\xff\xfe")
    assert done.returncode == 2 and b"not UTF-8 text" in done.stderr


def test_a_reader_that_leaves_ends_it_quietly(model: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, str(model), "The", "--seed", "1", "-n", "40"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


def test_one_sample_that_fails_leaves_the_others(tmp_path: Path) -> None:
    """Behind an x there are no numbers, and some samples write one."""
    tokenizer = Tokenizer.train(["abx"], kind="char")
    config = Config(vocab_size=tokenizer.vocab_size, max_seq_len=16, n_layers=1, d_model=16, tie_embeddings=False)
    decoder = random_decoder(config)
    decoder.embed.weight.data[tokenizer.encode("x")] = float("nan")
    save_model(tmp_path, config, decoder.state_dict(), tokenizer)
    asked = (tmp_path, "a", "--max-tokens", "4", "--seed", "1", "-n", "9", "--temperature", "1")
    done = leftward(*asked, "--json")
    results = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [result["sample"] for result in results if "error" in result]
    assert 0 < len(failed) < 9
    for result in results:
        ends_early = result["text"].endswith("x") and result["tokens"] < 4
        assert (result["finish_reason"] == "error") == ends_early == ("error" in result)
    message = f"leftward: output {failed[0] + 1} of 9: the model's logits are not finite numbers"
    plain = leftward(*asked)
    assert (
        plain.stdout.decode()
        == "\n\n".join(f"--- sample {result['sample'] + 1} of 9 ---\n{result['text']}" for result in results) + "\n"
    )
    for each in (done, plain):
        assert each.returncode == 2
        assert each.stderr.decode().startswith(message) and len(each.stderr.splitlines()) == 1


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_exit_code_that_a_verb_leaves_with_is_that_of_the_command(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(**_: object) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(main, "app", leave)
    with pytest.raises(SystemExit) as left:
        main.run()
    assert left.value.code == code


def test_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train([TEXT * 3], kind="bpe", vocab_size=280)
    config = Config(vocab_size=280, max_seq_len=100_000, n_layers=2, d_model=32, n_heads=4)
    save_model(tmp_path, config, random_decoder(config, std=0.3).state_dict(), tokenizer)
    process = subprocess.Popen(
        [*PROGRAM, str(tmp_path), "The", "--seed", "1", "--max-tokens", "99000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)  # it is writing
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_without_options_the_command_samples_as_python_does(model: Path) -> None:
    """An option that is not given says nothing, so that the model's defaults count, and then Sampling's."""
    parameters = inspect.signature(command.generate).parameters
    for field in dataclasses.fields(Sampling):
        if field.name == "sampler":  # a function
            continue
        assert parameters[field.name].default is None
        if isinstance(field.default, int | float):
            _, option = typing.get_args(parameters[field.name].annotation)
            assert option.help.endswith(f"[default: the model's, or {field.default}]")


@pytest.mark.parametrize("arguments", [["nowhere", "The"], [".", "The", "--top-p", "7"], ["--help"]])
def test_mistakes_and_help_do_not_wait_for_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from leftward.cli import main
sys.argv = ["leftward", "generate", *{arguments!r}]
try:
    main.run()
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == (0 if arguments == ["--help"] else 2), done.stderr


def test_output_follows_what_files_and_options_say(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="llguidance (leftward's extra `constrained`) is not installed")
    compact = {"whitespace_flexible": False}  # or a random model may fill its context with spaces
    (tmp_path / "schema.json").write_text(json.dumps({"enum": ["fox", [1, None]], "x-guidance": compact}))
    (tmp_path / "grammar.lark").write_text('start: "<" ("a" | "b" start){1,3} ">"')
    done = leftward(model, "The", "--json-schema", tmp_path / "schema.json")
    assert json.loads(done.stdout) in ("fox", [1, None])
    done = leftward(model, "The", "--grammar", tmp_path / "grammar.lark", "--max-tokens", "60")
    assert done.stdout.startswith(b"<")
    done = leftward(model, "The", "--choice", "dog", "--choice", " fox", "--speculative", "prompt-lookup")
    assert done.stdout in (b"dog\n", b" fox\n")
    done = leftward(model, "The", "--regex", "[a-z]{9}", "--max-tokens", "2")
    assert b"[the output was cut before it was complete: raise --max-tokens]" in done.stderr
    done = leftward(model, "The", "--regex", "(")
    assert (done.returncode, done.stderr) == (2, b"leftward: regex is not possible: unclosed group\n")


def test_guesses_of_a_draft_and_of_the_prompt(model: Path) -> None:
    asked = ["The fox. The fox.", "--greedy", "--max-tokens", "20"]
    expected = load(model).generate("The fox. The fox.", temperature=0, max_tokens=20)
    assert leftward(model, *asked, "--speculative", "prompt-lookup").stdout.decode() == expected + "\n"
    result = json.loads(leftward(model, *asked, "--json", "--draft", model).stdout)
    assert result["text"] == expected
    assert result["n_accepted"] == result["n_guessed"] > 10  # its own draft
    done = leftward(model, "The", "--speculative", "yes")
    assert (done.returncode, done.stderr) == (2, b"leftward: speculative is 'yes': valid: prompt-lookup\n")
    done = leftward(model, "The", "--speculative", "prompt-lookup", "--draft", model)
    assert done.returncode == 2 and b"--speculative and --draft are both given" in done.stderr


PROMPTS = ["The fox", "jumps\u2028over", "the lazy dog; é"]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "stdin"])
def test_a_file_of_prompts(model: Path, tmp_path: Path, kind: str) -> None:
    """Each says what it says alone, in the file's order, and what else stands in a record stays."""
    path, stdin = tmp_path / f"prompts.{kind}", b""
    if kind == "jsonl":
        second = {"prompt": PROMPTS[1], "id": 7, "text": "of another", "error": "of another"}
        records = [json.dumps(PROMPTS[0]), json.dumps(second, ensure_ascii=False), ""]
        path.write_text("\n".join([*records, json.dumps({"prompt": PROMPTS[2], "id": [8]}), ""]))
    else:
        path.write_text("\n\n".join(PROMPTS) + "\n")
    if kind == "stdin":
        path, stdin = Path("-"), path.read_bytes()
    expected = [load(model).complete(prompt, max_tokens=9, n=2, seed=4) for prompt in PROMPTS]
    done = leftward(model, "--prompts", path, "--max-tokens", "9", "--samples", "2", "--seed", "4", stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = [(line["prompt"], line["sample"], line["text"], line["seed"]) for line in lines]
    assert found == [
        (prompt, i, each.text, each.seed)
        for prompt, samples in zip(PROMPTS, expected, strict=True)
        for i, each in enumerate(samples)
    ]
    assert not any("error" in line for line in lines)
    assert [line.get("id") for line in lines] == ([None, None, 7, 7, [8], [8]] if kind == "jsonl" else [None] * 6)


def test_beams_of_a_file_of_prompts(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    expected = [each.text for each in load(model).beam_search(PROMPTS, num_beams=3, n=2, max_tokens=6)]
    done = leftward(model, "--prompts", path, "--max-tokens", "6", "--samples", "2", "--num-beams", "3")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["text"] for line in lines] == expected
    assert [line["prompt"] for line in lines] == [prompt for prompt in PROMPTS for _ in range(2)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("\n \n", "has no prompt in it"),
        ('"a"\n{"prompt": "b"\n', "prompts.jsonl:2: this is not JSON"),
        ("[" * 100_000, "prompts.jsonl:1: this is not JSON"),
        ('{"text": "b"}', 'prompts.jsonl:1: this must be a text or an object with a text as "prompt"'),
        ('"\\ud800"', "prompts.jsonl:1: half a surrogate pair is no text"),
        ('{"prompt": "a", "id": ["\\udc00"]}', "prompts.jsonl:1: half a surrogate pair is no text"),
        ('"a"\n"' + "dog " * 200 + '"', "prompt 2 of 2: the prompt has"),
    ],
)
def test_a_file_that_has_no_prompts(model: Path, tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    done = leftward(model, "--prompts", path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert words in done.stderr.decode() and done.stderr.count(b"\n") == 1


def test_prompts_in_two_places(model: Path, tmp_path: Path) -> None:
    done = leftward(model, "The fox", "--prompts", tmp_path / "prompts.txt")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"a prompt and --prompts are both given" in done.stderr
