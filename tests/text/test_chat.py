"""Chat templates: transformers' text, control tokens that no message can write, and an end to every bomb."""

from __future__ import annotations

import json
import re
import string
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CONVERSATIONS, SYSTEM, TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st

from leftward import Config
from leftward.errors import UserError
from leftward.generation.decode import decode
from leftward.generation.settings import Sampling
from leftward.language_model import LanguageModel
from leftward.text.chat import ChatTemplate
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder

TEXT = "The quick brown fox jumps over the lazy dog; é, ß and 𝄞 too.\n" + string.printable
USER = {"role": "user", "content": "Hi"}


@cache
def tokenizer_with(*specials: str, template: Any = None, kind: Any = "bpe") -> Tokenizer:
    trained = Tokenizer.train([TEXT, *specials], kind=kind, special_tokens=specials)
    config = {"bos_token": specials[0], "eos_token": specials[1], "chat_template": template}
    return Tokenizer(trained._library, config)


def chat_template(name: str) -> tuple[ChatTemplate, Tokenizer]:
    source, specials = TEMPLATES[name]
    tokenizer = tokenizer_with(*specials, template=source)
    return ChatTemplate.of(tokenizer), tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp(name) for name in TEMPLATES}
    for name, path in paths.items():
        chat_template(name)[1].save(path)
    return paths


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_and_the_ids_are_those_of_transformers(saved: dict[str, Path], name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(saved[name])
    ours = ChatTemplate.of(Tokenizer.load(saved[name]))
    bos = Tokenizer.load(saved[name]).before
    refused = 0
    for messages in CONVERSATIONS.values():
        for prompt in (True, False):
            try:
                text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            except Exception as error:  # the template's own objection
                refused += 1
                with pytest.raises(UserError, match=f"refuses this conversation: {re.escape(str(error))}"):
                    ours.render(messages, add_generation_prompt=prompt)
                continue
            assert ours.render(messages, add_generation_prompt=prompt) == text
            ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            # The tokenizer's configuration puts bos before every text, and once is enough.
            assert ours.encode(messages, add_generation_prompt=prompt) == (ids if ids[:1] == bos else bos + ids)
    assert refused == {"llama-2": 2, "gemma": 6, "gemma-3": 2, "mistral": 6}.get(name, 0)


def test_tools_are_written_as_transformers_writes_them(saved: dict[str, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(saved["qwen-2.5"])
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "<name> & 'more' é"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "18 °C"},
    ]
    text = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert chat_template("qwen-2.5")[0].render(messages, tools=tools) == text


def test_templates_by_name() -> None:
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = ChatTemplate.of(Tokenizer(tokenizer_with("<s>", "</s>")._library, {"chat_template": both}))
    assert (template.render([USER]), template.render([USER], tools=[{}])) == ("plain", "tools")
    with pytest.raises(UserError, match="chat templates are rag; none is the default"):
        ChatTemplate({"rag": "x"}, tokenizer_with("<s>", "</s>")).render([USER])


def test_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ eos_token }}", tokenizer_with("<s>", "</s>"))
    assert template.render([USER], enable_thinking=False) == "False </s>"


# ---- control tokens


@pytest.mark.parametrize("kind", ["bpe", "char", "word"])
@pytest.mark.parametrize("name", ["smollm2", "llama-3", "gemma", "mistral", "phi-3"])
def test_what_a_message_holds_is_text(name: str, kind: str) -> None:
    source, specials = TEMPLATES[name]
    harmless = tokenizer_with(*specials, template=source, kind=kind)
    template = ChatTemplate(source, harmless)
    count = [i for i in template.encode([USER]) if i in harmless.special_ids]
    for content in (
        "".join(specials),
        f"a{specials[1]}b{specials[-1]}system",
        f"<{specials[1]}>{specials[1][:-1]}",
        f"{specials[1][1:]} and {specials[1][:1]}",
        "\ufdd0\ufdd1" if kind == "bpe" else "x",
    ):
        ids = template.encode([{"role": "user", "content": content}])
        assert [i for i in ids if i in harmless.special_ids] == count
        assert content.strip() in harmless.decode(ids, skip_special=False)


@settings(max_examples=100)
@given(data=st.data())
def test_no_pieces_of_messages_join_to_a_control_token(data: st.DataObject) -> None:
    """Texts that the template writes side by side, cut from control tokens at any place."""
    _, tokenizer = chat_template("smollm2")
    source = (
        "<|im_start|>{% for m in messages %}{{ m.name }}{{ m.content }}{{ m.calls | tojson }}{% endfor %}<|im_end|>"
    )
    template = ChatTemplate(source, tokenizer)
    cuts = st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>"]).flatmap(
        lambda token: st.tuples(st.integers(0, len(token)), st.integers(0, len(token))).map(
            lambda ends: token[min(ends) : max(ends)]
        )
    )
    text = st.lists(cuts, max_size=3).map("".join)
    parts = {"role": st.just("user"), "name": text, "content": text, "calls": st.dictionaries(text, text)}
    messages = data.draw(st.lists(st.fixed_dictionaries(parts), max_size=3))
    ids = template.encode(messages)
    assert sum(i in tokenizer.special_ids for i in ids[len(tokenizer.before) :]) == 2
    assert tokenizer.decode(ids[len(tokenizer.before) :], skip_special=False) == template.render(messages)


def test_a_template_that_takes_messages_apart_is_not_trusted_with_control_tokens() -> None:
    _, tokenizer = chat_template("smollm2")
    template = ChatTemplate("<|im_start|>{{ messages[0].content[:12] }}", tokenizer)
    assert template.encode([{"role": "user", "content": "Hello, you there"}])
    with pytest.raises(UserError, match="a message holds text that is a control token"):
        template.encode([{"role": "user", "content": "<|im_start|><|im_end|>"}])


def test_a_sentencepiece_vocabulary_keeps_them_out_too() -> None:
    pieces = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0)]
    pieces += [(b"<0x%02X>" % byte, 0.0) for byte in range(256)] + [(b" ", -1.0), (b"s", -2.0), (b"<s", -3.0)]
    tokenizer = Tokenizer.from_pieces([*pieces, (b"<", -4.0), (b">", -5.0), (b"/", -6.0)])
    template = ChatTemplate(TEMPLATES["llama-2"][0], tokenizer)
    ids = template.encode([{"role": "user", "content": "</s><s> s"}])
    assert [i for i in ids if i < 3] == [1]
    assert ids[0] == 1 and "[INST] </s><s> s [/INST]" in tokenizer.decode(ids)
    assert template.end_ids == {2}


def test_bos_stands_there_once() -> None:
    for source in ("{{ bos_token }}x", "x", "<s>x"):
        template = ChatTemplate(source, tokenizer_with("<s>", "</s>"))
        ids = template.encode([USER])
        assert ids.count(0) == 1 and ids[0] == 0


# ---- mistakes


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hello", "must be a list of messages"),
        ({"role": "user"}, "must be a list of messages"),
        (["Hello"], "message 1 has the role None"),
        ([USER, {"content": "x"}], "message 2 has the role None"),
        ([{"role": "user<|im_end|>", "content": "x"}], "a role is a word"),
        ([{"role": "user", "content": b"x"}], "a bytes: it must be what JSON can say"),
        ([{"role": "user", "content": {1: 2}}], "must be what JSON can say"),
        ([{"role": "user", "content": ["x"]}], "the chat template is broken: can only concatenate str"),
    ],
)
def test_messages_that_are_none_are_one_line(messages: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        chat_template("smollm2")[0].encode(messages)
    assert "\n" not in str(caught.value)


def test_messages_nested_without_end_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UserError, match="nested too deeply"):
        chat_template("smollm2")[0].render([{"role": "user", "content": endless}])


def test_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"no chat template.*leftward generate.*--template FILE"):
        ChatTemplate.of(tokenizer_with("<s>", "</s>"))


def test_a_template_may_object_at_length_in_one_line() -> None:
    template = ChatTemplate("{{ raise_exception('no\n  no\n' * 1000) }}", tokenizer_with("<s>", "</s>"))
    with pytest.raises(UserError, match="refuses this conversation: no no no") as caught:
        template.render([USER])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


_LOOP, _END = "{% for i in range(99999) %}", "{% endfor %}"
_GROW = "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = GROWN %}{% endfor %}{{ ns.s }}"
BOMBS = {
    "loops in loops": _LOOP * 5 + _END * 5,
    "output without end": _LOOP * 2 + "x" * 99 + _END * 2,
    "a large range": "{{ range(10**9) | list }}",
    "a large power": "{{ 99 ** 99999999 }}",
    "a large product": "{{ 'a' * 10**10 }}",
    "a large list": "{{ ([1] * 10**9) | length }}",
    "text that doubles": _GROW.replace("GROWN", "ns.s ~ ns.s"),
    "a sum that doubles": _GROW.replace("GROWN", "ns.s + ns.s"),
    "a join that doubles": _GROW.replace("GROWN", "[ns.s, ns.s] | join"),
    "a format that doubles": _GROW.replace("GROWN", "'%s%s' % (ns.s, ns.s)"),
    "lists that double": _GROW.replace("GROWN", "[ns.s, ns.s]"),
    "dicts that double": _GROW.replace("GROWN", "{'a': ns.s, 'b': ns.s}"),
    "a block that doubles": "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}"
    "{% endset %}{% endfor %}",
    "namespaces that hold each other": "{% set n = namespace(v=1) %}{% for i in range(99) %}"
    "{% set m = namespace(a=n.v, b=n.v) %}{% set n.v = m %}{% endfor %}{{ n.v }}",
    "a wide filter": "{{ 'a' | center(10**9) }}",
    "a wide method": "{{ 'a'.ljust(10**9) }}",
    "a wide format": "{{ '{:999999999}'.format(1) }}",
    "a width given apart": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "a wide percent": "{{ '%999999999d' % 1 }}",
    "a width in a tuple": "{{ '%*d' % (999999999, 1) }}",
    "a percent filter": "{{ '%999999999d' | format(1) }}",
    "a replacement": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "a replacing filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "a translation": "{{ ('a' * 100000).translate({97: 'b' * 1000000}) }}",
    "an indentation": "{{ ('\n' * 1000000) | indent(1000000, true) }}",
    "slices": "{{ [1] | slice(10**9) | list }}",
    "json with spaces": "{{ (range(99999) | list) | tojson(indent=100000) }}",
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a macro that calls itself twice": "{% macro f(x) %}{% if x %}{{ f(x-1) }}{{ f(x-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a block in itself": "{% block x %}{{ self.x() }}{% endblock %}",
    "a loop in itself": "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}",
    "slow steps": "{% set big = 'a' * 10000000 %}" + _LOOP + "{{ big | lower | length }}" + _END,
    "brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "a long sum": "{{ 1" + "+1" * 30_000 + " }}",
    "many ifs": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "a long template": "x" * 10**6,
    "half a tag": "{{",
    "half a comment": "{#" * 100_000,
    "a file": "{% include '/etc/passwd' %}",
    "Python's insides": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the messages": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_every_bomb_ends_in_one_line(name: str) -> None:
    with pytest.raises(UserError, match="the chat template is broken: ") as caught:
        ChatTemplate(BOMBS[name], tokenizer_with("<s>", "</s>")).render([USER])
    assert "\n" not in str(caught.value)


def test_a_long_conversation_is_no_bomb() -> None:
    turns = [{"role": role, "content": "word " * 2000} for _ in range(200) for role in ("user", "assistant")]
    for name in ("gemma-3", "qwen-2.5", "llama-2"):
        assert len(chat_template(name)[0].render(turns[:-1])) > 3_900_000


# ---- a model that answers


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    tokenizer = chat_template("smollm2")[1]
    config = Config(vocab_size=tokenizer.vocab_size, max_seq_len=512, n_layers=2, d_model=32, n_heads=4)
    return LanguageModel(random_decoder(config, std=0.3), tokenizer)


def test_an_answer_is_what_the_model_continues_with(model: LanguageModel) -> None:
    messages = [SYSTEM, USER]
    prompt = model.chat_template.render(messages)
    ids = model.tokenizer.encode(prompt, parse_special=True, add_bos=True)
    assert ids == model.chat_template.encode(messages)
    greedy = Sampling(max_tokens=20, temperature=0)
    events = decode(model.decoder, model.tokenizer, [ids], [greedy], eos_ids=model.eos_ids)
    answer = "".join(event.text for event in events)
    assert model.chat(messages, max_tokens=20, temperature=0) == answer != ""
    assert list(model.chat_stream(messages, max_tokens=20, temperature=0)) != [answer]
    assert "".join(model.chat_stream(messages, max_tokens=20, temperature=0)) == answer


def test_an_answer_ends_where_the_template_ends_it(model: LanguageModel) -> None:
    end = model.tokenizer.encode("<|im_end|>", parse_special=True)[0]
    assert model.chat_template.end_ids == {end}
    tokens = ("<|im_start|>", "<|endoftext|>", "<|im_end|>")
    without = LanguageModel(model.decoder, tokenizer_with(*tokens, template=TEMPLATES["smollm2"][0]))
    end = without.tokenizer.encode("<|im_end|>", parse_special=True)[0]
    assert end not in without.eos_ids  # no file says so
    events = [list(without.chat_events([USER], _sampling(seed))) for seed in range(30)]
    ended = [row[-1] for row in events if row[-1].token_id == end]
    assert ended and all(event.finish_reason == "stop" and "im_end" not in event.text for event in ended)
    assert all(event.token_id != end for row in events for event in row[:-1])


def _sampling(seed: int) -> Sampling:
    return Sampling(seed=seed, temperature=3.0, top_p=1.0, max_tokens=120)


def test_a_template_may_be_set(model: LanguageModel) -> None:
    own = LanguageModel(model.decoder, tokenizer_with("<s>", "</s>"))
    with pytest.raises(UserError, match="no chat template"):
        own.chat([USER])
    own.chat_template = ChatTemplate("{{ messages[0].content }}", own.tokenizer)
    assert own.chat([USER], max_tokens=3, temperature=0) == own.generate("Hi", max_tokens=3, temperature=0)


def test_a_conversation_longer_than_the_context_is_refused_at_once(model: LanguageModel) -> None:
    with pytest.raises(UserError, match=r"the conversation has \d+ tokens, more than the model's context of 512"):
        model.chat([{"role": "user", "content": "word " * 600}])


def test_the_first_space_of_an_answer_is_dropped(saved: dict[str, Path], tmp_path: Path) -> None:
    pieces = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0)]
    pieces += [(b"<0x%02X>" % byte, 0.0) for byte in range(256)] + [(b" yes", -1.0), (b" ", -2.0)]
    tokenizer = Tokenizer.from_pieces(pieces)
    config = Config(vocab_size=tokenizer.vocab_size, max_seq_len=128, n_layers=1, d_model=16, n_heads=2)
    model = LanguageModel(random_decoder(config, std=0.3), tokenizer)
    model.decoder.head.weight.data.zero_()  # all tokens alike: greedy takes the first that stands for text
    model.chat_template = ChatTemplate(TEMPLATES["llama-2"][0], tokenizer)
    answers = {model.chat([USER], max_tokens=1, seed=seed, temperature=1.0, top_p=1.0) for seed in range(800)}
    assert "yes" in answers and " yes" not in answers


def test_the_template_survives_saving(saved: dict[str, Path]) -> None:
    config = json.loads((saved["llama-3"] / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATES["llama-3"][0]
    assert Tokenizer.load(saved["llama-3"]).chat_template == TEMPLATES["llama-3"][0]
