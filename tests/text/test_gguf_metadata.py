"""Tokenizers as GGUF metadata and back: the same ids for any text. That llama.cpp itself reads them so is tested in
tests/formats/test_llama_cpp.py."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_foreign_tokenizers as foreign
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from leftward.errors import UserError
from leftward.formats.gguf import GGUF
from leftward.formats.llama2c import read_tok512
from leftward.text.gguf_metadata import with_padding
from leftward.text.pretokenizers import pre_tokenizer_of
from leftward.text.tokenizer import Tokenizer

TEXT = "The quick brown fox jumps over the lazy dog; é, ß, 猫 and 𝄞 too.\n" * 3
OURS = Tokenizer.train([TEXT], kind="bpe", vocab_size=300)
BACK = Tokenizer.from_gguf(OURS.to_gguf())
PIECES = ["▁", "a", "b", "▁a", "ab", "▁ab", "bb"]


def by_json(tmp_path: Path, library: Any, **config: Any) -> Tokenizer:
    """The tokenizer of a directory with this tokenizer.json."""
    library.save(str(tmp_path / "tokenizer.json"))
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(ends | config))
    return Tokenizer.load(tmp_path)


def sentencepiece_bpe(pieces: list[str] = PIECES, merges: Any = None, *, with_bytes: bool = True) -> Any:
    """A small vocabulary as tokenizer.json has Gemma's, its merges derived from the order of the pieces."""
    spelled = [f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []
    vocabulary = {text: i for i, text in enumerate(["<unk>", "<s>", "</s>", *spelled, *pieces])}
    if merges is None:
        splits = [(p[:n], p[n:]) for p in pieces for n in range(1, len(p))]
        merges = [pair for pair in splits if all(part in vocabulary for part in pair)]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=with_bytes)
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


# ---- what goes through


@given(st.text())
def test_ids_are_the_same(text: str) -> None:
    assert BACK.encode(text, add_bos=True) == OURS.encode(text, add_bos=True)
    assert BACK.decode(BACK.encode(text)) == text


def test_special_tokens_stay_special() -> None:
    assert (BACK.bos_id, BACK.eos_id, BACK.vocab_size) == (OURS.bos_id, OURS.eos_id, OURS.vocab_size)
    assert BACK.encode("<|endoftext|>") == OURS.encode("<|endoftext|>") != [OURS.bos_id]
    assert BACK.encode("<|endoftext|>", parse_special=True) == [OURS.bos_id]


@pytest.mark.parametrize("name", ["gpt-2", "falcon", "llama-spm"])
def test_a_real_one_round_trips(name: str, shared_data: Path) -> None:
    path = shared_data / "tokenizers" / f"{name}.gguf"
    metadata = GGUF.open(path).metadata
    again = Tokenizer.from_gguf(metadata).to_gguf()
    for key in ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "unknown_token_id"):
        assert again.get(f"tokenizer.ggml.{key}") == metadata.get(f"tokenizer.ggml.{key}"), key
    back = Tokenizer.from_gguf(again)
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    for text, line in zip(texts, path.with_suffix(".gguf.out").read_text().splitlines(), strict=False):
        assert back.encode(text) == [int(word) for word in line.split()], text


def test_characters_are_a_byte_level_bpe_of_their_bytes() -> None:
    ours = Tokenizer.train(["né 猫𝄞\n"], kind="char")
    metadata = ours.to_gguf()
    # By hand: GPT-2's stand-ins for the bytes of each character, U+010A for a line feed and U+0120 for a space.
    assert metadata["tokenizer.ggml.tokens"] == ["<|endoftext|>", "Ċ", "Ġ", "n", "Ã©", "çĮ«", "ðĿĦŀ"]
    assert metadata["tokenizer.ggml.merges"] == ["Ã ©", "ç Į", "çĮ «", "ð Ŀ", "ðĿ Ħ", "ðĿĦ ŀ"]
    back = Tokenizer.from_gguf(metadata)
    assert (back.kind, back.fingerprint(), back.before) == ("char", ours.fingerprint(), ours.before)
    with pytest.raises(UserError, match="lacks the character 'x'"):
        back.encode("x")


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_sentencepieces_go_through(model_type: str, prefix: bool, tmp_path: Path) -> None:
    _, data = foreign.trained_by_sentencepiece(model_type, model_type == "bpe", prefix)
    (tmp_path / "tokenizer.model").write_bytes(data)
    ours = Tokenizer.load(tmp_path)
    metadata = ours.to_gguf()
    assert metadata["tokenizer.ggml.model"] == {"bpe": "llama", "unigram": "t5"}[model_type]
    back = Tokenizer.from_gguf(metadata)
    assert back.fingerprint() == ours.fingerprint()
    assert (back.bos_id, back.eos_id, back.before, back.after) == (ours.bos_id, ours.eos_id, ours.before, ours.after)
    assert metadata["tokenizer.ggml.unknown_token_id"] == 0


def test_unigrams_rules_for_text_are_read(tmp_path: Path) -> None:
    """SentencePiece's default ones: NFKC, extra spaces removed."""
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [line for text in foreign.PROSE for line in text.split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    theirs = Tokenizer.load(tmp_path)
    with pytest.raises(UserError, match="Precompiled"):
        theirs.to_gguf()
    content = json.loads(theirs._library.to_str())
    rules = content["normalizer"]["normalizers"].pop(0)["precompiled_charsmap"]
    plain = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), theirs._config)
    metadata = plain.to_gguf()
    assert metadata["tokenizer.ggml.remove_extra_whitespaces"] is True
    signed = struct.unpack(
        f"{len(base64.b64decode(rules))}b", base64.b64decode(rules)
    )  # as llama.cpp's converter has it
    back = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.precompiled_charsmap": list(signed)})
    for text in [*foreign.ODD, foreign.PROSE[0], "  ﬁx\u3000 ½ "]:
        assert back.encode(text) == theirs.encode(text), text
        assert Tokenizer.from_gguf(metadata).encode(text) == plain.encode(text), text
    assert back.encode("  ﬁx\u3000 ½ ") == plain.encode("fix 1⁄2")  # by NFKC
    with pytest.raises(UserError, match="precompiled_charsmap must be a list of bytes"):
        Tokenizer.from_gguf({**metadata, "tokenizer.ggml.precompiled_charsmap": [999]})


@pytest.mark.parametrize("by_score", [True, False])
def test_merges_as_transformers_derives_them_go_through(by_score: bool, tmp_path: Path) -> None:
    """From the scores, and from the ids, as older and newer conversions of Llama's and Gemma's have it."""
    convert = pytest.importorskip("transformers.tokenization_utils_base")
    theirs, _ = foreign.trained_by_sentencepiece("bpe", True, False)
    scores = {theirs.id_to_piece(i): theirs.get_score(i) for i in range(theirs.get_piece_size())}
    vocabulary = {text: i for i, text in enumerate(scores)}
    runs = {text for text in scores if len(text) > 1 and not text.strip("▁")}
    scores |= dict.fromkeys(runs, 0.0)  # one score for all of them, and the best: Gemma's
    merges = convert.generate_merges(vocabulary, scores if by_score else None)
    library = sentencepiece_bpe()
    library.model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    library.add_tokens([tokenizers.AddedToken(run, normalized=False) for run in runs] + ["<tool>"])
    ours = by_json(tmp_path, library)
    back = Tokenizer.from_gguf(ours.to_gguf())

    @given(st.one_of(foreign.ANY_TEXT, st.text("ab ", max_size=60)))
    def same(text: str) -> None:
        text = text.replace("▁", "_")  # an added token of ▁ is not found in spaces, and here they are one
        assert back.encode(text) == ours.encode(text)

    same()


@pytest.mark.parametrize(
    ("style", "cut"),
    [
        ("gpt2", "gpt-2"),
        ("qwen", "qwen2"),
        ("neox", "gpt-2"),
        ("smollm", "starcoder"),
        ("llama_3", "dbrx"),
        ("falcon_7b", "falcon"),
    ],
)
def test_the_cut_of_a_models_own_file_has_llama_cpps_name(style: str, cut: str, tmp_path: Path) -> None:
    digits = pre_tokenizers.Digits
    split = pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated")
    punctuation = pre_tokenizers.Punctuation("contiguous")
    # Falcon's file: its digits are cut behind the bytes, and the library has to be told so.
    own: dict[str, list[Any]] = {
        "smollm": [digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "falcon_7b": [
            *(punctuation, pre_tokenizers.ByteLevel(add_prefix_space=False)),
            *(digits(individual_digits=False), split),
        ],
    }
    library = foreign.STYLES.get(style, foreign.gpt2)()
    if style in own:
        library.pre_tokenizer = pre_tokenizers.Sequence(own[style])
    ours = by_json(tmp_path, library)
    metadata = ours.to_gguf()
    assert metadata["tokenizer.ggml.pre"] == cut
    back = Tokenizer.from_gguf(metadata)
    for text in (*foreign.PROSE, *foreign.ODD):
        text = text.replace("e\u0301", "é")  # NFC, which llama.cpp leaves to others
        assert back.encode(text) == ours.encode(text)


def test_llama2_cs_vocabulary_goes_through(shared_data: Path) -> None:
    ours = Tokenizer.from_pieces(read_tok512(shared_data / "stories260K" / "tok512.bin"))
    back = Tokenizer.from_gguf(ours.to_gguf())
    assert back.fingerprint() == ours.fingerprint()
    assert len(back.encode("I believe the meaning of life is", add_bos=True)) == 18  # as llama2.c has it


# ---- what else is said


def test_what_readers_rely_on_is_said(tmp_path: Path) -> None:
    library = sentencepiece_bpe()
    library.add_special_tokens(["<|end|>", "<pad>"])
    library.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    library.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[(end, library.token_to_id(end)) for end in ("<s>", "</s>")]
    )
    templates = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}]
    ours = by_json(tmp_path, library, unk_token="<unk>", pad_token="<pad>", chat_template=templates)
    first = 3 + 256 + len(PIECES)
    metadata = ours.to_gguf(eot_id=first)
    assert {key.removeprefix("tokenizer."): v for key, v in metadata.items() if not isinstance(v, list)} == {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.add_space_prefix": False,
        "ggml.add_bos_token": True,
        "ggml.add_eos_token": True,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "ggml.padding_token_id": first + 1,
        "ggml.eot_token_id": first,
        "chat_template": "{{ messages }}",
        "chat_template.tool_use": "{{ tools }}",
    }
    assert metadata["tokenizer.chat_templates"] == ["tool_use"]
    # SentencePiece's numbers of kinds: unknown, control, control, bytes, normal pieces, control, control, user-defined.
    kinds = metadata["tokenizer.ggml.token_type"]
    assert kinds == [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 3, 3, 4]
    back = Tokenizer.from_gguf(metadata)
    assert back.chat_template == templates
    assert (back.named_tokens, back.before, back.after) == (ours.named_tokens, [1], [2])
    assert "tokenizer.ggml.eot_token_id" not in ours.to_gguf(eot_id=ours.eos_id)


def test_scores_fall_in_the_order_of_the_merges(tmp_path: Path) -> None:
    scores = by_json(tmp_path, sentencepiece_bpe()).to_gguf()["tokenizer.ggml.scores"]
    # ▁a, ab, ▁ab and bb are merged in this order; what is never merged comes last.
    assert scores[-4:] == [-0.0, -1.0, -2.0, -3.0]
    assert max(scores[:-4]) < -3.0


def test_a_vocabulary_is_filled_up_to_the_models() -> None:
    metadata = OURS.to_gguf()
    padded = with_padding(metadata, 303)
    assert padded["tokenizer.ggml.tokens"][300:] == ["[PAD300]", "[PAD301]", "[PAD302]"]
    assert padded["tokenizer.ggml.token_type"][300:] == [5, 5, 5]  # unused
    assert Tokenizer.from_gguf(padded).to_gguf() == padded
    assert with_padding(metadata, 300) == metadata
    assert with_padding({"general.name": "no tokenizer"}, 5) == {"general.name": "no tokenizer"}
    with pytest.raises(UserError, match="has 300 tokens, but the model's vocabulary holds 299"):
        with_padding(metadata, 299)


# ---- what does not go through


def changed(**parts: Any) -> Callable[[], Any]:
    def library() -> Any:
        made = sentencepiece_bpe()
        for name, part in parts.items():
            setattr(made, name, part)
        return made

    return library


def byte_level(**parts: Any) -> Callable[[], Any]:
    def library() -> Any:
        made = foreign.gpt2()
        for name, part in parts.items():
            setattr(made, name, part)
        return made

    return library


def metaspace_unigram(**model: Any) -> Any:
    content = json.loads(foreign.unigram().to_str())
    content["model"] |= model
    return tokenizers.Tokenizer.from_str(json.dumps(content))


_REPLACE = normalizers.Replace(" ", "▁")
_NO_RUNS = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
_NO_EXTRA = [normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""), _NO_RUNS, _REPLACE]
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "words with ends": (foreign.gpt_1, "no tokenizer of words with an end of their own"),
    "a space first": (foreign.with_a_space_first, "no name for how this tokenizer cuts text"),
    "an unknown cut": (byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(use_regex=False)), "no name for how"),
    "lower case": (byte_level(normalizer=normalizers.Lowercase()), "changes it .*Lowercase"),
    "no bytes": (lambda: sentencepiece_bpe(with_bytes=False), "no tokens for them .byte_fallback."),
    "a split that is no merge": (
        lambda: sentencepiece_bpe(merges=[("▁", "a"), ("a", "b"), ("▁a", "b"), ("b", "b")]),
        "would merge '▁' and 'ab', and this tokenizer doesn't",
    ),
    "mixed merges": (
        lambda: sentencepiece_bpe(merges=[("▁", "ab"), ("▁", "a"), ("▁a", "b"), ("a", "b"), ("b", "b")]),
        "can't merge in this tokenizer's order .at '▁ab'.",
    ),
    "extra spaces removed": (changed(normalizer=normalizers.Sequence(_NO_EXTRA)), "leaves all spaces to Sentence"),
    "runs of spaces removed": (changed(normalizer=normalizers.Sequence(_NO_EXTRA[1:])), "or neither"),
    "spaces as they are": (changed(normalizer=None), "writes spaces as ▁"),
    "text changed": (changed(normalizer=normalizers.Sequence([normalizers.NFKC(), _REPLACE])), "no such way .*NFKC"),
    "words of two": (
        lambda: changed(pre_tokenizer=pre_tokenizers.Metaspace("▁", "always", True), model=_across())(),
        "doesn't cut text at spaces, and this tokenizer does, for all its 'a▁",
    ),
    "a list of words": (
        changed(model=models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "▁a": 3}, unk_token="<unk>")),
        "no such tokenizer .*WordLevel",
    ),
    "unigram with bytes": (lambda: metaspace_unigram(byte_fallback=True), "has no bytes for the unknown"),
    "unigram without the unknown": (lambda: metaspace_unigram(unk_id=None), "needs a token for the unknown"),
}


def _across() -> Any:
    return sentencepiece_bpe([*PIECES, "b▁", "a▁", "▁b", "a▁b"]).model


@pytest.mark.parametrize("what", REFUSED)
def test_what_llama_cpp_would_read_otherwise_is_refused(what: str, tmp_path: Path) -> None:
    made, message = REFUSED[what]
    tokenizer = by_json(tmp_path, made())
    with pytest.raises(UserError, match=message) as caught:
        tokenizer.to_gguf()
    assert "--to hf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_words_are_refused() -> None:
    with pytest.raises(UserError, match="no tokenizer of whole words: train one of kind bpe or char, or leftward"):
        Tokenizer.train([TEXT], kind="word").to_gguf()


def test_an_end_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="name eos_token in tokenizer_config.json, or train the tokenizer with a special"
    ):
        Tokenizer.train([TEXT], kind="char", special_tokens=[]).to_gguf()
    library = sentencepiece_bpe()
    library.post_processor = processors.TemplateProcessing(
        "</s> $A", special_tokens=[("</s>", library.token_to_id("</s>"))]
    )
    with pytest.raises(UserError, match=r"begins a text with its bos token only, and this tokenizer with \[2\]"):
        by_json(tmp_path, library).to_gguf()


def test_the_pattern_that_stands_for_gpt2_is_the_librarys() -> None:
    """ByteLevel's own pattern is not in the file: `to_gguf` takes the table's."""
    split = pre_tokenizers.Split(tokenizers.Regex(pre_tokenizer_of("gpt-2").patterns[0]), "isolated")
    for text in (*foreign.PROSE, *foreign.ODD):
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
        assert [span for _, span in split.pre_tokenize_str(text)] == [span for _, span in pieces]
