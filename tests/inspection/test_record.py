"""Recording: what is shown is what was computed, of every architecture, through caches, and at no cost afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from leftward import Config
from leftward.errors import UserError
from leftward.formats.packing import with_packed_weights
from leftward.inspection.record import record
from leftward.kernels import native
from leftward.language_model import LanguageModel
from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder
from leftward.model.lora import adapt
from leftward.text.tokenizer import Tokenizer
from random_models import configs, random_decoder, random_ids

TEXT = "The quick brown fox jumps over the lazy dog.\n"
TOKENIZER = Tokenizer.train([TEXT * 3], kind="bpe", vocab_size=270)


def make_model(**values: Any) -> LanguageModel:
    config = Config(**{"vocab_size": 270, "max_seq_len": 64, "n_layers": 2, "d_model": 32, "n_heads": 4} | values)
    return LanguageModel(random_decoder(config, std=0.3), TOKENIZER)


def hooks(decoder: Decoder) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in decoder.modules())


# ---- what is shown is what was computed


@given(configs(), st.data())
@settings(max_examples=60)
def test_recording_changes_nothing_and_shows_a_sum(config: Config, data: st.DataObject) -> None:
    """Bit for bit the same output; rows of weights sum to 1, or less where a sink took some; weights · v is what the
    heads mixed; the stream is the sum of what is added."""
    decoder = random_decoder(config)
    length = data.draw(st.integers(1, config.max_seq_len))
    ids = random_ids(config, 2, length)
    asked: dict[str, Any] = {}
    if data.draw(st.booleans()):
        asked["documents"] = torch.arange(length).div(4, rounding_mode="floor").expand(2, -1)
    if data.draw(st.booleans()):
        asked["prefix_lengths"] = [length // 2, length // 3]
    with torch.inference_mode():
        plain = decoder(ids, **asked)
        with record(decoder, "*") as rec:
            assert torch.equal(decoder(ids, **asked), plain)
    assert hooks(decoder) == 0
    assert rec.nbytes == rec.bytes(length, batch=2)
    torch.testing.assert_close(rec["logits"], plain.float(), rtol=0, atol=0)
    group = config.n_heads // config.n_kv_heads
    for layer in range(config.n_layers):
        at = f"layers.{layer}."
        weights, v = rec[at + "attn.weights"], rec[at + "attn.v"].repeat_interleave(group, dim=1)
        torch.testing.assert_close(weights @ v, rec[at + "attn.heads"].transpose(1, 2), atol=1e-5, rtol=1e-4)
        sums = weights.sum(dim=-1)
        assert bool((sums <= 1 + 1e-5).all())
        if not config.attn_sinks:
            torch.testing.assert_close(sums, torch.ones_like(sums))
        if not asked:
            assert not weights.triu(1).any()
        if config.is_local(layer) and config.window is not None:
            assert not weights.tril(-config.window).any()
        if config.block != "post":
            whole = rec[at + "resid.pre"] + rec[at + "attn.out"] + rec[at + "ff.out"]
            torch.testing.assert_close(whole, rec[at + "resid.post"], atol=1e-5, rtol=1e-4)


@given(configs(), st.data())
@settings(max_examples=60)
def test_a_cached_recording_is_the_full_one(config: Config, data: st.DataObject) -> None:
    """Put together from passes of any size, with windows that roll out of the cache."""
    decoder = random_decoder(config)
    length = data.draw(st.integers(2, config.max_seq_len))
    ids = random_ids(config, 2, length)
    cache = KVCache(config, batch=2, capacity=length, rewindable=data.draw(st.integers(0, 3)))
    with torch.inference_mode():
        with record(decoder, "*") as full:
            decoder(ids)
        with record(decoder, "*") as cached:
            done = 0
            while done < length:
                size = data.draw(st.integers(1, length - done))
                decoder(ids[:, done : done + size], cache)
                done += size
    for name in full.names:
        here, there = cached[name], full[name]
        assert here.shape == there.shape
        if name.endswith("attn.scores"):  # of keys that a pass had not, there are none
            here, there = (x.masked_fill(here.isnan(), 0).tril() for x in (here, there))
        torch.testing.assert_close(here, there, atol=5e-5, rtol=1e-3)


def test_tokens_that_were_taken_back_count_once() -> None:
    decoder = random_decoder(Config(vocab_size=20, d_model=16, n_heads=2, n_layers=1, max_seq_len=32))
    ids, others = random_ids(decoder.config, 1, 9), random_ids(decoder.config, 1, 9, seed=1)
    cache = KVCache(decoder.config, 1, 32)
    with torch.inference_mode():
        with record(decoder, "resid.post", "attn.weights", "attn.k") as rec:
            decoder(ids[:, :6], cache)
            cache.rewind([4])
            decoder(others[:, 4:], cache)
        with record(decoder, "resid.post", "attn.weights", "attn.k") as whole:
            decoder(torch.cat((ids[:, :4], others[:, 4:]), dim=1))
    for name in rec.names:
        torch.testing.assert_close(rec[name], whole[name])
    assert [tensor.shape[1] for tensor in rec.passes("layers.0.resid.post")] == [6, 5]


def test_vectors_in_front_of_the_tokens_have_places_too() -> None:
    decoder = random_decoder(Config(vocab_size=20, d_model=16, n_heads=2, n_layers=1, max_seq_len=32))
    ids, cache = random_ids(decoder.config, 1, 4), KVCache(decoder.config, 1, 32)
    with torch.inference_mode(), record(decoder, "embed", "resid.pre", "attn.weights") as rec:
        decoder(ids, cache, prefix_embeddings=torch.ones(1, 3, 16))
        decoder(ids[:, :1], cache)
    assert rec["embed"].shape == (1, 5, 16) and rec["layers.0.resid.pre"].shape == (1, 8, 16)
    assert torch.equal(rec["layers.0.resid.pre"][:, 3:], rec["embed"])
    assert rec["layers.0.attn.weights"].shape == (1, 2, 8, 8)


def test_texts_are_recorded_as_they_are_written_and_scored() -> None:
    model = make_model()
    with model.record("attn.weights", "resid.post", "logits", "embed") as rec:
        written = model.complete("The quick", max_tokens=5, temperature=0)
    n = len(written.prompt_ids) + 4  # the last token was never read
    assert rec["layers.1.attn.weights"].shape == (1, 4, n, n)
    assert rec["embed"].shape == (1, n, 32)
    assert rec.stack("resid.post").shape == (2, 1, n, 32)
    assert rec["logits"].argmax(dim=-1).tolist() == list(written.ids)
    with model.record("logits") as rec:
        score = model.score(TEXT)
    logprobs = rec["logits"].log_softmax(dim=-1).gather(1, torch.tensor(score.ids)[:, None])[:, 0]
    assert logprobs.tolist() == pytest.approx(score.logprobs, abs=1e-6)


# ---- from outside


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gpt_oss"])
def test_transformers_shows_the_same(family: str, tmp_path: Any) -> None:
    """Attention weights and hidden states of its own classes, eager."""
    import transformers

    import leftward as lw

    shared: dict[str, Any] = {
        "vocab_size": 270,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    wide = shared | {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "head_dim": 8,
    }
    settings_of: dict[str, dict[str, Any]] = {
        "gpt2": shared | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
        "llama": wide,
        "gemma2": wide | {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
        "gpt_oss": wide
        | {"sliding_window": 5, "num_local_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    }
    config = transformers.AutoConfig.for_model(family, **settings_of[family])
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    theirs.save_pretrained(tmp_path)
    TOKENIZER.save(tmp_path)
    ours = lw.load(tmp_path)
    ids = random_ids(ours.config, 2, 12)
    with torch.inference_mode():
        expected = theirs(ids, output_attentions=True, output_hidden_states=True)
        with ours.record("attn.weights", "resid.pre", "norm") as rec:
            ours.decoder(ids)
    for layer in range(3):
        torch.testing.assert_close(
            rec[f"layers.{layer}.attn.weights"], expected.attentions[layer], atol=1e-5, rtol=1e-4
        )
        stream = rec[f"layers.{layer}.resid.pre"]
        torch.testing.assert_close(stream, expected.hidden_states[layer], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rec["norm"], expected.hidden_states[3], atol=1e-4, rtol=1e-4)


# ---- other weights


@pytest.mark.parametrize(
    "features", [{}, {"positions": "alibi"}, {"attn_softcap": 2.0}, {"attn_sinks": True}, {"window": 5}]
)
def test_bf16(features: dict[str, Any]) -> None:
    """The kernels round in their own places; weights must still give what they gave."""
    config = Config(vocab_size=40, d_model=64, n_heads=4, n_kv_heads=2, n_layers=2, max_seq_len=64, **features)
    decoder = random_decoder(config, std=0.3).bfloat16()
    ids = random_ids(config, 2, 40)
    cache = KVCache(config, 2, 40, dtype=torch.int8)
    with torch.inference_mode(), record(decoder, "attn.weights", "resid.post") as rec:
        decoder(ids)
        decoder(ids[:, :30], cache)
        for i in range(30, 40):
            decoder(ids[:, i : i + 1], cache)
    assert rec["layers.1.resid.post"].dtype == torch.float32
    decoder.train()  # where bf16 takes batched products
    with record(decoder, "attn.weights") as rec:
        decoder(ids).sum().backward()
    assert not rec["layers.0.attn.weights"].requires_grad


@pytest.mark.skipif(not native.available(), reason="packed weights take a C++ compiler")
def test_packed_and_adapted_models() -> None:
    model = make_model(d_ff=64)
    packed = with_packed_weights(model.decoder, "q8")
    ids = random_ids(model.config, 1, 20)
    adapt(model.decoder, ["qkv", "o"], 2, 2.0, 0.0)
    for decoder in (packed, model.decoder):
        with torch.inference_mode():
            plain = decoder(ids)
            with record(decoder, "*") as rec:
                assert torch.equal(decoder(ids), plain)
        assert rec.nbytes == rec.bytes(20)


# ---- what can go wrong


def test_nothing_is_left_behind() -> None:
    model = make_model()
    with pytest.raises(RuntimeError, match="mine"):
        with model.record("*"):
            assert hooks(model.decoder)
            raise RuntimeError("mine")
    with pytest.raises(UserError):
        with model.record("*", "nothing"):
            pass
    assert hooks(model.decoder) == 0
    assert not any(isinstance(module, nn.Identity) and module.state_dict() for module in model.decoder.modules())


def test_the_memory_is_known_before() -> None:
    """L · H · T² weights, L · T · D of the stream, 4 bytes each: 2 · 4 · 30² and 2 · 30 · 32 numbers."""
    model = make_model()
    computed: list[int] = []
    model.decoder.blocks[0].ff.register_forward_hook(lambda module, args, output: computed.append(1))
    with model.record("attn.weights", "resid.post", limit_bytes=80_000) as rec:
        assert rec.bytes(30) == 4 * (2 * 4 * 30 * 30 + 2 * 30 * 32) == 36_480
        assert rec.bytes(30, batch=2) == 2 * rec.bytes(30)
        model.decoder(random_ids(model.config, 2, 30))
        assert rec.nbytes == 72_960
        with pytest.raises(UserError, match=r"30 tokens at 4 places takes 0.0 MiB beside .* limit_bytes"):
            model.decoder(random_ids(model.config, 1, 30))
    assert len(computed) == 1


def test_questions_without_an_answer() -> None:
    model = make_model()
    with model.record("resid.post", "layers.0.attn.q") as rec:
        with pytest.raises(UserError, match="nothing was read while layers.0.attn.q was recorded"):
            rec["layers.0.attn.q"]
        model.decoder(random_ids(model.config, 1, 4))
    with pytest.raises(UserError, match=r"'layers.0.resid.pst' was not recorded: did you mean layers.0.resid.post"):
        rec["layers.0.resid.pst"]
    with pytest.raises(UserError, match="'resid.pre' was not recorded of any layer"):
        rec.stack("resid.pre")


def test_several_prompts_at_once_are_refused() -> None:
    model = make_model()
    with model.record("resid.post"):
        with pytest.raises(UserError, match="one prompt at a time"):
            model.generate(["The", "The quick"], max_tokens=2)


def test_rows_of_unequal_length_are_there_by_pass() -> None:
    model = make_model()
    ids, cache = random_ids(model.config, 2, 6), KVCache(model.config, 2, 12)
    with torch.inference_mode(), model.record("attn.weights") as rec:
        model.decoder(ids, cache, [6, 3])
        model.decoder(ids[:, :1], cache)
    first, second = rec.passes("layers.0.attn.weights")
    assert first.shape == (2, 4, 6, 6) and second.shape == (2, 4, 1, 7)
    assert not second[1, :, :, 4:].any() and bool((second[0] > 0).all())  # the shorter row sees 4 places
    with pytest.raises(UserError, match="rows of unequal length"):
        rec["layers.0.attn.weights"]


def test_weights_that_would_not_be_the_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from leftward.model import attention

    model = make_model()
    kernel = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *args, **kwargs: kernel(*args, **kwargs) * 1.01)
    with model.record("layers.1.attn.weights"):
        with pytest.raises(UserError, match=r"layers\.1\.attn\.weights: weights · v and what the kernel made"):
            model.decoder(random_ids(model.config, 1, 8))


def test_copies_are_tensors_like_any_other() -> None:
    model = make_model()
    with model.record("resid.post") as rec:
        model.score(TEXT)  # in inference mode
    scale = torch.ones(32, requires_grad=True)
    (rec["layers.0.resid.post"] * scale).sum().backward()
    assert isinstance(scale.grad, Tensor)
