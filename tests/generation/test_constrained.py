"""Constrained output: what may come next, that what comes out parses, and that what can't be is one line."""

from __future__ import annotations

import ast
import io
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
import sentencepiece
import torch

from leftward import Config, LanguageModel
from leftward.errors import UserError
from leftward.generation import constrained
from leftward.generation.constrained import Matcher, matcher_of
from leftward.generation.engine import Engine
from leftward.generation.requests import Request
from leftward.generation.settings import Sampling
from leftward.generation.speculative import Speculator
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder

pytest.importorskip("llguidance", reason="llguidance (leftward's extra `constrained`) is not installed")

TEXT = 'Once {"name": "Bob", "age": 12, "tags": ["a b", null, true, false]} there was: é ∀𝄞 (3 + 45) * 6 - 7 / 8.\n'


def sentencepieces(kind: str) -> Tokenizer:
    """With a token for each byte, and a space before the first word."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, TEXT.upper(), "the quick brown fox jumps over the lazy dog"] * 20),
        model_writer=model,
        vocab_size=360 if kind == "bpe" else 340,
        model_type=kind,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return _from_sentencepiece(model.getvalue())


def _from_sentencepiece(model: bytes) -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tokenizer.model").write_bytes(model)
        return Tokenizer.load(directory)


TOKENIZERS = {
    "bpe": Tokenizer.train([TEXT * 4], kind="bpe"),
    "char": Tokenizer.train([TEXT + "".join(map(chr, range(32, 127)))], kind="char"),
    "word": Tokenizer.train([TEXT * 4], kind="word"),
    "sentencepiece": sentencepieces("bpe"),
    "unigram": sentencepieces("unigram"),
}
WITH_A_SPACE_FIRST = ("word", "sentencepiece", "unigram")


def language_model(kind: str, *, seed: int = 0, max_seq_len: int = 512) -> LanguageModel:
    tokenizer = TOKENIZERS[kind]
    config = Config(vocab_size=tokenizer.vocab_size + 3, max_seq_len=max_seq_len, n_layers=1, d_model=16, n_heads=2)
    return LanguageModel(random_decoder(config, seed=seed, std=0.4), tokenizer)


def matcher(
    kind: str, *, begins_text: bool = False, end_ids: Sequence[int] | None = None, **constraint: Any
) -> Matcher:
    tokenizer = TOKENIZERS[kind]
    ends = [tokenizer.eos_id] if end_ids is None else end_ids
    sampling = Sampling.of(constraint)
    found = matcher_of(sampling, tokenizer, tokenizer.vocab_size + 3, ends, begins_text=begins_text)
    assert found is not None
    return found


# ---- what may come next

LANGUAGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "choice": (
        {"choice": ["ab", "abc", " a", "", "12", "é", "é∀", '"\\']},
        {"ab", "abc", " a", "", "12", "é", "é∀", '"\\'},
    ),
    "regex": (
        {"regex": "(a|ab)(c|bcd)? ?"},
        {a + b + c for a in ("a", "ab") for b in ("", "c", "bcd") for c in ("", " ")},
    ),
    "schema": (
        {"json_schema": {"enum": ["a b", 12, None, [True]], "x-guidance": {"whitespace_flexible": False}}},
        {'"a b"', "12", "null", "[true]"},
    ),
    "grammar": ({"grammar": 'start: "(" inner ")" | "x"\ninner: "1" | "22"'}, {"(1)", "(22)", "x"}),
    "gbnf": ({"grammar": 'root ::= "(" inner ")" | "x"\ninner ::= "1" | "22"'}, {"(1)", "(22)", "x"}),
}


def brute_force(tokenizer: Tokenizer, texts: Iterable[bytes], so_far: bytes, is_first: bool) -> set[int]:
    """Of all ids those whose bytes begin or go on a text."""
    found = set()
    for token_id in range(tokenizer.vocab_size):
        try:
            data = tokenizer.token_bytes(token_id)
        except UserError:
            continue
        if token_id in tokenizer.special_ids or not data:
            continue
        longer = so_far + (data.removeprefix(b" ") if is_first else data)
        if any(text.startswith(longer) for text in texts):
            found.add(token_id)
    return found


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("begins_text", [False, True])
def test_every_token_that_can_lead_to_a_text_is_allowed_and_no_other(
    kind: str, language: str, begins_text: bool
) -> None:
    constraint, texts = LANGUAGES[language]
    tokenizer = TOKENIZERS[kind]
    encoded = [text.encode() for text in texts]
    drops = begins_text and kind in WITH_A_SPACE_FIRST
    for walk in range(12):
        at = matcher(kind, begins_text=begins_text, **constraint)
        so_far, generator = b"", torch.Generator().manual_seed(walk)
        for step in itertools.count():
            allowed = set(at.allowed().nonzero()[:, 0].tolist())
            assert (tokenizer.eos_id in allowed) == (so_far in encoded)
            allowed -= {tokenizer.eos_id}
            assert allowed == brute_force(tokenizer, encoded, so_far, drops and step == 0)
            assert at.is_over == (so_far in encoded and not allowed)
            if not allowed:
                break
            token_id = sorted(allowed)[int(torch.randint(len(allowed), (1,), generator=generator))]
            at.accept(token_id)
            data = tokenizer.token_bytes(token_id)
            so_far += data.removeprefix(b" ") if drops and step == 0 else data
        assert so_far in encoded


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("begins_text", [False, True])
def test_what_was_accepted_can_be_taken_back(kind: str, begins_text: bool) -> None:
    at = matcher(kind, begins_text=begins_text, regex=r" ?(ab|c|[0-9]{2})*x?")
    generator = torch.Generator().manual_seed(1)
    states = [at.allowed().clone()]
    for _ in range(300):
        choices = [i for i in at.allowed().nonzero()[:, 0].tolist() if i != TOKENIZERS[kind].eos_id]
        if not choices or torch.rand(1, generator=generator) < 0.4:
            n = int(torch.randint(len(states), (1,), generator=generator))
            at.rewind(n)
            del states[len(states) - n :]
        else:
            at.accept(choices[int(torch.randint(len(choices), (1,), generator=generator))])
            states.append(at.allowed().clone())
        assert torch.equal(at.allowed(), states[-1])


def test_a_step_that_leads_nowhere_leaves_the_matcher_where_it_was() -> None:
    closed = Tokenizer.train(["ab("], kind="char")
    at = matcher_of(Sampling.of({"regex": "ab|a(b)?€|(x)?b"}), closed, closed.vocab_size, begins_text=False)
    assert at is not None
    assert sorted(map(closed.decode, at.allowed().nonzero().tolist())) == ["a", "b"]
    dead = matcher_of(Sampling.of({"regex": "a€|b"}), closed, closed.vocab_size, begins_text=False)
    assert dead is not None
    with pytest.raises(
        UserError, match="^no token of the vocabulary can write what the constraint demands behind 'a'$"
    ):
        dead.accept(closed.encode("a")[0])
    dead.accept(closed.encode("b")[0])
    assert dead.is_over


def test_control_tokens_are_no_text_but_a_grammar_may_name_them() -> None:
    tokenizer = Tokenizer.train([TEXT], kind="bpe", special_tokens=["<|end|>", "<|tool|>"])
    vocab_size = tokenizer.vocab_size
    anything = matcher_of(Sampling.of({"regex": r"(?s:.)*"}), tokenizer, vocab_size, [0], begins_text=False)
    assert anything is not None
    assert (~anything.allowed()).nonzero()[:, 0].tolist()[:1] == [1]  # <|tool|>, and bytes that begin no character
    named = matcher_of(Sampling.of({"grammar": 'start: <|tool|> "a"'}), tokenizer, vocab_size, [0], begins_text=False)
    assert named is not None
    assert named.allowed().nonzero()[:, 0].tolist() == [1]


# ---- what comes out

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a b", None, True, 2.5]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
NESTED = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "value": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": -2, "maximum": 2}]},
                "left": {"anyOf": [{"const": 0}, {"$ref": "#/$defs/tree"}]},
            },
            "required": ["value", "left"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
REGEXES = [
    r"(?:ab|c){1,5}\d{2}",
    r"[a-z]{1,8}@[a-z]{1,8}\.(com|org)",
    r" ?[^\s0-9\x00-\x1f]{2,9}",
    r"[é∀b]{0,3}(é|∀)?",
    "a?b?",
]
EXPRESSION = """
start: term (" + " term | " * " term){0,3}
term: NUMBER | "(" start ")"
NUMBER: /[1-9][0-9]{0,3}/
"""


def outputs(kind: str, n: int, **settings: Any) -> list[str]:
    """Texts that are complete, of a random model that samples."""
    settings = {"temperature": 1.5, "top_p": 1.0, "max_tokens": 200, "seed": 5, **settings}
    found = language_model(kind).complete(["", "Once"], n=n // 2, **settings)
    assert {each.finish_reason for each in found} <= {"stop", "length"}
    complete = [each.text for each in found if each.finish_reason == "stop"]
    assert len(complete) >= n / 4
    return complete


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_json_follows_its_schema(kind: str) -> None:
    for schema in (PERSON, NESTED):
        for text in outputs(kind, 16, json_schema=schema):
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_whole_output_matches_the_regex(kind: str) -> None:
    for regex in REGEXES:
        for text in outputs(kind, 20, regex=regex):
            assert re.fullmatch(regex, text), (regex, text)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_output_is_one_of_the_choices(kind: str) -> None:
    choices = ["true", " true", "", "tru", 'a "quoted" one\\', "two\nlines", "é∀𝄞", "ab" * 20]
    if kind == "char":
        choices.remove("two\nlines")
        choices.append("\t")  # which the vocabulary can't write
    found = set(outputs(kind, 60, choice=choices, temperature=8.0))
    assert found <= set(choices) - {"\t"}
    assert len(found) > 3


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_output_follows_the_grammar(kind: str) -> None:
    for text in outputs(kind, 30, grammar=EXPRESSION, top_k=20):
        ast.parse(text, mode="eval")
        assert re.fullmatch(r"[0-9+* ()]+", text)


def test_a_schema_may_be_a_pydantic_model_or_any_json() -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=5)
        age: int = pydantic.Field(ge=0, le=9)

    for text in outputs("bpe", 20, json_schema=Person):
        Person.model_validate_json(text)
    for text in outputs("bpe", 20, json_schema={"type": "array", "maxItems": 2, "items": {"type": "boolean"}}):
        assert len(json.loads(text)) <= 2
    assert Sampling.of({"json_schema": True}).json_schema == "true"
    assert Sampling.of({"json_schema": '{"type": "null"}'}).json_schema == '{"type": "null"}'


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_an_answer_that_loses_its_first_space_follows_too(kind: str) -> None:
    model = language_model(kind)
    for seed in range(12):
        engine = Engine(model.decoder, model.tokenizer, eos_ids=model.eos_ids, excluded=model._excluded)
        sampling = Sampling(seed=seed, temperature=2.0, top_p=1.0, regex="[ a]{0,2}b?1 ?")
        engine.submit(Request(ids=model.tokenizer.encode("Once"), sampling=sampling, begins_text=True))
        text = "".join(event.text for event in engine.run())
        assert re.fullmatch("[ a]{0,2}b?1 ?", text)


# ---- where it ends


def ends(model: LanguageModel, prompt: str = "Once", **settings: Any) -> tuple[str, str | None]:
    events = list(model.events([prompt], model.sampling({"seed": 3, **settings})))
    return "".join(event.text for event in events), events[-1].finish_reason


def test_the_end_comes_when_the_output_is_complete_and_not_before() -> None:
    model = language_model("bpe")
    eos = {model.tokenizer.eos_id: 100.0}
    assert ends(model, regex="abc", logit_bias=eos) == ("abc", "stop")
    assert ends(model, regex="a(bc)*", logit_bias=eos) == ("a", "stop")
    assert ends(model, regex="(ab)*", logit_bias=eos) == ("", "stop")
    assert ends(model, regex="a+", logit_bias={model.tokenizer.eos_id: -100.0}, max_tokens=9)[1] == "length"
    assert ends(model, regex="a{2,5}", min_tokens=60)[1] == "stop"  # there is nothing more to write
    assert ends(model, regex="") == ("", "stop")


def test_a_model_without_an_end_ends_where_nothing_can_follow() -> None:
    tokenizer = Tokenizer.train(["abc"], kind="char", special_tokens=[])
    config = Config(vocab_size=tokenizer.vocab_size, max_seq_len=64, n_layers=1, d_model=16, n_heads=2)
    model = LanguageModel(random_decoder(config), tokenizer)
    assert ends(model, "a", regex="ab{3}c") == ("abbbc", "stop")
    assert ends(model, "a", regex="") == ("", "stop")
    assert ends(model, "a", regex="a*", max_tokens=5) == ("aaaaa", "length")


def test_max_tokens_cuts_and_a_complete_output_is_not_cut() -> None:
    model = language_model("char")
    assert ends(model, regex="[0-9]{8}", max_tokens=5)[1] == "length"
    assert ends(model, regex="[0-9]{8}", max_tokens=8)[1] == "stop"


def test_stop_texts_and_stop_ids() -> None:
    model = language_model("char")
    zero = model.tokenizer.encode("0")[0]
    text, reason = ends(model, regex="[0-9]{40}", stop=["7"])
    assert reason == "stop" and "7" not in text and len(text) < 40  # a stop text ends it anywhere
    text, reason = ends(model, regex="[1-9]{5}0*", stop_ids=[zero], logit_bias={zero: 100.0})
    assert reason == "stop" and re.fullmatch("[1-9]{5}", text)  # a token that ends it only where it is complete


def test_rules_that_leave_no_token_of_the_constraint_are_an_error() -> None:
    model = language_model("char")
    with pytest.raises(UserError, match="the rules leave no token to choose"):
        model.generate("Once", regex="77", bad_words=["7"])


# ---- beside others, and guessed


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mixed_rows_are_as_alone(kind: str, temperature: float) -> None:
    """Constrained, free, guessed and not: in fp32 each row's text is what it is alone, and without guesses."""
    model, draft = language_model(kind, seed=1), language_model(kind, seed=1).decoder
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1.01)
    constraints: list[dict[str, Any]] = [
        {},
        {"json_schema": PERSON},
        {"regex": r"(ab|cd|\d\d )*x", "frequency_penalty": 0.3},
        {"grammar": EXPRESSION, "repetition_penalty": 1.2},
        {"choice": ["ab" * 9, "ba" * 9]},
    ]
    ways = (None, "prompt_lookup", "draft") if temperature == 0 else (None, "prompt_lookup")
    rows = [(constraint, way) for constraint in constraints for way in ways]

    def run(rows: list[tuple[dict[str, Any], Any]]) -> list[tuple[str, str | None]]:
        speculator = Speculator(model.config.vocab_size, draft)
        engine = Engine(
            model.decoder, model.tokenizer, eos_ids=model.eos_ids, excluded=model._excluded, speculator=speculator
        )
        for constraint, way in rows:
            sampling = Sampling.of({"temperature": temperature, "max_tokens": 24, "seed": 2, **constraint})
            ids = model.tokenizer.encode("Once 12 12 12", add_bos=True)
            engine.submit(Request(ids=ids, sampling=sampling, speculative=way))
        texts, reasons = [""] * len(rows), [None] * len(rows)
        for event in engine.run():
            texts[event.row] += event.text
            reasons[event.row] = event.finish_reason or reasons[event.row]  # type: ignore[assignment]
        return list(zip(texts, reasons, strict=True))

    together = run(rows)
    for (constraint, _), of_row in zip(rows, together, strict=True):
        assert run([(constraint, None)]) == [of_row]


# ---- what can't be

WRONG = {
    "regex": ["(", "a(?=b)", r"(a)\1", "[z-a]", "a{5,2}", r"\p{Nope}", "(?-u:\\xff)", "\ud800", "a" * 300_000, 7],
    "json_schema": [
        "{", "[1]", "7", False, {"type": "nope"}, {"$ref": "#/nope"}, {"$ref": "http://example.com/x.json"},
        {"type": "integer", "minimum": 5, "maximum": 3}, {"type": "string", "pattern": "("}, {"not": {"type": "null"}},
        {"enum": []}, {"$ref": "#"}, {"type": "string", "format": "nope"}, {"x-guidance": {"nope": 1}}, {1, 2}, object,
    ],
    "choice": [[], [1], "", [["a"]], ["\ud800"]],
    "grammar": [
        "", "nope", "start: a", "x: \"a\"", "start: start", "start: a\na: b\nb: a", "start: (", "start: /(/",
        "root ::= (", "root ::= nope", "a ::= \"b\"", "start: <|nope|>", "%import nope\nstart: NOPE",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_what_is_none_is_one_line(name: str, value: Any) -> None:
    if (name, value) == ("choice", ""):
        value = 5
    with pytest.raises(UserError) as error:
        matcher("bpe", **{name: value})
    assert "\n" not in str(error.value) and name in str(error.value) and len(str(error.value)) < 400


def test_only_one_constraint_can_be_followed() -> None:
    with pytest.raises(UserError, match="^regex and choice are given: an output can follow one of json_schema"):
        Sampling.of({"regex": "a", "choice": ["a"]})


def test_a_vocabulary_that_can_not_write_the_beginning() -> None:
    tokenizer = Tokenizer.train(["abc"], kind="char")
    with pytest.raises(UserError, match="json_schema is not possible: no token of the vocabulary can write"):
        matcher_of(Sampling.of({"json_schema": {"type": "object"}}), tokenizer, 9, begins_text=False)


def _chain(name: str, n: int, last: Any) -> dict[str, Any]:
    """Each link names the next one twice."""
    links: dict[str, Any] = {f"a{i}": {name: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(n)}
    return {"$defs": {**links, f"a{n}": last}, "$ref": "#/$defs/a0"}


HOSTILE: list[dict[str, Any]] = [
    {"regex": "(" * 50_000 + "a" + ")" * 50_000},
    {"regex": "((((a{1000}){1000}){1000}){1000}){1000}"},
    {"regex": "(.*a){30}.{500}(b|.{500})"},
    {"regex": "(a|b)*a(a|b){60}"},
    {"regex": "|".join(map(str, range(10_000, 40_000)))},
    {"regex": r"[\p{L}\p{N}]{1,100000}x[\p{L}]{1,100000}"},
    {"choice": [f"{i:08}" for i in range(20_000)]},
    {"json_schema": '{"items":' * 20_000 + "{}" + "}" * 20_000},
    {"json_schema": _chain("allOf", 40, {"type": "string", "maxLength": 3})},
    {"json_schema": _chain("anyOf", 40, {"type": "string", "maxLength": 3})},
    {"json_schema": {"allOf": [{"anyOf": [{"pattern": f"{i}.*{j}"} for j in range(9)]} for i in range(9)]}},
    {"json_schema": {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}}},
    {"json_schema": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2500)}}},
    {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    {"grammar": 'start: s\ns: s s | s s s | "a" | ""'},
    {"grammar": "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(60)) + 'A60: "a" | "b"'},
    {"grammar": "start: A\nA: /.*a.{20}/ & /.*b.{25}/ & ~/.*c.{30}/"},
    {"grammar": 'start: a{100000}\na: b{100000}\nb: "a"'},
    {"grammar": "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000},
    {"grammar": "a ::= b\n" * 20_000},
]


@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_hostile_constraints_end_in_a_text_or_in_one_line(case: int) -> None:
    """None of them may take for ever, or the process with it."""
    generator = torch.Generator().manual_seed(case)
    try:
        at = matcher("bpe", **HOSTILE[case])
        for _ in range(40):
            choices = at.allowed().nonzero()[:, 0].tolist()
            token_id = choices[int(torch.randint(len(choices), (1,), generator=generator))]
            if token_id == TOKENIZERS["bpe"].eos_id:
                break
            at.accept(token_id)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 400


def test_without_the_library_there_is_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    constrained._vocabulary.cache_clear()
    with pytest.raises(UserError, match=r"constrained output needs llguidance: pip install llguidance"):
        matcher("bpe", regex="a")
