"""Contrastive decoding (Li et al. 2022, arXiv 2210.15097): what a model likes more than a smaller one does, which has
more of the habits that are not wanted: repetition, platitudes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from leftward.errors import UserError
from leftward.generation.program import Reader
from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder

_MOST_CACHES = 64  # of sequences that the amateur has read: more at once are read anew for each token


class Contrastive:
    """A `Sampler`: log p_expert − log p_amateur, among tokens at least `alpha` times as likely as the expert's
    likeliest. The expert is the model that generates.

    Args:
        amateur: in evaluation mode.
        alpha: from 0, where every token may win, to 1, where only the expert's likeliest is left.
        amateur_temperature: divides its logits; below 1 it is surer of itself.

    Raises:
        UserError: a number out of range. When generating: the vocabularies differ, or the text is longer than the
            amateur's context.
    """

    def __init__(self, amateur: Decoder, *, alpha: float = 0.1, amateur_temperature: float = 1.0) -> None:
        if not 0 < alpha <= 1:
            raise UserError(f"alpha is {alpha!r}: it must be above 0 and at most 1")
        if not 0 < amateur_temperature < math.inf:
            raise UserError(f"amateur_temperature is {amateur_temperature!r}: it must be above 0")
        self.amateur, self.alpha, self.amateur_temperature = amateur, alpha, amateur_temperature
        self._reader: Reader | None = None  # of the amateur as it was when a text began
        self._caches: dict[tuple[int, ...], KVCache] = {}

    def __call__(self, logits: Tensor, ids: Sequence[int], /) -> Tensor:
        config = self.amateur.config
        if config.vocab_size != len(logits):
            raise UserError(f"the amateur has a vocabulary of {config.vocab_size}, the model one of {len(logits)}")
        if len(ids) > config.max_seq_len:
            raise UserError(
                f"prompt and output have {len(ids)} tokens, more than the amateur's context of {config.max_seq_len}"
            )
        expert = logits.log_softmax(dim=0)
        amateur = (self._logits(tuple(ids)).to(logits.device) / self.amateur_temperature).log_softmax(dim=0)
        implausible = expert < expert.amax() + math.log(self.alpha)
        return (expert - amateur).masked_fill(implausible, -torch.inf)

    @torch.inference_mode()
    def _logits(self, ids: tuple[int, ...]) -> Tensor:
        """The amateur's, [V] in fp32, with the cache of the sequence that was one token shorter, if there is one."""
        amateur = self.amateur
        cache, new = self._caches.pop(ids[:-1], None), ids[-1:]
        if cache is None or self._reader is None:
            self._reader = Reader(amateur)
            capacity = min(len(ids) + 256, amateur.config.max_seq_len)
            cache, new = KVCache(amateur.config, 1, capacity, amateur.kv_dtype, amateur.device, rewindable=0), ids
        elif len(ids) > cache.capacity:
            cache.grow(min(2 * cache.capacity, amateur.config.max_seq_len))
        hidden = self._reader.hidden([new], [cache])
        self._caches[ids] = cache
        if len(self._caches) > _MOST_CACHES:
            del self._caches[next(iter(self._caches))]
        return self._reader.logits(hidden[-1:])[0].float()
