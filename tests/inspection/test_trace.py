"""The trace and its parts: real numbers, in a container that survives anything that comes out of a file."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import leftward as lw
from leftward.errors import UserError
from leftward.inspection.part import Part
from leftward.inspection.parts import PARTS, ask, known
from leftward.inspection.readable import pieces, readable
from leftward.inspection.reading import Cancelled, Reading
from leftward.inspection.subject import Subject
from leftward.inspection.trace import Trace
from leftward.language_model import LanguageModel
from leftward.text.tokenizer import Tokenizer
from random_models import configs, random_decoder

TEXT = "the cat sat on the mat and the dog sat on the log. "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT * 20], kind="char", special_tokens=["<|end|>"])


def model_of(tokenizer: Tokenizer, **fields: Any) -> LanguageModel:
    settled: dict[str, Any] = {"n_layers": 3, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 64}
    config = lw.Config(vocab_size=tokenizer.vocab_size, **(settled | fields))
    return LanguageModel(random_decoder(config), tokenizer)


@pytest.fixture(scope="module")
def trace(tokenizer: Tokenizer) -> Trace:
    return lw.trace(model_of(tokenizer), "the cat s", max_tokens=20, seed=1, temperature=1.0)


def subject_of(trace: Trace) -> Subject:
    assert trace.subject is not None
    return trace.subject


def anything(name: str) -> dict[str, Any]:
    """Parameters with which a part can be asked for."""
    values = {
        "layer": 1,
        "head": 2,
        "position": 3,
        "query": 4,
        "start": 0,
        "pin": -1,
        "token": -1,
        "site": "attn_norm",
        "mask": "none",
        "size": 4,
        "name": "gpt2",
    }
    return {key: values[key] for key in PARTS[name].takes}


# ---- the container


def test_a_part_survives_its_bytes(trace: Trace) -> None:
    for name in PARTS:
        part = trace.part(name, **anything(name))
        again = Part.from_bytes(part.to_bytes())
        assert (again.name, again.params, again.key) == (part.name, part.params, part.key)
        assert set(again.arrays) == set(part.arrays)
        for key, array in part.arrays.items():
            np.testing.assert_array_equal(again.arrays[key], array)
            assert again.arrays[key].dtype.str in ("<f4", "|u1", "<i4")


def test_the_bytes_are_as_documented() -> None:
    content = Part("x", {"layer": 1}, {"a": math.inf}, {"w": np.array([[1.5, -2.0]])}).to_bytes()
    size = int.from_bytes(content[4:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert content[:4] == b"LWP1" and size % 4 == 0
    assert header == {
        "version": 1,
        "name": "x",
        "params": {"layer": 1},
        "data": {"a": None},
        "arrays": [{"name": "w", "dtype": "f32", "shape": [1, 2], "offset": 0}],
    }
    assert content[8 + size :] == np.array([1.5, -2.0], "<f4").tobytes()


def test_a_newer_version_is_refused() -> None:
    content = Part("x").to_bytes().replace(b'"version":1', b'"version":2')
    with pytest.raises(UserError, match="update leftward"):
        Part.from_bytes(content)


@settings(max_examples=200)
@given(st.data())
def test_damaged_parts_are_errors_of_one_line(data: st.DataObject) -> None:
    content = bytearray(Part("x", {"a": 1}, {"b": [1, "é"]}, {"w": np.zeros((3, 2))}).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    try:
        Part.from_bytes(bytes(content[:cut]))
    except UserError as error:
        assert "\n" not in str(error)


def test_a_saved_trace_answers_what_it_was_saved_with(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "a.lwtrace")
    again = Trace.load(tmp_path / "a.lwtrace")
    for name in ("about", "losses", "thumbnails"):
        assert again.part(name).to_bytes() == trace.part(name).to_bytes()
    asked = {"layer": 2, "head": 3}
    wanted = trace.part("attention", **asked).arrays["weights"]
    np.testing.assert_array_equal(again.part("attention", **asked).arrays["weights"], wanted)
    with pytest.raises(UserError, match="not in this trace"):
        again.part("experiment", mask="window", size=2, layer=2, head=2)
    again.save(tmp_path / "b.lwtrace")
    assert (tmp_path / "b.lwtrace").read_bytes() == (tmp_path / "a.lwtrace").read_bytes()


def test_damaged_files_are_errors_of_one_line(trace: Trace, tmp_path: Path) -> None:
    path, draw = tmp_path / "a.lwtrace", random.Random(1)
    trace.save(path, [("about", {}), ("losses", {})])
    content = path.read_bytes()
    for _ in range(60):
        broken = bytearray(content[: draw.randrange(len(content) + 1)])
        for _ in range(draw.randrange(4)):
            if broken:
                broken[draw.randrange(len(broken))] = draw.randrange(256)
        path.write_bytes(broken)
        try:
            Trace.load(path)
        except UserError as error:
            assert "\n" not in str(error)
    with pytest.raises(UserError, match="cannot read"):
        Trace.load(tmp_path / "absent.lwtrace")


def container(header: bytes, body: bytes = b"") -> bytes:
    return b"LWP1" + len(header).to_bytes(4, "little") + header + body


def header_of(**fields: Any) -> bytes:
    array = {"name": "w", "dtype": "f32", "shape": [2], "offset": 0}
    array |= {key: fields.pop(key) for key in tuple(fields) if key in array}
    whole = {"version": 1, "name": "about", "params": {}, "data": {}, "arrays": [array]}
    return json.dumps(whole | fields).encode()


@pytest.mark.parametrize(
    "header",
    [
        *(header_of(shape=shape) for shape in ([2**62, 2**62], [0, 2**62, 2**62], [0, 2**70], [0] * 9, [-1], [True])),
        *(header_of(offset=offset) for offset in (1 << 80, -1, 4, None)),
        *(header_of(dtype=dtype) for dtype in ([], {}, "f64", None)),
        *(header_of(data=data) for data in ({"a": "\ud800"}, {"\udfff": 1}, [])),
        *(b'{"a":' * depth + b"1" + b"}" * depth for depth in (100, 900, 100_000)),
        *(header_of(params=params) for params in ({"layer": float("nan")}, {"layer": [1]}, [])),
        header_of(arrays=[[]]),
        b'{"version":' + b"9" * 6000 + b"}",
    ],
)
def test_hostile_headers_are_errors_of_one_line(header: bytes) -> None:
    with pytest.raises(UserError) as error:
        Part.from_bytes(container(header, bytes(8)))
    assert "\n" not in str(error.value) and len(str(error.value)) < 250


def test_what_is_read_can_be_written(tmp_path: Path) -> None:
    """A file whose beginning says less than a page needs is refused as it is read, not as it is shown."""
    path = tmp_path / "a.lwtrace"
    for data in ({}, {"name": 1, "tokens": [], "prompt": ""}, {"name": "a", "tokens": [5], "prompt": ""}):
        content = Part("about", {}, data).to_bytes()
        index = json.dumps({"version": 1, "parts": [[0, len(content)]]}).encode()
        path.write_bytes(b"LWT1" + len(index).to_bytes(4, "little") + index + content)
        with pytest.raises(UserError, match=r"a\.lwtrace: this is no trace, or a damaged one: about lacks config"):
            Trace.load(path)


# ---- questions


def test_wrong_questions_name_what_is_right(trace: Trace) -> None:
    with pytest.raises(UserError, match="did you mean attention"):
        trace.part("atention")
    with pytest.raises(UserError, match="layer is 3: it must be a whole number from 0 to 2"):
        trace.part("attention", layer=3, head=0)
    with pytest.raises(UserError, match="needs layer, head"):
        trace.part("attention")
    with pytest.raises(UserError, match="takes no 'heat'"):
        trace.part("attention", layer=0, heat=0)
    with pytest.raises(UserError, match="mask is 'window2'"):
        trace.part("experiment", mask="window2", size=1, layer=0, head=0)


def test_wrong_prompts_and_settings(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer)
    with pytest.raises(UserError, match="max_tokens"):
        lw.trace(model, "the", max_tokens=-1)
    with pytest.raises(UserError, match="token id 999"):
        lw.trace(model, [999])
    with pytest.raises(UserError, match="more than the 4"):
        lw.trace(model, "the cat", most_tokens=4)
    with pytest.raises(UserError, match="one text"):
        lw.trace(model, "the", n=2)
    filled = subject_of(lw.trace(model, "the", most_tokens=6, max_tokens=20))
    assert len(filled.ids) <= 6 and filled.sampling.max_tokens == 20  # as asked: a page asks the same of another text
    assert len(subject_of(lw.trace(model, "the", max_tokens=0)).events) == 0


def test_whoever_is_gone_is_not_computed_for(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer)
    with pytest.raises(Cancelled):
        lw.trace(model, "the", cancelled=lambda: True)
    asked = []
    with pytest.raises(Cancelled):
        Reading(model.decoder, [1, 2, 3], lambda: bool(asked.append(1)) or len(asked) > 1)
    assert len(asked) == 2  # the third block was not asked for
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.decoder.modules())


# ---- readable tokens


def test_pieces_join_to_the_text_and_show_what_is_invisible(tokenizer: Tokenizer) -> None:
    trained = Tokenizer.train(["a b\n" * 50], vocab_size=258)
    ids = trained.encode("é 🙂\na", add_bos=True)
    found = pieces(trained, ids)
    assert "".join(piece["text"] for piece in found) == "é 🙂\na"
    assert found[0]["control"] and found[0]["label"] == "<|endoftext|>"
    assert not any("\ufffd" in piece["label"] for piece in found)
    labels = [piece["label"] for piece in found]
    assert labels[1:3] == ["é 1/2", "é 2/2"] and "🙂 4/4" in "".join(labels)
    grouped = [piece["group"] for piece in found]
    assert grouped[1] == grouped[2] == 1
    assert [piece["id"] for piece in found] == ids


def test_readable() -> None:
    assert readable("a b\n\t\u200b") == "a␣b⏎⇥\\u200b"


# ---- numbers


@settings(max_examples=40)
@given(configs(), st.integers(0, 10))
def test_weights_and_losses_are_the_models(config: lw.Config, seed: int) -> None:
    decoder = random_decoder(config, seed)
    ids = torch.randint(config.vocab_size, (17,), generator=torch.Generator().manual_seed(seed)).tolist()
    reading = Reading(decoder, ids)
    with torch.inference_mode():
        logits = decoder(torch.tensor([ids]))[0]
    torch.testing.assert_close(reading.logits(slice(None)), logits.float(), rtol=0, atol=0)
    for layer in range(config.n_layers):
        attended = reading.layers[layer].attended
        heads = []
        for head in range(config.n_heads):
            stages = reading.stages(layer, head)
            assert not stages.weights[~stages.visible].any()
            rows = stages.weights.sum(dim=-1)
            assert (rows <= 1 + 1e-4).all() and (config.attn_sinks or (rows >= 1 - 1e-4).all())
            part = reading.stages(layer, head, [3, 11])
            torch.testing.assert_close(part.weights, stages.weights[[3, 11]], rtol=1e-4, atol=1e-5)
            heads.append(stages.weights @ attended.v[0, head * config.n_kv_heads // config.n_heads])
        torch.testing.assert_close(torch.stack(heads), attended.mixed[0].float(), rtol=1e-3, atol=1e-4)


@settings(max_examples=25)
@given(configs(n_layers=2, vocab_size=40))
def test_every_part_can_be_asked_of_every_architecture(config: lw.Config) -> None:
    subject = Subject(
        *(LanguageModel(random_decoder(config), _numbers()), "random", 5, lw.Sampling(), [], list(range(9)))
    )
    for name in PARTS:
        params = anything(name) | ({"head": 0} if "head" in PARTS[name].takes else {})
        part = ask(subject, name, params)
        assert Part.from_bytes(part.to_bytes()).key == part.key
        about = ask(subject, "about", {})
        assert known([Part.from_bytes(each.to_bytes()) for each in (about, part)][name == "about" :])
    assert all(check["holds"] for check in ask(subject, "checks", {}).data["checks"]), subject


def _numbers() -> Tokenizer:
    """Forty characters."""
    return Tokenizer.train(["".join(map(chr, range(65, 105)))], kind="char", special_tokens=[])


def test_losses_and_perplexity_are_those_of_score(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer)
    losses = lw.trace(model, TEXT[:40], max_tokens=0).part("losses").arrays["logprob"]
    np.testing.assert_allclose(losses[:-1], model.score(TEXT[:40]).logprobs, rtol=0, atol=1e-5)
    assert np.isnan(losses[-1])


def test_processed_positions_are_29_and_390_for_10_and_20(tokenizer: Tokenizer) -> None:
    """Of the seed document: 10 + 19 with a cache, 10 + 11 + … + 29 without."""
    model = model_of(tokenizer)
    prompt = model.tokenizer.encode("the cat s", add_bos=True)
    trace = lw.trace(model, prompt, max_tokens=20, seed=1, min_tokens=20)
    steps = trace.part("generation").data["steps"]
    assert len(prompt) == 10 and len(steps) == 20
    assert (steps[-1]["processed"], steps[-1]["processed_without"]) == (29, 390)
    assert [step["kind"] for step in steps[:3]] == ["prefill", "decode", "decode"]
    # 2 (keys and values) · 3 layers · 2 heads · 8 numbers · 4 bytes a token
    assert [step["cache_bytes"] for step in steps[:2]] == [10 * 384, 11 * 384]


def test_a_generation_is_the_models_own(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer)
    trace = lw.trace(model, "the cat", max_tokens=12, seed=5)
    completion = model.complete("the cat", max_tokens=12, seed=5)
    steps = trace.part("generation").data["steps"]
    assert [step["id"] for step in steps] == list(completion.ids)
    for step in steps:
        own = {token_id: logprob for token_id, _, logprob, _ in step["top"]}
        assert own.get(step["id"], step["logprob"]) == step["logprob"]


def test_kv_bytes_of_a_llama_2_7b(trace: Trace) -> None:
    """Published: 524,288 bytes a token in 16 bits; parameters 6,738,415,616."""
    data = trace.part("preset", name="llama2-7b").data
    assert data["kv"]["bytes_per_token"] == 524_288
    assert data["parameters"]["total"] == 6_738_415_616
    of_a_layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert data["parameters_per_layer"] == of_a_layer


def test_entropies_of_the_seed() -> None:
    """H([.22, .26, .37, .15]) = 1.9271 bits, H([.52, .48]) = 0.9988, as the seed document says."""
    from leftward.inspection.parts.attention import row_entropy

    assert float(row_entropy(torch.tensor([0.22, 0.26, 0.37, 0.15]))) == pytest.approx(1.9271, abs=5e-5)
    assert float(row_entropy(torch.tensor([0.52, 0.48]))) == pytest.approx(0.9988, abs=5e-5)


def test_a_rows_maximum_is_log2_of_what_it_sees(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer, window=4, attention_pattern="LG")
    trace = lw.trace(model, "the cat sat", max_tokens=0)
    n = len(subject_of(trace).ids)
    local = trace.part("attention", layer=0, head=0).arrays["maximum"]
    everything = trace.part("attention", layer=1, head=0).arrays["maximum"]
    np.testing.assert_allclose(local, [math.log2(min(i + 1, 4)) for i in range(n)], atol=1e-6)
    np.testing.assert_allclose(everything, [math.log2(i + 1) for i in range(n)], atol=1e-6)


def test_which_masks_leak(trace: Trace) -> None:
    """The model's own mask and a window let nothing through; none, and a prefix within itself, do."""
    n = len(subject_of(trace).ids)
    for mask, size, changed, leaks in (
        ("causal", n, n - 1, []),
        ("window", 3, n - 1, []),
        ("prefix", 6, 5, [0, 1, 2, 3, 4]),
        ("none", n, n - 1, list(range(n - 1))),
    ):
        data = trace.part("experiment", mask=mask, size=size, layer=0, head=0).data
        assert (data["changed"], data["leaks"]) == (changed, leaks), mask
    own = trace.part("experiment", mask="causal", size=n, layer=0, head=0)
    assert own.data["most"] == 0 and not own.arrays["moved"].any()


def test_layer_norm_of_the_seeds_numbers(tokenizer: Tokenizer) -> None:
    """x = [4, −6, 1.5, 10.5, −2.5, 8, −4.5, 2]: what a norm of width 8 makes of it, as the seed document says."""
    x = [4, -6, 1.5, 10.5, -2.5, 8, -4.5, 2]
    for norm, wanted in (
        ("layernorm", [0.44, -1.40, -0.02, 1.63, -0.76, 1.17, -1.12, 0.07]),
        ("rmsnorm", [0.703, -1.054, 0.264, 1.845, -0.439, 1.406, -0.791, 0.351]),
    ):
        fields = {"d_model": 8, "n_heads": 2, "n_kv_heads": 2, "n_layers": 1, "norm": norm, "norm_eps": 1e-5}
        model = model_of(tokenizer, **fields)
        with torch.no_grad():
            model.decoder.embed.weight[:] = torch.tensor(x)
            for name, parameter in model.decoder.named_parameters():
                if "attn_norm" in name:
                    parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        trace = lw.trace(model, "the", max_tokens=0)
        part = trace.part("activations", layer=0, site="attn_norm", position=1)
        np.testing.assert_allclose(part.arrays["before"], x)
        np.testing.assert_allclose(part.arrays["behind"], wanted, atol=0.0051 if norm == "layernorm" else 0.00051)
        stream = trace.part("stream").arrays
        means = [stream[name][0, 1] for name in ("mean", "std", "rms")]
        np.testing.assert_allclose(means, [1.625, 5.4529, 5.6899], atol=5e-5)


def test_the_last_lens_is_the_output(trace: Trace) -> None:
    lens = trace.part("lens", start=0, pin=-1).arrays
    losses = trace.part("losses").arrays
    np.testing.assert_array_equal(lens["top_ids"][-1], losses["top_ids"][:12])
    np.testing.assert_allclose(lens["logprob"][-1], losses["logprob"][:12], rtol=0, atol=1e-6)
    pinned = trace.part("lens", start=0, pin=7).arrays
    logits = torch.tensor(trace.part("next", position=4).arrays["logits"])
    assert pinned["logprob"][-1, 4] == pytest.approx(float(logits.log_softmax(dim=0)[7]), abs=1e-5)


def test_attribution_sums_to_the_logit(trace: Trace) -> None:
    data = trace.part("attribution", position=5, token=3).data
    wanted = float(trace.part("next", position=5).arrays["logits"][3])
    assert data["logit"] == pytest.approx(wanted, abs=1e-4)
    assert sum(value for _, value in data["parts"]) == pytest.approx(wanted, abs=1e-3)


def test_long_texts_are_pictures_and_rows(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer, max_seq_len=700)
    trace = lw.trace(model, (TEXT * 14)[:600], max_tokens=0)
    part = trace.part("attention", layer=1, head=1)
    assert part.arrays["map"].shape == (512, 512) and "weights" not in part.arrays
    row = trace.part("attention_row", layer=1, head=1, query=599)
    assert row.arrays["weights"].sum() == pytest.approx(1, abs=1e-4)
    assert round(255 * float(row.arrays["weights"].max())) <= int(part.arrays["map"][-1].max())


def test_a_runs_losses_are_shown(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [{"step": 1, "tokens": 10, "loss": 3.5}, {"step": 2, "tokens": 20, "val_loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"half')
    trace = lw.trace(model_of(tokenizer), "the", max_tokens=0, directory=tmp_path)
    arrays = trace.part("variants").arrays
    np.testing.assert_allclose(arrays["history.loss"], [[10, 3.5]])
    np.testing.assert_allclose(arrays["history.val_loss"], [[20, 3.0]])


def test_a_notebook_shows_it(trace: Trace) -> None:
    shown = trace._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "data-part=&quot;about&quot;" in shown
