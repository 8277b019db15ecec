"""`leftward bench train`: what it measures, and on which text."""

import pytest

import leftward as lw
from leftward.data.prepare import prepare
from leftward.data.settings import Settings
from leftward.errors import UserError
from leftward.training.measuring import measure
from leftward.training.progress import Observer


class Notes(Observer):
    def __init__(self):
        self.text = ""

    def note(self, text):
        self.text += text + "\n"


@pytest.fixture
def small(recipe):
    del recipe["out"], recipe["data"], recipe["tokenizer"]
    return recipe


def test_numbers_of_random_tokens(small):
    found = measure(small, steps=2, vocab_size=300)
    assert (found.steps, found.tokens_per_step, found.dtype) == (2, 8 * 32, "fp32")
    assert found.tokens_per_second == found.tokens_per_step / found.step_seconds > 0
    assert found.mfu == pytest.approx(found.flops_per_step / found.step_seconds / found.peak_flops)
    assert 0 < found.data_seconds < found.step_seconds
    assert found.memory_bytes > 2**20


def test_a_mixture_is_what_is_trained_on(small, tmp_path):
    _, dataset = prepare(Settings(paths=(str(tmp_path / "farm.txt"),), tokenizer="char"), tmp_path / "farm", seed=1)
    notes = Notes()
    measure({**small, "data": {"mix": {str(dataset.directory): 1.0}}}, steps=1, observer=notes)
    assert f"data: {len(dataset.train):,} tokens" in notes.text


def test_a_model_that_is_begun_from_keeps_its_tokenizer(recipe, tmp_path):
    run = lw.train(recipe)
    found = measure({"init_from": str(run.directory), "training": {"dtype": "fp32"}}, steps=1)
    assert found.parameters == run.summary["params"]


@pytest.mark.parametrize("data", [3, "farm.txt"])
def test_data_that_is_no_section(small, data):
    with pytest.raises(UserError, match=f"data is {data!r}"):
        measure({**small, "data": data}, steps=1)


def test_no_steps(small):
    with pytest.raises(UserError, match="steps is 0"):
        measure(small, steps=0)
