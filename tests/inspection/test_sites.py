"""Names of what can be looked at: the same for all architectures, and a clear word where there is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from leftward import Config
from leftward.errors import UserError
from leftward.inspection.sites import find, sites
from leftward.model.decoder import Decoder
from random_models import configs, random_decoder

EVERYWHERE = (
    *("resid.pre", "attn.in", "attn.q", "attn.k", "attn.v", "attn.scores", "attn.weights", "attn.heads", "attn.out"),
    *("ff.in", "ff.out", "resid.post"),
)


@given(configs())
@settings(max_examples=30)
def test_names_are_the_same_for_all_architectures(config: Config) -> None:
    names = list(sites(Decoder(config)))
    assert names[0] == "embed" and names[-2:] == ["norm", "logits"]
    for layer in range(config.n_layers):
        own = [name.removeprefix(f"layers.{layer}.") for name in names if name.startswith(f"layers.{layer}.")]
        absent = {"resid.mid"} if config.block.startswith("parallel") else set()
        some = {"ff.router"} if config.n_experts else {"ff.hidden"}
        assert set(own) == {*EVERYWHERE, "resid.mid"} - absent | some


SMALL = random_decoder(Config(vocab_size=9, d_model=8, n_heads=2, n_layers=12))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layers.3.attn.q", ["layers.3.attn.q"]),
        ("resid.post", [f"layers.{i}.resid.post" for i in range(12)]),
        ("layers.1*.ff.out", ["layers.1.ff.out", "layers.10.ff.out", "layers.11.ff.out"]),
        ("norm", ["norm"]),
        ("layers.0.attn.[qk]", ["layers.0.attn.q", "layers.0.attn.k"]),
    ],
)
def test_patterns(pattern: str, names: list[str]) -> None:
    assert [site.name for site in find(SMALL, [pattern])] == names


def test_all_of_them_once_in_the_order_of_a_pass() -> None:
    found = [site.name for site in find(SMALL, ["resid.post", "*", "layers.0.resid.post"])]
    assert found == list(sites(SMALL))
    layer = [name.removeprefix("layers.5.") for name in found if name.startswith("layers.5.")]
    assert layer[0] == "resid.pre" and layer[-1] == "resid.post"
    assert layer.index("attn.out") < layer.index("resid.mid") < layer.index("ff.in") < layer.index("ff.hidden")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("attn.weigths", "there is nothing called 'attn.weigths' to look at: did you mean attn.weights"),
        ("layers.3.atn.q", r"did you mean layers\.3\.attn\.q"),
        ("layers.12.attn.q", r"there is no layers\.12\.attn\.q: the model has layers 0 to 11"),
        ("ff.router", "this model has no ff.router: it has no experts"),
        ("layers.2.ff.router", "this model has no ff.router"),
        ("zzz", "valid: .*attn.heads.*embed"),
    ],
)
def test_a_wrong_name_names_the_nearest(pattern: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find(SMALL, [pattern])


def test_what_an_architecture_lacks_is_said() -> None:
    parallel = random_decoder(Config(vocab_size=9, d_model=8, n_heads=2, n_layers=1, block="parallel", n_experts=2))
    with pytest.raises(UserError, match=r"no resid\.mid: a block whose sublayers work side by side"):
        find(parallel, ["resid.mid"])
    with pytest.raises(UserError, match=r"no ff\.hidden: its feed-forwards are experts"):
        find(parallel, ["layers.0.ff.hidden"])
