"""Changing a pass: nothing changes where nothing is changed, and what is changed is what arithmetic says."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leftward import Config
from leftward.errors import UserError
from leftward.inspection.interventions import activation_patching, patch, remask
from leftward.inspection.record import record
from leftward.inspection.sites import find, sites
from leftward.language_model import LanguageModel
from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder
from leftward.text.tokenizer import Tokenizer
from random_models import configs, random_decoder, random_ids

TEXT = "The quick brown fox jumps over the lazy dog.\n"
TOKENIZER = Tokenizer.train([TEXT * 3], kind="bpe", vocab_size=270)


def make_model(**values: Any) -> LanguageModel:
    config = Config(**{"vocab_size": 270, "max_seq_len": 64, "n_layers": 3, "d_model": 32, "n_heads": 4} | values)
    return LanguageModel(random_decoder(config, std=0.2), TOKENIZER)


def logits(model: LanguageModel | Decoder, ids: Tensor) -> Tensor:
    decoder = model.decoder if isinstance(model, LanguageModel) else model
    with torch.inference_mode():
        result: Tensor = decoder(ids)
    return result


# ---- nothing changes where nothing is changed


@given(configs())
@settings(max_examples=40)
def test_patching_a_pass_with_itself(config: Config) -> None:
    """By a function bit for bit; with what was recorded of it, to rounding; every site, whole and cached."""
    decoder, ids = random_decoder(config), random_ids(config, 2, 14)
    plain = logits(decoder, ids)
    with torch.inference_mode(), record(decoder, "*") as rec:
        decoder(ids)
    writable = [site.name for site in find(decoder, ["*"]) if site.write is not None]
    with patch(decoder, {name: lambda x: x for name in writable}):
        assert torch.equal(logits(decoder, ids), plain)
    with torch.inference_mode(), patch(decoder, {name: rec[name] for name in writable if name != "embed"}):
        torch.testing.assert_close(decoder(ids), plain, atol=2e-5, rtol=1e-4)
        cache = KVCache(config, 2, 14, rewindable=0)
        parts = [decoder(ids[:, :9], cache), *(decoder(ids[:, i : i + 1], cache) for i in range(9, 14))]
        torch.testing.assert_close(torch.cat(parts, dim=1), plain, atol=1e-4, rtol=1e-3)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in decoder.modules())


# ---- what is changed


@given(configs(), st.data())
@settings(max_examples=30)
def test_all_heads_ablated_is_an_output_matrix_of_zeros(config: Config, data: st.DataObject) -> None:
    decoder, ids = random_decoder(config), random_ids(config, 2, 10)
    model = LanguageModel(decoder, TOKENIZER)
    layer = data.draw(st.integers(0, config.n_layers - 1))
    with model.ablate(f"layers.{layer}.attn.heads"):
        ablated = logits(decoder, ids)
    with model.ablate(f"layers.{layer}.attn.weights", heads=range(config.n_heads)):
        torch.testing.assert_close(logits(decoder, ids), ablated)
    with torch.no_grad():
        decoder.blocks[layer].attn.o.weight.zero_()  # type: ignore[union-attr, operator]
    torch.testing.assert_close(logits(decoder, ids), ablated)


def test_one_head_is_its_columns_of_the_matrix() -> None:
    model, ids = make_model(), random_ids(make_model().config, 2, 10)
    with model.ablate("layers.1.attn.heads", heads=[2]):
        ablated = logits(model, ids)
    with torch.no_grad():
        model.decoder.blocks[1].attn.o.weight[:, 16:24] = 0  # type: ignore[union-attr, index]
    torch.testing.assert_close(logits(model, ids), ablated)


def test_neurons_are_their_columns_of_the_matrix() -> None:
    model = make_model(feed_forward="gelu", d_ff=20)
    ids = random_ids(model.config, 2, 10)
    with model.ablate("ff.hidden", neurons=[3, 4]):
        ablated = logits(model, ids)
    with torch.no_grad():
        for block in model.decoder.blocks:
            block.ff.down.weight[:, 3:5] = 0  # type: ignore[union-attr, index]
    torch.testing.assert_close(logits(model, ids), ablated)


def test_a_sublayer_ablated_adds_nothing() -> None:
    model = make_model(residual_scale=0.3)
    with model.ablate("layers.1.ff.out"), model.record("resid.mid", "resid.post") as rec:
        model.decoder(random_ids(model.config, 1, 9))
    assert torch.equal(rec["layers.1.resid.mid"], rec["layers.1.resid.post"])
    assert not torch.equal(rec["layers.2.resid.mid"], rec["layers.2.resid.post"])


@pytest.mark.parametrize("positions", [4, [4, 7], slice(4, 8), slice(5, None, 2)])
def test_positions_count_over_the_whole_sequence(positions: Any) -> None:
    """The same whether they are read in one pass or behind a cache; and nothing before them changes."""
    model = make_model(window=4, attention_pattern="LG")
    ids, vector = random_ids(model.config, 1, 10), torch.randn(32, generator=torch.Generator().manual_seed(1))
    plain = logits(model, ids)
    with model.steer("layers.1.resid.post", vector, scale=2.0, positions=positions):
        whole, cache = logits(model, ids), KVCache(model.config, 1, 16)
        parts = [
            logits_of(model, ids[:, :3], cache),
            *(logits_of(model, ids[:, i : i + 1], cache) for i in range(3, 10)),
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=1e-4)
    first = min(
        range(10)[positions]
        if isinstance(positions, slice)
        else [positions]
        if isinstance(positions, int)
        else positions
    )
    assert torch.equal(whole[:, :first], plain[:, :first])
    assert not torch.allclose(whole[:, first], plain[:, first])


def logits_of(model: LanguageModel, ids: Tensor, cache: KVCache) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model.decoder(ids, cache)
    return result


def test_steering_adds() -> None:
    model, vector = make_model(), torch.arange(32.0)
    ids = random_ids(model.config, 2, 6)
    with model.record("resid.post") as before:
        model.decoder(ids)
    with model.steer("layers.1.resid.post", vector, scale=0.5), model.record("resid.post") as rec:
        model.decoder(ids)
    torch.testing.assert_close(rec["layers.1.resid.post"], before["layers.1.resid.post"] + 0.5 * vector)
    with model.record("resid.post") as rec, model.steer("layers.1.resid.post", vector):  # the recording stands outside
        model.decoder(ids)
    assert torch.equal(rec["layers.1.resid.post"], before["layers.1.resid.post"])


def test_the_mean_stays_that_of_the_beginning() -> None:
    model, cache = make_model(), KVCache(make_model().config, 1, 16)
    ids = random_ids(model.config, 1, 8)
    with model.record("attn.heads") as rec:
        model.decoder(ids[:, :5])
    mean = rec["layers.0.attn.heads"].mean(dim=(0, 1))
    with model.ablate("layers.0.attn.heads", heads=[1], to="mean"), model.record("layers.0.attn.heads") as rec:
        logits_of(model, ids[:, :5], cache)
        logits_of(model, ids[:, 5:6], cache)
    for position in range(6):
        torch.testing.assert_close(rec["layers.0.attn.heads"][0, position, 1], mean[1])
    with model.ablate("layers.0.attn.heads", to="mean"):
        with pytest.raises(UserError, match="which was read before"):
            logits_of(model, ids[:, 6:7], cache)


def test_weights_that_are_set_mix_values() -> None:
    """A head that looks only at the first token: what it mixes is that one's value."""
    model = make_model(n_kv_heads=2)

    def to_the_first(weights: Tensor) -> Tensor:
        weights = weights.clone()
        weights[:, 3] = 0
        weights[:, 3, :, 0] = 1
        return weights

    with model.patch({"layers.1.attn.weights": to_the_first}):
        with model.record("layers.1.attn.weights", "layers.1.attn.v", "layers.1.attn.heads") as rec:
            model.decoder(random_ids(model.config, 1, 7))
    assert bool((rec["layers.1.attn.weights"][0, 3, :, 0] == 1).all())
    first = rec["layers.1.attn.v"][0, 1, 0]
    torch.testing.assert_close(rec["layers.1.attn.heads"][0, :, 3], first.expand(7, -1))


def test_contexts_compose_and_generation_obeys_them() -> None:
    model = make_model()
    plain = model.generate("The quick", max_tokens=8, temperature=0)
    direction = model.decoder.head.weight[5].detach() * 500
    with model.steer("norm", direction):
        assert model.complete("The quick", max_tokens=4, temperature=0).ids == (5,) * 4
        with model.ablate("norm"):
            assert len(set(model.complete("The quick", max_tokens=4, temperature=0).ids)) == 1
    assert model.generate("The quick", max_tokens=8, temperature=0) == plain


# ---- who may look at whom


@given(configs(rope_local_base=None), st.sampled_from([{"causal": False}, {"window": 3}, {"window": 7}]))
@settings(max_examples=30)
def test_another_mask_is_that_of_another_model(config: Config, rules: dict[str, Any]) -> None:
    """A window, or no mask, as an experiment is what a Decoder of such a Config computes with the same weights."""
    decoder, ids = random_decoder(config), random_ids(config, 2, 12)
    other = Decoder(
        Config.from_dict(config.to_dict() | rules | ({"attention_pattern": "L"} if "window" in rules else {}))
    )
    other.load_state_dict(decoder.state_dict())
    with remask(decoder, **rules):
        torch.testing.assert_close(logits(decoder, ids), logits(other.eval(), ids), atol=2e-5, rtol=1e-4)


@given(configs(), st.integers(0, 12))
@settings(max_examples=30)
def test_a_prefix_is_that_of_a_prefix_lm(config: Config, prefix: int) -> None:
    decoder, ids = random_decoder(config), random_ids(config, 2, 12)
    with torch.inference_mode():
        asked = decoder(ids, prefix_lengths=[prefix] * 2)
    with remask(decoder, prefix=prefix):
        torch.testing.assert_close(logits(decoder, ids), asked, atol=2e-5, rtol=1e-4)


def test_without_a_mask_the_future_leaks() -> None:
    model = make_model()
    ids = random_ids(model.config, 1, 8)
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 270
    assert torch.equal(logits(model, ids)[:, :-1], logits(model, changed)[:, :-1])
    with model.remask(causal=False, layers=[1]):
        assert not torch.equal(logits(model, ids)[:, 0], logits(model, changed)[:, 0])
    with model.remask(window="none"):
        assert torch.equal(logits(model, ids)[:, :-1], logits(model, changed)[:, :-1])


# ---- between two texts


def test_activation_patching() -> None:
    """Before the first layer, the position at which the texts differ restores everything, and no other anything; behind
    the last one only the last position counts."""
    model = make_model()
    clean = random_ids(model.config, 9).tolist()
    corrupted = [*clean[:4], (clean[4] + 1) % 270, *clean[5:]]
    grid = activation_patching(model, clean, corrupted, metric=(7, 8))
    assert grid.values.shape == (3, 9) and grid.layers == (0, 1, 2) and len(grid.columns) == 9
    both = logits(model, torch.tensor([clean, corrupted]))[:, -1]
    assert grid.clean == pytest.approx(float(both[0, 7] - both[0, 8]), abs=1e-5)
    assert grid.corrupted == pytest.approx(float(both[1, 7] - both[1, 8]), abs=1e-5)
    expected = torch.zeros(9)
    expected[4] = 1
    torch.testing.assert_close(grid.restored[0], expected, atol=1e-3, rtol=0)
    last = activation_patching(model, clean, corrupted, "resid.post", metric=lambda row: float(row[7])).restored[2]
    torch.testing.assert_close(last, torch.tensor([0.0] * 8 + [1.0]), atol=1e-3, rtol=0)
    heads = activation_patching(model, clean, corrupted, "attn.heads", metric=(7, 8))
    assert heads.values.shape == (3, 4) and heads.columns == ("0", "1", "2", "3")
    with model.record("layers.2.attn.heads") as rec:
        model.decoder(torch.tensor([clean]))
    with model.ablate("layers.2.attn.heads", heads=[1], to=rec["layers.2.attn.heads"]):
        row = logits(model, torch.tensor([corrupted]))[0, -1]
    assert float(heads.values[2, 1]) == pytest.approx(float(row[7] - row[8]), abs=1e-4)


# ---- what can go wrong


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.ablate("layers.0.attn.scores"), r"layers\.0\.attn\.scores can't be changed.*change attn\.q and"),
        (lambda m: m.ablate("logits"), "logits can't be changed, only looked at: change norm"),
        (lambda m: m.ablate("resid.mid"), r"resid\.mid can't be changed.*attn\.out"),
        (lambda m: m.ablate("attn.out", heads=[0]), r"layers\.0\.attn\.out has no heads: attn\.heads"),
        (lambda m: m.ablate("attn.heads", heads=[4]), r"heads of layers\.0\.attn\.heads are 0 to 3, and 4 is none"),
        (lambda m: m.ablate("resid.post", neurons=[0]), r"has no neurons: ff\.hidden has"),
        (lambda m: m.ablate("attn.out", to="median"), "to is 'median'"),
        (lambda m: m.ablate("attn.weights", to="mean"), "which have no mean"),
        (lambda m: m.ablate("attn.out", positions=[-1]), r"positions are \[-1\]: .* count from the beginning"),
        (lambda m: m.steer("atn.out", torch.ones(32)), "did you mean attn.out"),
        (lambda m: m.steer("attn.out", torch.ones(31)), r"layers\.0\.attn\.out is \[1, 5, 32\], and .* \[31\]"),
        (lambda m: m.patch({"embed": torch.ones(32)}, positions=[2]), r"change layers\.0\.resid\.pre there"),
        (lambda m: m.remask(window=0), "window is 0: it must be a whole number, at least 1"),
        (lambda m: m.remask(causal=False, layers=[3]), "there is no layer 3: the model has layers 0 to 2"),
    ],
)
def test_a_mistake_is_said(change: Any, message: str) -> None:
    model = make_model()
    with pytest.raises(UserError, match=message), ExitStack() as stack:
        stack.enter_context(change(model))
        model.decoder(random_ids(model.config, 1, 5))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.decoder.modules())


def test_texts_that_cannot_be_compared() -> None:
    model = make_model()
    with pytest.raises(UserError, match="the texts have 3 and 2 tokens"):
        activation_patching(model, [1, 2, 3], [1, 2], metric=(1, 2))
    with pytest.raises(UserError, match="site is 'norm': it must be that of a layer"):
        activation_patching(model, [1, 2], [1, 2], "norm", metric=(1, 2))
    with pytest.raises(UserError, match=r"'quick fox' is \d tokens, and not one"):
        activation_patching(model, [1, 2], [1, 2], metric=("quick fox", 2))
    assert all(site.write or site.instead for site in sites(model.decoder).values())
