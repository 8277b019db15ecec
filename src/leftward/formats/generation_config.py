"""generation_config.json: how its authors want a model to write, as far as we have a setting for it. Which values are
right is for `Sampling` to say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leftward.errors import UserError

# key → field of Sampling
_FIELDS = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "bad_words_ids": "bad_words",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
_ASSUMED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0}
"""What transformers assumes for a key that is absent or null, where do_sample is true."""
_OF_A_DRAW = ("temperature", "top_k", "top_p", "min_p", "typical_p")


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Sampling` for `Sampling.of`, as transformers reads the file; {} where it says nothing.

    do_sample true: what the file leaves out is transformers' default and not ours, since that is what its numbers were
    chosen with. false: greedy, whatever the rest says. Absent: transformers would be greedy, and warn that numbers are
    given for nothing; here, as in vLLM, they count. Beams, n-grams, biases of several tokens and the like have no field
    here: ignored.

    Raises:
        UserError: do_sample is neither true nor false.
    """
    do_sample = generation.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise UserError(f"do_sample is {do_sample!r}: it must be true or false")
    said = {field: generation[key] for key, field in _FIELDS.items() if generation.get(key) is not None}
    if isinstance(words := said.get("bad_words"), list):  # as transformers: none of them is the end of a text
        ends = generation.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        said["bad_words"] = [word for word in words if word not in [[end] for end in ends]]
    if (bias := _bias_of_tokens(generation.get("sequence_bias"))) is not None:
        said["logit_bias"] = bias
    if do_sample is False:
        return {name: value for name, value in said.items() if name not in _OF_A_DRAW} | {"temperature": 0.0}
    return {**_ASSUMED, **said} if do_sample else said


def _bias_of_tokens(said: Any) -> dict[Any, Any] | None:
    """What sequence_bias, [[ids, bias], …], says where each of its sequences is one token."""
    try:
        pairs = [(ids, bias) for ids, bias in said]
        return {token_id: bias for (token_id,), bias in pairs}
    except (TypeError, ValueError):
        return None
