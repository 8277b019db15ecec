"""Other people's tokenizers: the ids are those of the program that each comes from, and no file is trusted.

The oracles are llama.cpp's own expected ids, SentencePiece, tiktoken and transformers, on real files and random text.
"""

from __future__ import annotations

import base64
import io
import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from leftward.errors import UserError
from leftward.formats.gguf import GGUF
from leftward.text.pretokenizers import _BY_NAME, pre_tokenizer_of
from leftward.text.sentencepiece import parse_model
from leftward.text.tokenizer import Tokenizer

PROSE = [topics[name] for name in sorted(topics)[:6]]
ODD = [
    "<s>",
    "</s>",
    "<unk>",
    "<0x41>",
    "▁",
    "   ",
    "\n\n",
    "<|im_end|>",
    "<tool>",
    " the ",
    "aaaa",
    "don't",
    "١٢٣4567",
    "e\u0301",
]
ANY_TEXT = st.lists(st.one_of(st.sampled_from(ODD), st.text(st.characters(exclude_categories=["Cs"]), max_size=8))).map(
    "".join
)


# ---- llama.cpp's files


@pytest.mark.parametrize("name", ["falcon", "gpt-2", "llama-spm"])
def test_the_ids_are_those_that_llama_cpp_expects(shared_data: Path, name: str) -> None:
    path = shared_data / "tokenizers" / f"{name}.gguf"
    tokenizer = Tokenizer.from_gguf(GGUF.open(path).metadata)
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().splitlines()
    assert len(lines) == 46
    for text, line in zip(texts, lines, strict=False):
        ids = tokenizer.encode(text)
        assert ids == [int(word) for word in line.split()], text
        assert tokenizer.decode(ids) == text


def test_stories260k_has_the_ids_of_llama2_c(shared_data: Path) -> None:
    data = (shared_data / "stories260K" / "tok512.bin").read_bytes()
    pieces, place = [], 4
    while place < len(data):
        score, size = struct.unpack_from("<fi", data, place)
        pieces.append((data[place + 8 : place + 8 + size], score))
        place += 8 + size
    tokenizer = Tokenizer.from_pieces(pieces)
    text = "I believe the meaning of life is"
    ids = tokenizer.encode(text, add_bos=True)
    assert (len(pieces), len(ids), ids[0], tokenizer.bos_id, tokenizer.eos_id) == (512, 18, 1, 1, 2)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("", add_bos=True) == [1]


@cache
def byte_level() -> dict[str, Any]:
    """The metadata of a small byte-level vocabulary."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(PROSE, trainer=trainer)
    model = json.loads(library.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "<|im_end|>", "<tool>", "<|user|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 4, 4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": len(tokens) - 3,
    }


@cache
def with_pre(name: str) -> Tokenizer:
    return Tokenizer.from_gguf({**byte_level(), "tokenizer.ggml.pre": name})


@cache
def with_the_library(*steps: Any) -> Any:
    """The same vocabulary, with the pre-tokenizer of a model's own tokenizer.json."""
    metadata = byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    pairs = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    library = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs))
    library.pre_tokenizer = pre_tokenizers.Sequence([step() for step in steps])
    return library


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> Any:
    return pre_tokenizers.Digits(individual_digits=True)


@pytest.mark.parametrize(
    ("pre", "steps"), [("gpt-2", (_gpt2,)), ("smollm", (_digits, _gpt2)), ("command-r", (_digits, _gpt2))]
)
@given(text=ANY_TEXT)
def test_a_named_cut_is_that_of_the_models_own_file(pre: str, steps: tuple[Callable[[], Any], ...], text: str) -> None:
    text = text.replace("<tool>", "")  # added there, which this library object does not know
    assert with_pre(pre).encode(text) == with_the_library(*steps).encode(text).ids


@pytest.mark.parametrize("name", sorted(_BY_NAME))
def test_no_cut_loses_anything(name: str) -> None:
    text = "".join(ODD) + "Hello WORLD's  I'LL 123456789\r\n\t\tnaïve 猫が好き ½ ，。() x\u3000y camelCase ÉCOLE été   "
    for pattern in pre_tokenizer_of(name).patterns:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        assert "".join(piece for piece, _ in split.pre_tokenize_str(text)) == text
    assert with_pre(name).decode(with_pre(name).encode(text), skip_special=False) == text


def test_words_are_cut_as_each_model_cuts_them() -> None:
    # By hand, from the patterns that the models publish.
    def cut(name: str, text: str) -> list[str]:
        pieces = [text]
        for pattern in pre_tokenizer_of(name).patterns:
            split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
            pieces = [piece for part in pieces for piece, _ in split.pre_tokenize_str(part)]
        return pieces

    assert cut("llama-bpe", "I'LL pay 12345\n\n now") == ["I", "'LL", " pay", " ", "123", "45", "\n\n", " now"]
    assert cut("qwen2", "x=123") == ["x", "=", "1", "2", "3"]
    assert cut("gpt-2", "I'LL pay 12345") == ["I", "'", "LL", " pay", " 12345"]
    assert cut("gpt-4o", "camelCase's HTTPServer été") == ["camel", "Case's", " HTTPServer", " été"]
    assert cut("tekken", "camelCase 12") == ["camel", "Case", " ", "1", "2"]
    assert cut("deepseek-v3", "ab12345猫x") == ["ab", "123", "45", "猫", "x"]
    assert cut("bloom", "Hello, world.") == ["Hello", ",", " world", "."]


def test_control_tokens_of_a_gguf_file() -> None:
    tokenizer = with_pre("gpt-2")
    end = len(byte_level()["tokenizer.ggml.tokens"]) - 3
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.before) == (end, None, [])
    # <|user|> is user-defined there, but looks like what it is; <tool> is text that everyone may write.
    assert tokenizer.special_ids == (end, end + 2)
    text = "a<|im_end|>b<tool><|user|>"
    assert set(tokenizer.encode(text)) & {end, end + 1, end + 2} == {end + 1}
    assert [i for i in tokenizer.encode(text, parse_special=True) if i >= end] == [end, end + 1, end + 2]


def test_bos_and_eos_as_the_file_says() -> None:
    bos = byte_level()["tokenizer.ggml.eos_token_id"]
    named = {**byte_level(), "tokenizer.ggml.bos_token_id": bos}
    for extra, before, after in [
        ({}, [], []),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [bos], []),  # llama.cpp's default for it
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, [], []),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [bos], [bos]),
    ]:
        tokenizer = Tokenizer.from_gguf({**named, **extra})
        ids = tokenizer.encode("hello")
        assert tokenizer.encode("hello", add_bos=True, add_eos=True) == before + ids + after
        assert tokenizer.encode("<|im_end|>hello", add_bos=True, parse_special=True) == [bos, *ids]
        assert tokenizer.encode("", add_bos=True) == [bos]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "model is 'bert', which is not supported"),
        ({"pre": "gpt2"}, "pre is 'gpt2': did you mean gpt-2"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": [b"\xff"] * 9}, "tokens must be a list of str"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "'a' stands twice in the vocabulary, at 0 and at 2"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["zq"]}, "the merge 'zq' .* is not two tokens"),
        ({"merges": ["猫 犬"]}, "damaged: .*out of vocabulary"),
        ({"merges": [""]}, "the merge '' "),
        ({"token_type": [1]}, "token_type has 1 entries for"),
        ({"eos_token_id": 2**31}, r"eos_token_id is 2147483648, but there are \d+ tokens"),
        ({"eos_token_id": "x"}, "must be a token id"),
        ({"add_bos_token": 7}, "add_bos_token is 7: it must be true or false"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "llama", "scores": [float("nan")]}, "scores has 1 entries"),
        ({"model": "llama", "tokens": ["a"], "token_type": None, "scores": [float("nan")]}, "not a number"),
    ],
)
def test_a_gguf_file_that_contradicts_itself_is_one_line(change: dict[str, Any], message: str) -> None:
    metadata = {**byte_level(), **{f"tokenizer.ggml.{key}": value for key, value in change.items()}}
    if change.get("tokens") and len(change["tokens"]) < 9:
        metadata.pop("tokenizer.ggml.eos_token_id")
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.from_gguf(metadata)
    assert "\n" not in str(caught.value)


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), st.binary(max_size=3)
)


@settings(max_examples=150)
@given(data=st.data())
def test_nonsense_in_a_gguf_file_never_crashes(data: st.DataObject) -> None:
    small = {
        "tokenizer.ggml.model": data.draw(st.sampled_from(["gpt2", "llama"])),
        "tokenizer.ggml.tokens": data.draw(st.lists(st.text(max_size=3), max_size=6)),
        "tokenizer.ggml.scores": data.draw(st.lists(st.floats(allow_nan=True), max_size=6)),
        "tokenizer.ggml.merges": data.draw(st.lists(st.text(max_size=4), max_size=4)),
        "tokenizer.ggml.token_type": data.draw(st.lists(st.integers(0, 8), max_size=6)),
    }
    key = data.draw(
        st.sampled_from([*small, "tokenizer.ggml.pre", "tokenizer.ggml.bos_token_id", "tokenizer.chat_template"])
    )
    changed = {**small, key: data.draw(st.one_of(_VALUES, st.lists(_VALUES, max_size=6)))}
    try:
        tokenizer = Tokenizer.from_gguf(changed)
        tokenizer.decode(tokenizer.encode("ab <s>", parse_special=True, add_bos=True))
    except UserError as error:
        assert "\n" not in str(error).replace("\\n", "")


# ---- SentencePiece


@cache
def trained_by_sentencepiece(model_type: str, byte_fallback: bool, prefix: bool) -> tuple[Any, bytes]:
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [line for text in PROSE for line in text.split("\n") if line]
    letters = random.Random(0)
    lines += ["".join(letters.choices("ab ", k=60)) for _ in range(300)]  # overlapping merges
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type=model_type,
        vocab_size=700,
        hard_vocab_limit=False,
        byte_fallback=byte_fallback,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=[] if prefix else ["▁▁", "▁▁▁", "▁▁▁▁", "<tool>"],  # as Gemma has them
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), model.getvalue()


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(("model_type", "byte_fallback"), [("bpe", True), ("bpe", False), ("unigram", False)])
def test_the_ids_are_those_of_sentencepiece(model_type: str, byte_fallback: bool, prefix: bool, tmp_path: Path) -> None:
    theirs, data = trained_by_sentencepiece(model_type, byte_fallback, prefix)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    ours = Tokenizer.from_sentencepiece(path)
    assert Tokenizer.load(tmp_path).fingerprint() == ours.fingerprint()
    assert (ours.kind, ours.bos_id, ours.eos_id) == ("spm", theirs.bos_id(), theirs.eos_id())

    @given(text=st.one_of(ANY_TEXT, st.text("ab ", max_size=60)))
    def same(text: str) -> None:
        text = text.replace("\0", "")  # which ends a text there
        if model_type == "unigram":  # where the library finds the piece before the unknown character <
            text = text.replace("<unk>", "").replace("<s>", "").replace("</s>", "")
        ids = theirs.encode(text)
        got = ours.encode(text)
        if got != ids:  # of equally likely divisions each library has its own
            assert model_type == "unigram"
            scores = [math.fsum(map(theirs.get_score, division)) for division in (got, ids)]
            assert scores[0] == pytest.approx(scores[1], rel=1e-6)
            return
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == text.replace("▁", " ") == theirs.decode(ids)
        stream = ours.stream_decoder()
        assert "".join(map(stream.feed, ids)) + stream.flush() == ours.decode(ids)

    same()


def test_a_control_token_is_not_merged_from_text(tmp_path: Path) -> None:
    """Where the vocabulary has the parts of a control token's name, the text of the name would become it."""
    tokens = ["<unk>", "<s>", "</s>", "<", "s", ">", "<s", "▁"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -3.0, -4.0, -5.0, -1.0, -6.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
    }
    ours = Tokenizer.from_gguf(metadata)
    assert ours.encode("<s>") == [7, 6, 5]
    assert ours.encode("<s>", parse_special=True) == [1]
    # And where the file itself says so, as old conversions do.
    ours.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"].append(["<s", ">"])
    path.write_text(json.dumps(content))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("<s>") == [7, 3, 4, 5]
    assert loaded.decode(loaded.encode("<s> s")) == "<s> s"


@settings(max_examples=150)
@given(data=st.data())
def test_damaged_sentencepiece_models_are_one_line(data: st.DataObject) -> None:
    _, content = trained_by_sentencepiece("bpe", True, True)
    content = content[:400] + content[-200:]
    damaged = bytearray(content[: data.draw(st.integers(0, len(content)))])
    for place in data.draw(st.lists(st.integers(0, max(0, len(damaged) - 1)), max_size=4)) if damaged else []:
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        parse_model(bytes(damaged))
    except UserError as error:
        assert "\n" not in str(error)


def test_a_model_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    for content in (b"", b"no model at all", b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x02\x18\x03"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer\.model is damaged"):
            Tokenizer.load(tmp_path)


# ---- tiktoken, GPT-2's files


def _tiktoken_ranks() -> dict[bytes, int]:
    tokenizer = with_pre("gpt-2")
    size = len(byte_level()["tokenizer.ggml.tokens"]) - 3
    single = sorted((tokenizer.token_bytes(i) for i in range(size)), key=len)
    return {token: rank for rank, token in enumerate(single)}


def test_the_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = _tiktoken_ranks()
    path = tmp_path / "some.tiktoken"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()))
    special = {"<|endoftext|>": len(ranks) + 5, "<|im_end|>": len(ranks)}
    pattern = pre_tokenizer_of("llama-bpe").patterns[0]
    theirs = tiktoken.Encoding("some", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    ours = Tokenizer.from_tiktoken(path, "llama-bpe", special)
    assert ours.vocab_size == theirs.n_vocab

    @given(text=ANY_TEXT)
    def same(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text, disallowed_special=())
        assert ours.encode(text, parse_special=True) == theirs.encode(text, allowed_special="all")
        assert ours.decode(ours.encode(text)) == text

    same()
    path.write_bytes(b"QQ== 0\nQg== x\n")
    with pytest.raises(UserError, match=r"some\.tiktoken is damaged: line 2 "):
        Tokenizer.from_tiktoken(path, "gpt-2")
    path.write_bytes(b"QQ== 0\nQg== 0\n")
    with pytest.raises(UserError, match="the same id"):
        Tokenizer.from_tiktoken(path, "gpt-2")
    path.write_bytes(b"QQ== 4000000000\n")
    with pytest.raises(UserError, match="ids from 4000000000"):
        Tokenizer.from_tiktoken(path, "gpt-2")


def test_gpt2s_own_files(tmp_path: Path) -> None:
    metadata = byte_level()
    tokens = [*metadata["tokenizer.ggml.tokens"][:-3], "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *metadata["tokenizer.ggml.merges"], ""]))
    ours = Tokenizer.load(tmp_path)
    for text in [*ODD, PROSE[0]]:
        assert ours.encode(text) == with_the_library(_gpt2).encode(text).ids
    assert ours.special_ids == (len(tokens) - 1,) == (ours.eos_id,)
    for name, content in [("merges.txt", "a b c\n"), ("vocab.json", '{"a": 5}'), ("vocab.json", "[1]")]:
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=rf"{name.replace('.', '[.]')} is damaged"):
            Tokenizer.load(tmp_path)


# ---- tokenizer.json of every style


def _library(model: Any, trainer: Any, **parts: Any) -> Any:
    library = tokenizers.Tokenizer(model)
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        if parts.get(name) is not None:
            setattr(library, name, parts[name])
    library.train_from_iterator(PROSE, trainer=trainer)
    return library


_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SPM_SPECIALS = ["<unk>", "<s>", "</s>", *_BYTES]
_SPM_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _spm(normalizer: Any, pre_tokenizer: Any, decoder: Any) -> Any:
    """A BPE over characters with byte fallback, as Llama 1 and 2, Mistral and Gemma have it."""
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=_SPM_SPECIALS, show_progress=False)
    marked = normalizers.Replace(" ", "▁")
    learned = _library(models.BPE(), trainer, normalizer=marked, pre_tokenizer=pre_tokenizers.Split("▁", "isolated"))
    content = json.loads(learned.to_str())
    content["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    content["added_tokens"] = content["added_tokens"][:3]
    content["normalizer"] = content["pre_tokenizer"] = None
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    if normalizer is not None:
        library.normalizer = normalizer
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    library.decoder = decoders.Sequence(decoder)
    return library


def llama_2() -> Any:
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library = _spm(normalizer, None, [*_SPM_DECODER, decoders.Strip(" ", 1, 0)])
    bos = ("<s>", library.token_to_id("<s>"))
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[bos])
    return library


def mistral() -> Any:
    metaspace = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    return _spm(None, metaspace, [*_SPM_DECODER, decoders.Strip(" ", 1, 0)])


def gemma() -> Any:
    library = _spm(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), _SPM_DECODER)
    library.add_tokens([tokenizers.AddedToken("\n\n", normalized=False), tokenizers.AddedToken("▁▁", normalized=False)])
    return library


def _byte_bpe(*steps: Any, normalizer: Any = None, prefix: bool = False) -> Any:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not steps)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library = _library(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False),
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizers.Sequence([*steps, to_bytes]),
        decoder=decoders.ByteLevel(),
    )
    library.add_special_tokens(["<s>", "</s>"])
    library.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    return library


def gpt2() -> Any:
    return _byte_bpe()


def neox() -> Any:
    library = _byte_bpe(normalizer=normalizers.NFC())
    library.add_tokens(["    ", "  "])  # found after normalization
    return library


def qwen() -> Any:
    cut = pre_tokenizers.Split(tokenizers.Regex(pre_tokenizer_of("qwen2").patterns[0]), "isolated")
    return _byte_bpe(cut, normalizer=normalizers.NFC())


def llama_3() -> Any:
    library = _byte_bpe(pre_tokenizers.Split(tokenizers.Regex(pre_tokenizer_of("llama-bpe").patterns[0]), "isolated"))
    template = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))])
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return library


def falcon() -> Any:
    return _byte_bpe(pre_tokenizers.Punctuation("contiguous"), _gpt2(), pre_tokenizers.Digits(individual_digits=False))


def with_a_space_first() -> Any:
    return _byte_bpe(prefix=True)


def unigram() -> Any:
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    metaspace = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    return _library(models.Unigram(), trainer, pre_tokenizer=metaspace, decoder=decoders.Metaspace())


def gpt_1() -> Any:
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>"], end_of_word_suffix="</w>", show_progress=False
    )
    model = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>")
    lower = normalizers.BertNormalizer(lowercase=True)
    words = pre_tokenizers.BertPreTokenizer()
    return _library(model, trainer, normalizer=lower, pre_tokenizer=words, decoder=decoders.BPEDecoder("</w>"))


STYLES = {
    maker.__name__: maker
    for maker in (llama_2, mistral, gemma, gpt2, neox, qwen, llama_3, falcon, with_a_space_first, unigram, gpt_1)
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    paths = {}
    for name, maker in STYLES.items():
        paths[name] = tmp_path_factory.mktemp(name)
        maker().save(str(paths[name] / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (paths[name] / "tokenizer_config.json").write_text(
            json.dumps({**config, "clean_up_tokenization_spaces": False})
        )
    yield paths


@pytest.mark.parametrize("style", STYLES)
def test_the_ids_are_those_of_transformers(saved: dict[str, Path], style: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(saved[style])
    ours = Tokenizer.load(saved[style])
    forgeable = style == "unigram"  # whose library makes <s> from its text, whatever is asked

    @settings(max_examples=60)
    @given(text=ANY_TEXT)
    def same(text: str) -> None:
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        if not (forgeable and {1, 2} & set(plain)):
            assert ours.encode(text) == plain
        assert not {ours.bos_id, ours.eos_id} & set(ours.encode(text))
        parsed = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, parse_special=True) == parsed
        if parsed:  # where there is nothing, ours begins with bos all the same
            whole = theirs(text).input_ids
            expected = parsed if whole[1:] == parsed and parsed[0] == ours.bos_id else whole  # bos is never doubled
            assert ours.encode(text, parse_special=True, add_bos=True, add_eos=True) == expected
        for skip in (True, False):
            decoded = ours.decode(parsed, skip_special=skip)
            stream = ours.stream_decoder(skip_special=skip)
            assert "".join(map(stream.feed, parsed)) + stream.flush() == decoded
            assert decoded == theirs.decode(parsed, skip_special_tokens=skip)

    same()


@pytest.mark.parametrize("style", ["llama_2", "mistral", "with_a_space_first"])
def test_what_continues_a_text_gets_no_space(saved: dict[str, Path], style: str) -> None:
    ours = Tokenizer.load(saved[style])
    first, second = ours.encode_batch(["The quick", " fox and"], starts=[True, False])
    assert ours.decode([*first, *second]).strip() == "The quick fox and"
    assert ours.decode([*first, *ours.encode_batch(["er fox"], starts=[False])[0]]).strip() == "The quicker fox"


def test_the_files_rules_say_what_stands_around_a_text(saved: dict[str, Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for style, in_file in (("llama_3", [1, 0]), ("gpt2", [0, 0])):
        content = json.loads((saved[style] / "tokenizer.json").read_text())
        config = json.loads((saved[style] / "tokenizer_config.json").read_text())
        for flags, without_rules in (
            ({}, [0, 0]),
            ({"add_bos_token": True}, [1, 0]),
            ({"add_bos_token": True, "add_eos_token": True}, [1, 1]),
            ({"add_bos_token": False, "add_eos_token": True}, [0, 1]),
        ):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | flags))
            if content["post_processor"] is not None:  # then the flags don't count
                (tmp_path / "tokenizer.json").write_text(json.dumps(content))
                ours, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
                assert [len(ours.before), len(ours.after)] == in_file
                assert ours.encode("Hello", add_bos=True, add_eos=True) == theirs("Hello").input_ids
            (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}))
            ours = Tokenizer.load(tmp_path)
            assert [len(ours.before), len(ours.after)] == without_rules
            ours.save(tmp_path / "again")
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
            assert ours.encode("Hello", add_bos=True, add_eos=True) == theirs("Hello").input_ids


def test_what_the_other_files_of_a_directory_say(saved: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((saved["gpt2"] / "tokenizer.json").read_bytes())
    size = Tokenizer.load(saved["gpt2"]).vocab_size

    def write(name: str, content: object) -> None:
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))

    write("tokenizer_config.json", {"model_max_length": 1024})  # as GPT-2's own
    write("config.json", {"bos_token_id": size - 3, "eos_token_id": [size - 2, 5]})
    assert (Tokenizer.load(tmp_path).bos_id, Tokenizer.load(tmp_path).eos_id) == (size - 3, size - 2)
    write("special_tokens_map.json", {"eos_token": {"content": "<s>", "lstrip": False}, "bos_token": None})
    assert (Tokenizer.load(tmp_path).bos_id, Tokenizer.load(tmp_path).eos_id) == (None, size - 3)
    added = {str(size): {"content": "<new>", "special": True}, str(size + 1): {"content": "<too>", "special": False}}
    write("tokenizer_config.json", {"eos_token": "</s>", "added_tokens_decoder": added, "pad_token": "<tool>"})
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (size - 2, size + 2)
    assert set(tokenizer.special_ids) == {size - 3, size - 2, size - 1, size}  # the padding token too
    assert tokenizer.chat_template is None
    write("chat_template.jinja", "{{ messages }}")
    assert Tokenizer.load(tmp_path).chat_template == "{{ messages }}"
    write("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "<new>"}}})
    with pytest.raises(UserError, match=r"added_tokens_decoder gives '<new>' the id 7, but in the vocabulary it is"):
        Tokenizer.load(tmp_path)
    for broken in (
        {"added_tokens_decoder": {"x": 1}},
        {"eos_token": [1]},
        {"additional_special_tokens": [{"content": 5}]},
    ):
        write("tokenizer_config.json", broken)
        with pytest.raises(UserError, match="tokenizer_config.json"):
            Tokenizer.load(tmp_path)


def test_saved_again_it_is_the_same(saved: dict[str, Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, tokenizer in [
        *((name, Tokenizer.load(path)) for name, path in saved.items()),
        ("gguf", with_pre("llama-bpe")),
    ]:
        tokenizer.save(tmp_path / name)
        again = Tokenizer.load(tmp_path / name)
        assert again.fingerprint() == tokenizer.fingerprint()
        assert (again.before, again.after, again.special_ids) == (
            tokenizer.before,
            tokenizer.after,
            tokenizer.special_ids,
        )
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert theirs(PROSE[1]).input_ids == tokenizer.encode(PROSE[1], add_bos=True, add_eos=True)


@settings(max_examples=100)
@given(data=st.data())
def test_a_damaged_tokenizer_json_is_one_line(
    saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The parts of a real file, exchanged: what the library takes must work or be refused."""
    content = json.loads(
        (saved[data.draw(st.sampled_from(["llama_2", "qwen", "unigram"]))] / "tokenizer.json").read_text()
    )
    other = json.loads(
        (saved[data.draw(st.sampled_from(["gemma", "gpt_1", "llama_3"]))] / "tokenizer.json").read_text()
    )
    part = data.draw(st.sampled_from([*content]))
    content[part] = data.draw(st.sampled_from([other[part], None, [], {}, "x", 2**70, {"type": "Sequence"}]))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(content))
    (path / "tokenizer_config.json").write_text("{}")
    try:
        tokenizer = Tokenizer.load(path)
        tokenizer.decode(tokenizer.encode("ab <s> 猫", parse_special=True, add_bos=True))
        tokenizer.encode("ab <s> 猫")
    except UserError as error:
        assert "\n" not in str(error)
