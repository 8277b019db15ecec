"""How the text was written: prompt in one pass, then a token a pass, and what the cache saves and costs."""

from __future__ import annotations

from typing import Any

from leftward.generation.sampling import TokenLogprobs
from leftward.inspection.parts.about import DTYPE_NAMES, Answer
from leftward.inspection.readable import label
from leftward.inspection.subject import Subject
from leftward.planner import count_kv_cache
from leftward.text.tokenizer import Tokenizer


def generation(subject: Subject) -> Answer:
    """A step a token. `processed` are positions that went through the model up to the step, with a cache and without:
    10 tokens and 20 new ones take 10 + 19 = 29, or 10 + 11 + … + 29 = 390."""
    config, kv_dtype = subject.model.config, DTYPE_NAMES[subject.model.decoder.kv_dtype]
    steps: list[dict[str, Any]] = []
    without = 0
    written = [event for event in subject.events if event.token_id is not None]
    for i, event in enumerate(written):
        held = subject.n_prompt + i
        without += held
        assert event.token_id is not None and event.logprobs is not None
        steps.append(
            {
                "kind": "decode" if i else "prefill",
                "read": 1 if i else subject.n_prompt,
                "position": held,
                "id": event.token_id,
                "label": label(subject.model.tokenizer, event.token_id),
                "processed": held,
                "processed_without": without,
                "cache_tokens": held,
                "cache_bytes": count_kv_cache(config, held, dtype=kv_dtype).bytes,
                **_alternatives(event.logprobs, subject.model.tokenizer),
            }
        )
    data = {
        "steps": steps,
        "n_prompt": subject.n_prompt,
        "kv_dtype": kv_dtype,
        "bytes_per_token": count_kv_cache(config, 1, dtype=kv_dtype).bytes_per_token,
        "finish_reason": subject.finish_reason,
    }
    return data, {}


def _alternatives(found: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    """Log-probabilities of the token and of the likeliest ones: the model's own, and those it was drawn with."""
    ruled = dict(found.ruled_top)
    top = [[i, label(tokenizer, i), logprob, ruled.get(i)] for i, logprob in found.top]
    return {"logprob": found.logprob, "drawn_with": found.ruled_logprob, "top": top}
