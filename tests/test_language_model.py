"""Text in, text out: what a user of `lw.load` holds in hand."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import leftward as lw
from leftward import Config
from leftward.errors import UserError
from leftward.formats.model_directory import save_model
from leftward.generation.settings import Sampling
from leftward.language_model import LanguageModel
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder, random_ids

TEXT = "The quick brown fox jumps over the lazy dog; é, ß and 𝄞 too.\n"
TOKENIZER = Tokenizer.train([TEXT * 3], kind="bpe", vocab_size=280)


def make_model(tokenizer: Tokenizer = TOKENIZER, **values: Any) -> LanguageModel:
    defaults = {"vocab_size": tokenizer.vocab_size, "max_seq_len": 64, "n_layers": 2, "d_model": 32, "n_heads": 4}
    return LanguageModel(random_decoder(Config(**(defaults | values)), std=0.3), tokenizer)


MODEL = make_model()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, MODEL.config, MODEL.decoder.state_dict(), TOKENIZER)
    return path


# ---- loading


def test_load(directory: Path) -> None:
    model = lw.load(directory)
    assert model.config == MODEL.config
    assert model.tokenizer.fingerprint() == TOKENIZER.fingerprint()
    assert model.generate("The", seed=1) == MODEL.generate("The", seed=1)
    assert lw.load(str(directory), dtype="bf16").decoder.embed.weight.dtype == torch.bfloat16
    assert lw.load(directory, dtype="bf16").generate("The", max_tokens=3, seed=1)


def test_load_says_what_is_wrong(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dtype is 'bf-16': did you mean bf16\?"):
        lw.load(directory, dtype="bf-16")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="does not exist"):
        lw.load(tmp_path / "nothing")
    with pytest.raises(UserError, match="not a model directory"):
        lw.load(tmp_path)
    save_model(tmp_path, MODEL.config, MODEL.decoder.state_dict())
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        lw.load(tmp_path)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_shorter_context_is_the_same_model(tmp_path: Path, positions: str) -> None:
    config = Config(
        vocab_size=TOKENIZER.vocab_size, d_model=32, n_heads=2, n_layers=2, max_seq_len=48, positions=positions
    )
    save_model(tmp_path, config, random_decoder(config).state_dict(), TOKENIZER)
    whole, short = lw.load(tmp_path), lw.load(tmp_path, max_seq_len=12)
    ids = random_ids(config, 2, 12)
    with torch.inference_mode():
        assert torch.equal(whole.decoder(ids), short.decoder(ids))
    assert short.config.max_seq_len == 12 and "context 12" in repr(short)
    for wrong in (0, 49, 1.5, True):
        with pytest.raises(UserError, match="max_seq_len is .*: it must be a whole number from 1 to 48"):
            lw.load(tmp_path, max_seq_len=wrong)


def test_every_eos_of_generation_config_ends_a_text(directory: Path, tmp_path: Path) -> None:
    save_model(tmp_path, MODEL.config, MODEL.decoder.state_dict(), TOKENIZER, {"eos_token_id": [5, 6]})
    assert lw.load(tmp_path).eos_ids == {5, 6, TOKENIZER.eos_id}


# ---- generating


def test_one_prompt_gives_a_text_and_several_give_a_list() -> None:
    text = MODEL.generate("The quick", max_tokens=8, seed=3)
    assert isinstance(text, str) and text
    assert MODEL.generate(["The quick"], max_tokens=8, seed=3) == [text]
    assert MODEL.generate(["é", "The quick"], max_tokens=8, seed=3)[1] == text
    assert MODEL.generate([], max_tokens=8) == []


def test_samples_differ_and_the_first_is_the_plain_one() -> None:
    texts = MODEL.generate("The", n=3, max_tokens=12, seed=3)
    assert len(set(texts)) == 3
    assert texts[0] == MODEL.generate("The", max_tokens=12, seed=3)
    both = MODEL.generate(["The", "lazy"], n=3, max_tokens=12, seed=3)
    assert both[:3] == texts
    assert both[3:] == MODEL.generate("lazy", n=3, max_tokens=12, seed=3)


def test_a_stream_joins_to_the_whole() -> None:
    pieces = list(MODEL.stream("The", max_tokens=40, seed=5))
    assert all(pieces)
    assert "".join(pieces) == MODEL.generate("The", max_tokens=40, seed=5)


def test_an_empty_prompt_begins_a_text() -> None:
    assert MODEL.generate("", max_tokens=5, seed=1)
    without = Tokenizer.train([TEXT], kind="char", special_tokens=())
    with pytest.raises(UserError, match="the prompt is empty"):
        make_model(without).generate("", max_tokens=5)


def test_the_prompt_begins_with_bos() -> None:
    read: list[list[int]] = []
    model = make_model()
    model.decoder.embed.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].tolist()[0]))
    model.generate("The", max_tokens=1)
    model.score("The")
    assert read[0] == [TOKENIZER.bos_id, *TOKENIZER.encode("The")]
    assert read[1] == read[0][:-1]


def test_control_tokens_in_a_prompt_are_plain_text() -> None:
    read: list[list[int]] = []
    model = make_model()
    model.decoder.embed.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].tolist()[0]))
    model.generate("a<|endoftext|>", max_tokens=1)
    assert TOKENIZER.bos_id not in read[0][1:]


def test_ids_that_only_pad_the_vocabulary_are_never_chosen() -> None:
    model = make_model(vocab_size=400)
    with torch.no_grad():
        model.decoder.embed.weight[TOKENIZER.vocab_size :] *= 50
    text = model.generate("The", max_tokens=50, seed=0, temperature=2.0)
    assert isinstance(text, str)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_bad_arguments_are_refused_at_once(call: str) -> None:
    method = getattr(MODEL, call)
    with pytest.raises(UserError, match="unknown setting max_token: did you mean max_tokens"):
        method("The", max_token=3)
    with pytest.raises(UserError, match="top_p is 7"):
        method("The", top_p=7)
    with pytest.raises(UserError, match="truncate is 'right'"):
        method("The", truncate="right")
    with pytest.raises(UserError, match="more than the model's context of 64"):
        method("é𝄞ß" * 40)
    with pytest.raises(UserError, match="must be a string"):
        method(None if call == "stream" else [None])
    with pytest.raises(UserError, match="half a surrogate"):
        method("\ud800")
    with pytest.raises(UserError, match="n is 0"):
        MODEL.generate("The", n=0)


@pytest.mark.parametrize("settings", [{"n": 2}, {"best_of": 2}])
def test_a_stream_is_one_sample(settings: dict[str, int]) -> None:
    with pytest.raises(UserError, match="a stream is one sample"):
        MODEL.stream("The", **settings)


def test_a_completion_says_how_likely_it_was_under_the_model_itself() -> None:
    """The oracle is `score`, which reads the text as a whole."""
    settings: dict[str, Any] = {"max_tokens": 12, "seed": 5, "temperature": 0.7, "top_k": 30, "repetition_penalty": 1.2}
    found = MODEL.complete("The lazy", logprobs=3, prompt_logprobs=2, **settings)
    assert found.text == MODEL.generate("The lazy", **settings)
    assert found.logprobs is not None and found.prompt_logprobs is not None
    assert len(found.logprobs) == len(found.ids) and len(found.prompt_logprobs) == len(found.prompt_ids) - 1
    ids = [*found.prompt_ids, *found.ids]
    with torch.inference_mode():
        own = MODEL.decoder(torch.tensor([ids]))[0].double().log_softmax(-1)
    for place, (token_id, of_token) in enumerate(zip(ids[1:], [*found.prompt_logprobs, *found.logprobs], strict=True)):
        assert of_token.logprob == pytest.approx(own[place, token_id].item(), abs=1e-4)
        top = own[place].topk(len(of_token.top))
        assert [token for token, _ in of_token.top] == top.indices.tolist()
        assert [logprob for _, logprob in of_token.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert {len(each.top) for each in found.prompt_logprobs} == {2} and {len(each.top) for each in found.logprobs} == {
        3
    }
    score = MODEL.score("The lazy")
    assert [each.logprob for each in found.prompt_logprobs] == pytest.approx(score.logprobs, abs=1e-4)
    assert found.mean_logprob == pytest.approx(sum(each.logprob for each in found.logprobs) / len(found.ids))
    assert all(each.ruled_logprob is not None and each.ruled_logprob <= 0 for each in found.logprobs)
    assert MODEL.complete("The lazy", **settings).logprobs is None


def test_best_of_keeps_the_likeliest_per_token_and_its_seed() -> None:
    prompts = ["The", "lazy"]
    everyone = MODEL.complete(prompts, n=6, max_tokens=8, seed=2, logprobs=0)
    kept = MODEL.complete(prompts, n=2, best_of=6, max_tokens=8, seed=2)
    for i in range(2):
        means = {
            each.text: sum(t.logprob for t in each.logprobs or ()) / len(each.ids) for each in everyone[6 * i :][:6]
        }
        expected = sorted(means, key=lambda text: -means[text])[:2]
        assert [each.text for each in kept[2 * i :][:2]] == expected
    assert MODEL.generate("The", max_tokens=8, seed=kept[0].seed) == kept[0].text
    assert MODEL.generate("The", best_of=6, max_tokens=8, seed=2) == kept[0].text


def test_prompt_logprobs_behind_vectors_are_refused() -> None:
    with pytest.raises(UserError, match="prompt_logprobs with prefix_embeddings"):
        MODEL.complete("The", prompt_logprobs=1, prefix_lm=True)


def test_a_sampler_of_ones_own() -> None:
    fox = TOKENIZER.encode("x")[0]
    assert MODEL.generate("The", sampler=lambda logits, ids: fox, max_tokens=4) == "xxxx"
    before = MODEL.generate("The", temperature=0.0, max_tokens=6)
    assert MODEL.generate("The", temperature=0.0, max_tokens=6, sampler=lambda logits, ids: logits * 3) == before
    assert MODEL.generate("The", temperature=0.0, max_tokens=6, sampler=lambda logits, ids: -logits) != before


def test_truncate_left() -> None:
    assert MODEL.generate("é𝄞ß" * 40 + "The", truncate="left", max_tokens=4, seed=0)


def test_a_character_that_the_tokenizer_lacks_is_a_user_error() -> None:
    with pytest.raises(UserError, match="Ж"):
        make_model(Tokenizer.train([TEXT], kind="char")).generate("Ж")


# ---- scoring


def reference_logprobs(model: LanguageModel, ids: list[int]) -> list[float]:
    with torch.inference_mode():
        logprobs = model.decoder(torch.tensor([ids]))[0].log_softmax(-1)
    return [float(logprobs[i, token_id]) for i, token_id in enumerate(ids[1:])]


def test_a_score_is_the_models_own_log_probability() -> None:
    text = "The lazy é 𝄞"
    score = MODEL.score(text)
    ids = TOKENIZER.encode(text)
    assert score.ids == tuple(ids)  # bos comes first, so that the first token is scored too
    assert score.logprobs == pytest.approx(reference_logprobs(MODEL, [TOKENIZER.bos_id, *ids]), abs=1e-5)
    assert score.n_bytes == len(text.encode())
    assert score.nll == pytest.approx(-sum(score.logprobs))
    assert score.loss == pytest.approx(score.nll / len(ids))
    assert score.perplexity == pytest.approx(math.exp(score.loss))
    assert score.bits_per_byte == pytest.approx(score.nll / math.log(2) / len(text.encode()))
    assert len(score.tokens) == len(ids)
    assert score.tokens[0] == "The" or "The".startswith(score.tokens[0])
    assert "\ufffd" in "".join(score.tokens)  # the clef's bytes are tokens of their own


def test_a_tokenizer_without_bos_cannot_score_the_first_token() -> None:
    tokenizer = Tokenizer.train([TEXT], kind="char", special_tokens=())
    model = make_model(tokenizer)
    score = model.score("The é")
    assert score.tokens == ("h", "e", " ", "é")
    assert score.n_bytes == 5
    assert score.logprobs == pytest.approx(reference_logprobs(model, tokenizer.encode("The é")), abs=1e-5)
    with pytest.raises(UserError, match="nothing to score"):
        model.score("T")


def test_nothing_to_score() -> None:
    with pytest.raises(UserError, match="nothing to score"):
        MODEL.score("")


def test_a_long_text_is_scored_in_windows_that_overlap_by_half() -> None:
    tokenizer = Tokenizer.train([TEXT], kind="char")
    model = make_model(tokenizer, max_seq_len=16)
    text = (TEXT * 3)[:100]
    ids = [tokenizer.bos_id, *tokenizer.encode(text)]
    score = model.score(text)
    expected = []
    with torch.inference_mode():
        for target in range(1, len(ids)):
            # The first 16 from the beginning, then eight at a time behind the eight before them.
            start = 0 if target <= 16 else 8 * ((target - 17) // 8 + 1)
            logits = model.decoder(torch.tensor([ids[start:target]]))[0, -1]
            expected.append(float(logits.log_softmax(-1)[ids[target]]))
    assert score.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("max_seq_len", [1, 2, 3])
def test_a_tiny_context_scores_too(max_seq_len: int) -> None:
    model = make_model(max_seq_len=max_seq_len)
    assert len(model.score("The quick brown fox").logprobs) == len(TOKENIZER.encode("The quick brown fox"))


def test_a_model_that_knows_the_text_by_heart() -> None:
    """An untied model whose next token is certain: loss 0, perplexity 1."""
    tokenizer = Tokenizer.train(["ab"], kind="char")
    config = Config(vocab_size=3, n_layers=1, d_model=4, n_heads=1, tie_embeddings=False)
    model = LanguageModel(random_decoder(config), tokenizer)
    with torch.no_grad():
        for parameter in model.decoder.blocks.parameters():
            parameter.zero_()
        model.decoder.embed.weight.copy_(torch.eye(3, 4))
        model.decoder.norm.weight.fill_(1)
        model.decoder.head.weight.copy_(torch.eye(3, 4).roll(1, dims=0) * 100)  # 0 → 1 → 2 → 0
    score = model.score("ab")
    assert score.loss == pytest.approx(0, abs=1e-6)
    assert score.perplexity == pytest.approx(1)
    assert model.generate("", temperature=0) == "ab"  # then the token that ends a text


# ---- vectors in front, prefix-LM, embeddings


@pytest.mark.parametrize("prefix_lm", [False, True])
@pytest.mark.parametrize("values", [{}, {"window": 5, "attention_pattern": "LG"}, {"positions": "learned"}])
def test_vectors_in_front_are_seen_by_cached_generation(values: dict[str, Any], prefix_lm: bool) -> None:
    """Greedy text with the cache is that of the whole forward pass, token by token."""
    model = make_model(**values)
    vectors = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(0))
    prompts = ["The quick", "é", "lazy dog"]
    texts = model.generate(prompts, max_tokens=12, temperature=0, prefix_embeddings=vectors, prefix_lm=prefix_lm)
    for prompt, vector, text in zip(prompts, vectors, texts, strict=True):
        ids = model.tokenizer.encode(prompt, add_bos=True)
        length = 4 + len(ids)
        for _ in range(12):
            with torch.inference_mode():
                logits = model.decoder(
                    torch.tensor([ids]),
                    prefix_embeddings=vector[None],
                    prefix_lengths=[length] if prefix_lm else None,
                )
            ids.append(int(logits[0, -1].argmax()))
        assert model.tokenizer.decode(ids[length - 4 :]) == text
    assert texts != model.generate(prompts, max_tokens=12, temperature=0)


def test_vectors_in_front_of_samples_and_of_every_prompt() -> None:
    vectors = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    one = MODEL.generate("The", n=2, seed=3, prefix_embeddings=vectors)
    two = MODEL.generate(["The", "fox"], n=2, seed=3, prefix_embeddings=torch.stack((vectors, vectors)))
    assert two[:2] == one and two == MODEL.generate(["The", "fox"], n=2, seed=3, prefix_embeddings=vectors)


@pytest.mark.parametrize("shape", [(4,), (4, 31), (2, 4, 32), (64, 32)])
def test_vectors_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="prefix_embeddings"):
        MODEL.generate("The", prefix_embeddings=torch.zeros(shape))


def test_embeddings_are_the_last_tokens_hidden_state() -> None:
    texts = ["The quick brown fox", "é", "The quick brown fox jumps over the lazy dog"]
    vectors = MODEL.embed(texts)
    assert vectors.shape == (3, 32)
    for text, vector in zip(texts, vectors, strict=True):
        ids = torch.tensor([TOKENIZER.encode(text, add_bos=True)])
        with torch.inference_mode():
            alone = MODEL.decoder.hidden(ids)[0, -1]
        torch.testing.assert_close(vector, alone, atol=1e-5, rtol=1e-5)
    assert MODEL.embed([]).shape == (0, 32)
    with pytest.raises(UserError, match=r"the model's context is 64"):
        MODEL.embed(["fox " * 200])


def test_padding_of_the_vocabulary_is_never_sampled() -> None:
    model = make_model(vocab_multiple=512, tie_embeddings=False)
    assert model.decoder.embed.weight.shape[0] == 512 > model.config.vocab_size
    with torch.no_grad():
        model.decoder.head.weight[model.config.vocab_size :] = 100.0  # however likely they would be
    assert model.decoder(torch.zeros(1, 1, dtype=torch.long)).shape[-1] == model.config.vocab_size
    events = list(model.events(["The"], Sampling(max_tokens=40, temperature=5.0, seed=1)))
    assert all(event.token_id is not None and event.token_id < model.config.vocab_size for event in events)


# ---- the model's own defaults


def test_generation_config_is_the_default_and_arguments_go_before_it(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [0], "do_sample": False, "max_new_tokens": 7}))
    model = lw.load(tmp_path / "model")
    plain = lw.load(directory)
    assert model.generate("The") == plain.generate("The", temperature=0, max_tokens=7)
    drawn = {"temperature": 1.0, "max_tokens": 12, "seed": 3}
    assert model.generate("The", **drawn) == plain.generate("The", **drawn)
    path.write_text(json.dumps({"temperature": "hot"}))
    with pytest.raises(UserError, match="the generation_config.json of .*temperature is 'hot'"):
        lw.load(tmp_path / "model")


# ---- the engine, and the end of the context


def test_many_requests_through_an_engine_of_the_model() -> None:
    engine = MODEL.engine(max_rows=2)
    assert isinstance(engine, lw.Engine)
    texts = ["", "", ""]
    for i, prompt in enumerate(("The", "fox", "dog")):
        ids = MODEL.tokenizer.encode(prompt, add_bos=True)
        assert engine.submit(lw.Request(ids=ids, sampling=lw.Sampling(max_tokens=9, seed=i))) == i
    for event in engine.run():
        texts[event.row] += event.text
    assert texts == [MODEL.generate(p, max_tokens=9, seed=i) for i, p in enumerate(("The", "fox", "dog"))]


def test_a_text_goes_on_beyond_the_context_where_it_is_asked_to() -> None:
    ended = MODEL.complete("The quick", max_tokens=150, temperature=0)
    assert ended.finish_reason == "context" and len(ended.ids) + len(ended.prompt_ids) == 64
    rolled = MODEL.complete("The quick", max_tokens=150, temperature=0, at_context="roll", n_keep=4)
    assert rolled.finish_reason == "length" and len(rolled.ids) == 150
    assert rolled.ids[: len(ended.ids)] == ended.ids
    pieces = MODEL.stream("The quick", max_tokens=150, temperature=0, at_context="roll", n_keep=4)
    assert "".join(pieces) == rolled.text


def test_the_kv_dtype_is_named() -> None:
    assert MODEL.generate("The", max_tokens=3, seed=1, kv_dtype="int8")
    with pytest.raises(UserError, match=r"kv_dtype is 'int-8': did you mean int8\?"):
        MODEL.generate("The", kv_dtype="int-8")


def test_of_many_prompts_the_first_is_told_before_the_last_is_begun() -> None:
    """A generator that is left has written what was asked for, and no more."""
    tokenizer = Tokenizer.train(["abcdefgh"], kind="char")
    decoder = random_decoder(Config(vocab_size=tokenizer.vocab_size, max_seq_len=64, n_layers=1, d_model=16), std=0.3)
    passes = []
    decoder.blocks[0].register_forward_hook(lambda module, inputs, output: passes.append(len(output)))
    told = LanguageModel(decoder, tokenizer).completions(["abc"] * 200, max_tokens=20, min_tokens=20)
    assert not passes
    assert len(next(told)) == 1
    assert 20 <= len(passes) < 60  # 200 prompts, 64 at once, take 80 at least
