"""Attribution: the parts sum to the logit, and each is what its part of the model adds."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leftward import Config
from leftward.errors import UserError
from leftward.formats.packing import with_packed_weights
from leftward.inspection.attribution import attribution, logit_attribution
from leftward.kernels import native
from leftward.language_model import LanguageModel
from leftward.model.lora import adapt
from leftward.text.tokenizer import Tokenizer
from random_models import configs, random_decoder, random_ids

TEXT = "The quick brown fox jumps over the lazy dog.\n"
TOKENIZER = Tokenizer.train([TEXT * 3], kind="bpe", vocab_size=270)


def make_model(**values: Any) -> LanguageModel:
    config = Config(**{"vocab_size": 270, "max_seq_len": 64, "n_layers": 3, "d_model": 32, "n_heads": 4} | values)
    return LanguageModel(random_decoder(config, std=0.3), TOKENIZER)


@given(configs(), st.data())
@settings(max_examples=80)
def test_the_parts_sum_to_the_logit(config: Config, data: st.DataObject) -> None:
    """Of every architecture, norms behind sublayers and around them too; before the cap, which is no sum."""
    decoder = random_decoder(config)
    ids = random_ids(config, 1, data.draw(st.integers(1, 16)))
    position = data.draw(st.integers(0, ids.shape[1] - 1))
    token, other = (data.draw(st.integers(0, config.vocab_size - 1)) for _ in range(2))
    with torch.inference_mode():
        logits = decoder(ids)[0, position].double()
    if config.logit_softcap is not None:
        logits = config.logit_softcap * (logits / config.logit_softcap).atanh()
    found = attribution(decoder, ids[0].tolist(), position, token)
    largest = max(1.0, *map(abs, found.parts.values()))
    assert found.logit == pytest.approx(float(logits[token]), abs=2e-4 * largest)
    assert abs(found.rounding) < 2e-5 * largest
    two = attribution(decoder, ids[0].tolist(), position, token, against=other)
    assert two.logit == pytest.approx(float(logits[token] - logits[other]), abs=2e-4 * largest)
    assert abs(two.rounding) < 2e-5 * largest
    assert len(found.heads) == config.n_layers and len(found.heads[0]) == config.n_heads


def test_a_part_is_what_would_be_missing() -> None:
    """With the last norm's scale held fixed, the logit without a part is smaller by its share. For a part of the last
    layer, which nothing comes behind but that norm."""
    model = make_model(block="parallel", norm="layernorm", ff_bias=True, attn_out_bias=True)
    model.decoder.requires_grad_(False)
    ids = random_ids(model.config, 1, 9)
    found = attribution(model.decoder, ids[0].tolist(), 8, 17)
    norm = model.decoder.norm
    assert norm is not None
    with model.record("layers.2.resid.post") as rec:
        model.decoder(ids)
    x = rec["layers.2.resid.post"][0, 8]
    scale, mean = (x.var(correction=0) + norm.eps).sqrt(), x.mean()  # type: ignore[operator]

    def logit_of(x: torch.Tensor, mean: torch.Tensor) -> float:
        normed = (x - mean) / scale * norm.weight + norm.bias  # type: ignore[operator]
        return float(normed @ model.decoder.head.weight[17])

    whole = logit_of(x, mean)
    assert whole == pytest.approx(found.logit, abs=1e-4)
    for name, ablated, kwargs in (
        ("layers.2.attn.heads.1", "layers.2.attn.heads", {"heads": [1]}),
        ("layers.2.attn.heads.3", "layers.2.attn.heads", {"heads": [3]}),
    ):
        with model.ablate(ablated, **kwargs), model.record("layers.2.resid.post") as rec:
            model.decoder(ids)
        without = rec["layers.2.resid.post"][0, 8]
        assert whole - logit_of(without, without.mean()) == pytest.approx(found.parts[name], abs=1e-4)
    with model.ablate("layers.2.ff.out"), model.record("layers.2.resid.post") as rec:
        model.decoder(ids)
    without = rec["layers.2.resid.post"][0, 8]
    both = found.parts["layers.2.ff"] + found.parts["layers.2.ff.bias"]
    assert whole - logit_of(without, without.mean()) == pytest.approx(both, abs=1e-4)


def test_names_in_the_order_of_a_pass() -> None:
    model = make_model(
        n_layers=1, n_heads=2, positions="learned", norm="layernorm", ff_bias=True, attn_out_bias=True, head_bias=True
    )
    found = logit_attribution(model, TEXT, "The", against=3, position=2)
    assert list(found.parts) == [
        *("embed.token", "embed.position", "layers.0.attn.heads.0", "layers.0.attn.heads.1", "layers.0.attn.bias"),
        *("layers.0.ff", "layers.0.ff.bias", "norm.bias", "head.bias"),
    ]
    assert (found.position, found.against, found.token) == (2, 3, TOKENIZER.encode("The")[0])
    assert found.heads == ((found.parts["layers.0.attn.heads.0"], found.parts["layers.0.attn.heads.1"]),)
    data = json.loads(json.dumps(found.to_dict()))
    assert sum(value for _, value in data["parts"]) + data["rounding"] == pytest.approx(data["logit"])


@pytest.mark.skipif(not native.available(), reason="packed weights take a C++ compiler")
def test_packed_and_adapted_models() -> None:
    """Packed matrices round what they multiply to 8 bits, in other places for parts than for their sum."""
    model = make_model(d_ff=64)
    packed = with_packed_weights(model.decoder, "q8")
    found = attribution(packed, random_ids(model.config, 9).tolist(), -1, 5)
    assert abs(found.rounding) < 0.02 * max(map(abs, found.parts.values()))
    adapt(model.decoder, ["o", "down"], 2, 2.0, 0.0)
    with torch.no_grad():
        for name, parameter in model.decoder.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.3)
    found = attribution(model.decoder, random_ids(model.config, 9).tolist(), -1, 5)
    assert abs(found.rounding) < 1e-4


def test_what_can_go_wrong() -> None:
    model = make_model()
    with pytest.raises(UserError, match="position is 4: the text has 4 tokens"):
        logit_attribution(model, [1, 2, 3, 4], 5, position=4)
    with pytest.raises(UserError, match="token id 270 is not in the vocabulary"):
        logit_attribution(model, [1, 2, 3, 4], 270)
