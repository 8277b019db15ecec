"""Tokenizers: exact round trips on any text, streams that join to the whole, and nothing lost or smuggled in.

The oracles are the tokenizers library's own decoder and transformers' AutoTokenizer on the saved files.
"""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from leftward.errors import UserError
from leftward.text.tokenizer import KINDS, SEPARATOR, Kind, Tokenizer

PROSE = [topics[name] for name in sorted(topics)[:12]]
TRICKY = "naïve 猫が好き 👩‍👩‍👧 e\u0301\r\n\ttabs  two\x00nul \ufeffbom\u2028sep <|endoftext|> <0x41> Ġ end "
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@pytest.fixture(scope="module")
def trained() -> dict[str, Tokenizer]:
    return {kind: Tokenizer.train([*PROSE, TRICKY], kind=kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_come_first_and_mark_both_ends(trained: dict[str, Tokenizer], kind: Kind) -> None:
    tokenizer = trained[kind]
    assert (tokenizer.kind, tokenizer.eos_id, tokenizer.bos_id, tokenizer.special_ids) == (kind, 0, 0, (0,))
    assert tokenizer.token_bytes(0) == SEPARATOR.encode()
    two = Tokenizer.train(PROSE, kind=kind, special_tokens=("<|end|>", "<|pad|>"))
    assert (two.special_ids, two.eos_id) == ((0, 1), 0)
    none = Tokenizer.train(PROSE, kind=kind, special_tokens=())
    assert (none.special_ids, none.eos_id, none.bos_id) == ((), None, None)
    assert none.encode(PROSE[0], add_bos=True) == none.encode(PROSE[0])


@pytest.mark.parametrize("kind", ["bpe", "word"])
@given(text=ANY_TEXT)
def test_any_text_round_trips(trained: dict[str, Tokenizer], kind: Kind, text: str) -> None:
    tokenizer = trained[kind]
    for parse_special in (False, True):
        ids = tokenizer.encode(text, parse_special=parse_special)
        assert tokenizer.decode(ids, skip_special=False) == text
    assert not set(tokenizer.encode(text)) & set(tokenizer.special_ids)


@given(text=ANY_TEXT.filter(bool))
def test_any_text_round_trips_at_character_level(text: str) -> None:
    tokenizer = Tokenizer.train([text], kind="char")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    # One id a character, in the order of code points, after the special token.
    assert ids == [1 + sorted(set(text)).index(character) for character in text]


@pytest.mark.parametrize("kind", KINDS)
def test_tricky_text_round_trips(trained: dict[str, Tokenizer], kind: Kind) -> None:
    assert trained[kind].decode(trained[kind].encode(TRICKY)) == TRICKY
    assert trained[kind].encode("") == []
    assert trained[kind].decode([]) == ""


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(data=st.data())
def test_streamed_pieces_join_to_the_whole(trained: dict[str, Tokenizer], kind: Kind, data: st.DataObject) -> None:
    tokenizer = trained[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    skip = data.draw(st.booleans())
    stream = tokenizer.stream_decoder(skip_special=skip)
    joined = "".join(stream.feed(i) for i in ids) + stream.flush()
    assert joined == tokenizer.decode(ids, skip_special=skip)
    if kind != "word":  # on bytes that are no UTF-8 the library's word decoder gives one U+FFFD a byte
        assert joined == tokenizer._library.decode(ids, skip_special_tokens=skip)


@given(text=ANY_TEXT)
def test_word_decoding_is_the_librarys(trained: dict[str, Tokenizer], text: str) -> None:
    tokenizer = trained["word"]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer._library.decode(ids)


def test_a_stream_never_gives_half_a_character() -> None:
    tokenizer = Tokenizer.train(["abc"], vocab_size=257)  # bytes only
    ids = tokenizer.encode("é猫😀")
    assert [len(tokenizer.token_bytes(i)) for i in ids] == [1] * 9
    stream = tokenizer.stream_decoder()
    assert [stream.feed(i) for i in ids] == ["", "é", "", "", "猫", "", "", "", "😀"]
    assert stream.flush() == ""
    stream = tokenizer.stream_decoder()
    assert [stream.feed(i) for i in ids[:4]] == ["", "é", "", ""]
    assert stream.flush() == "\ufffd" == tokenizer.decode(ids[2:4])


def test_a_stream_continues_its_context(trained: dict[str, Tokenizer]) -> None:
    tokenizer = Tokenizer.train(["a photo of"], kind="word", byte_fallback=False)
    first, *rest = tokenizer.encode("a photo of")
    stream = tokenizer.stream_decoder(context=[first])
    assert "".join(stream.feed(i) for i in rest) == " photo of"
    assert tokenizer.decode(np.array(rest)) == "photo of"


def test_a_word_is_its_space_and_itself() -> None:
    tokenizer = Tokenizer.train(["a photo of"], kind="word", byte_fallback=False)
    ids = tokenizer.encode("a photo of")
    assert [tokenizer.token_bytes(i) for i in ids] == [b" a", b" photo", b" of"]
    assert tokenizer.decode(ids) == "a photo of"


def test_a_closed_language_has_exactly_its_words() -> None:
    nouns, verbs = ["the cat", "the dog", "a bird"], ["sees", "hears", "likes", "finds"]
    sentences = [f"{a} {verb} {b}" for a in nouns for verb in verbs for b in nouns]
    tokenizer = Tokenizer.train(sentences, kind="word", byte_fallback=False)
    assert tokenizer.vocab_size == 9 + 1  # the, a, 3 nouns, 4 verbs, and the separator
    assert all(len(tokenizer.encode(sentence)) == 5 for sentence in sentences)
    with pytest.raises(UserError, match=r"lacks the words 'fish', 'xyz'.*byte_fallback"):
        tokenizer.encode("the fish sees a xyz")
    with pytest.raises(UserError, match="lacks the word '!'"):
        tokenizer.encode("the cat!", parse_special=True)
    with pytest.raises(UserError, match=r"the text has 9 different words.*without byte_fallback"):
        Tokenizer.train(sentences, kind="word", byte_fallback=False, vocab_size=8)
    spelling = Tokenizer.train(sentences, kind="word", vocab_size=1 + 256 + 5)
    assert spelling.decode(spelling.encode("the fish sees a xyz")) == "the fish sees a xyz"


def test_pieces_of_a_document_encode_as_the_whole(trained: dict[str, Tokenizer]) -> None:
    text = "One line.\nAnother line of words.\nA third."
    cuts = [text[:10], text[10:33], text[33:]]
    for kind in KINDS:
        whole = trained[kind].encode(text)
        parts = trained[kind].encode_batch(cuts, starts=[True, False, False])
        assert np.concatenate(parts).tolist() == whole


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_cannot_be_smuggled_in(trained: dict[str, Tokenizer], kind: Kind) -> None:
    tokenizer = trained[kind]
    text = f"end{SEPARATOR}of ({SEPARATOR})"
    plain = tokenizer.encode(text)
    assert 0 not in plain
    assert tokenizer.decode(plain) == text
    assert [ids.tolist() for ids in tokenizer.encode_batch([text])] == [plain]
    parsed = tokenizer.encode(text, parse_special=True)
    assert parsed.count(0) == 2
    assert 0 not in tokenizer.encode(text)  # asking once does not open the door for good


@pytest.mark.parametrize(
    ("kind", "special"), [("bpe", "the"), ("bpe", "a"), ("char", "e"), ("word", "EOS"), ("word", "<>")]
)
def test_a_special_token_that_text_could_write_is_refused(kind: Kind, special: str) -> None:
    with pytest.raises(UserError, match=f"special token '{special}'"):
        Tokenizer.train(["the theme of the other the the"], kind=kind, special_tokens=(special,))


@pytest.mark.parametrize("kind", KINDS)
def test_bos_is_never_doubled(trained: dict[str, Tokenizer], kind: Kind) -> None:
    tokenizer = trained[kind]
    bare = tokenizer.encode("the end")
    assert tokenizer.encode("the end", add_bos=True) == [0, *bare]
    assert tokenizer.encode(f"{SEPARATOR}the end", add_bos=True, parse_special=True) == [0, *bare]


def test_a_character_outside_the_vocabulary_is_named() -> None:
    tokenizer = Tokenizer.train(["hello"], kind="char")
    with pytest.raises(UserError, match=r"'é' \(U\+00E9\), '😀' \(U\+1F600\).*kind bpe"):
        tokenizer.encode("hé😀ll")
    with pytest.raises(UserError, match=r"the character '\\n' \(U\+000A\): leave it out"):
        tokenizer.encode("he\n", parse_special=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parse_special", [False, True])
def test_half_a_surrogate_pair_is_refused(trained: dict[str, Tokenizer], kind: Kind, parse_special: bool) -> None:
    with pytest.raises(UserError, match=r"U\+D800 at character 3"):
        trained[kind].encode("the\ud800", parse_special=parse_special)
    with pytest.raises(UserError, match=r"U\+DC00 at character 1"):
        Tokenizer.train(["a\udc00"], kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary_are_refused(trained: dict[str, Tokenizer], kind: Kind) -> None:
    tokenizer = trained[kind]
    for token_id in (-1, tokenizer.vocab_size, 2**40):
        with pytest.raises(UserError, match=f"token id {token_id} is not in the vocabulary of {tokenizer.vocab_size}"):
            tokenizer.decode([1, token_id])


# ---- sizes


@pytest.mark.parametrize(("length", "size"), [(5_000, 512), (100_000, 1024), (400_000, 2048)])
def test_the_automatic_size_grows_with_the_text(length: int, size: int) -> None:
    # 3·sqrt(5,000) = 212, below the least of 512; 3·sqrt(100,000) = 949; 3·sqrt(400,000) = 1,897
    text = "".join(topics[name] for name in sorted(topics))
    ascii_text = text.encode("ascii", "ignore").decode()[:length]
    assert len(ascii_text) == length
    assert Tokenizer.train([ascii_text]).vocab_size == size


def test_a_smaller_vocabulary_is_what_the_library_trains_at_that_size() -> None:
    automatic = Tokenizer.train(PROSE)
    asked = Tokenizer.train(PROSE, vocab_size=automatic.vocab_size)
    assert automatic.fingerprint() == asked.fingerprint()


def test_an_automatic_size_is_what_the_corpus_supports() -> None:
    # "ab" is the only pair that occurs twice: 256 bytes, the separator, and it.
    assert Tokenizer.train(["ab ab"]).vocab_size == 258


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_the_corpus_supports_is_refused(kind: Kind) -> None:
    supported = {"bpe": 258, "char": 4, "word": 258}[kind]  # "word": the separator, 256 bytes, " ab"
    with pytest.raises(UserError, match=f"vocab_size is 5000, larger than the corpus supports.*{supported} tokens"):
        Tokenizer.train(["ab ab"], kind=kind, vocab_size=5000)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("bpe", 256, "at least 257"),
        ("char", 3, "3 different characters.*takes 4"),
        ("word", 257, "alone take 257"),
        ("bpe", 0, "at least 1"),
    ],
)
def test_too_small_a_vocabulary_is_refused(kind: Kind, size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Tokenizer.train(["ab ab"], kind=kind, vocab_size=size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("documents", [[], [""]])
def test_no_text_is_refused(kind: Kind, documents: list[str]) -> None:
    with pytest.raises(UserError, match="no text"):
        Tokenizer.train(documents, kind=kind)


def test_one_string_is_one_document() -> None:
    assert Tokenizer.train(PROSE[0]).fingerprint() == Tokenizer.train([PROSE[0]]).fingerprint()


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(UserError, match="'chars': did you mean char"):
        Tokenizer.train(["x"], kind="chars")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_deterministic(kind: Kind) -> None:
    assert len({Tokenizer.train(PROSE, kind=kind).fingerprint() for _ in range(3)}) == 1


def test_an_error_while_reading_documents_comes_through() -> None:
    def documents():  # type: ignore[no-untyped-def]
        yield "text"
        raise UserError("line 3 is broken")

    for kind in KINDS:
        with pytest.raises(UserError, match="line 3 is broken"):
            Tokenizer.train(documents(), kind=kind)


def test_tiny_shakespeare_has_65_characters(shared_data: Path) -> None:
    text = (shared_data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer.train([text], kind="char")
    assert tokenizer.vocab_size == 65 + 1
    assert len(tokenizer.encode(text)) == 1_115_394


# ---- files


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_is_the_same(trained: dict[str, Tokenizer], kind: Kind, tmp_path: Path) -> None:
    trained[kind].save(tmp_path / "new", model_max_length=77)
    loaded = Tokenizer.load(tmp_path / "new")
    assert loaded.fingerprint() == trained[kind].fingerprint()
    assert (loaded.kind, loaded.vocab_size, loaded.eos_id) == (kind, trained[kind].vocab_size, 0)
    assert loaded.encode(TRICKY) == trained[kind].encode(TRICKY)
    assert loaded.encode(TRICKY, parse_special=True) == trained[kind].encode(TRICKY, parse_special=True)


def test_fingerprints_tell_tokenizers_apart() -> None:
    assert Tokenizer.train(["ab"], kind="char").fingerprint() != Tokenizer.train(["ac"], kind="char").fingerprint()


def test_a_long_run_without_spaces_is_learned_in_linear_time() -> None:
    # The library alone takes minutes for this.
    tokenizer = Tokenizer.train(["ACGT" * 50_000], vocab_size=264)
    assert tokenizer.decode(tokenizer.encode("ACGTAC" * 1000)) == "ACGTAC" * 1000


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_our_files(trained: dict[str, Tokenizer], kind: Kind, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = trained[kind]
    ours.save(tmp_path, model_max_length=77)
    # As in a run directory: transformers must not take the tokenizer of the model's family instead.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": ours.vocab_size}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.eos_token, theirs.bos_token, theirs.eos_token_id) == (SEPARATOR, SEPARATOR, 0)
    assert theirs.model_max_length == 77
    assert len(theirs) == ours.vocab_size
    for text in [PROSE[3], TRICKY.replace(SEPARATOR, ""), "a . b , c it 's", f"x{SEPARATOR} y"]:
        ids = ours.encode(text, parse_special=True)
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert theirs(text).input_ids == ours.encode(text, parse_special=True, add_bos=True)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    theirs.save_pretrained(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").fingerprint() == ours.fingerprint()


def test_byte_level_bpe_of_other_origin(tmp_path: Path) -> None:
    """As GPT-2's and Llama 3's: other patterns, added tokens at the end, a template that adds one, truncation set."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=True))
    pattern = tokenizers.Regex(r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+")
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(pattern, "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(PROSE, trainer=trainer)
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 400)])
    library.enable_truncation(5)
    library.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    ours = Tokenizer.load(tmp_path)
    assert (ours.kind, ours.bos_id, ours.eos_id, ours.vocab_size) == ("bpe", 400, 401, 402)
    library.no_truncation()
    assert ours.encode(TRICKY) == library.encode(TRICKY, add_special_tokens=False).ids
    assert ours.encode("1234 <s>", parse_special=True, add_bos=True) == library.encode("1234 <s>").ids
    assert ours.decode(ours.encode(TRICKY)) == TRICKY
    ours.save(tmp_path / "again")  # keeps what it doesn't know
    assert json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"


def test_a_byte_that_another_vocabulary_lacks_is_named(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("abba") == [0, 1, 1, 0]
    with pytest.raises(UserError, match=r"lacks the character 'é' \(U\+00E9\)"):
        tokenizer.encode("abé")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": "1.0"}', '{"model": {"type": "X"}}', "\x00\xff"])
def test_a_damaged_file_is_named(trained: dict[str, Tokenizer], content: str, tmp_path: Path) -> None:
    trained["bpe"].save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(tmp_path)


def test_a_truncated_or_missing_file_is_named(trained: dict[str, Tokenizer], tmp_path: Path) -> None:
    trained["char"].save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    trained["char"].save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer_config\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(UserError, match=r"eos_token '<end>'.*not in the vocabulary"):
        Tokenizer.load(tmp_path)


def test_an_unknown_decoder_is_named(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"▁a": 0}, merges=[]))
    library.decoder = tokenizers.decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: .*decodes with WordPiece"):
        Tokenizer.load(tmp_path)
