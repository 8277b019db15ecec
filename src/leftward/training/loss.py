"""Next-token cross-entropy, always as a sum beside its count of targets.

A mean of means over micro-batches, evaluation batches or ranks with unequal counts is wrong; sums add up right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from leftward.data.batches import IGNORED, Split, evaluation_batches
from leftward.model.decoder import Decoder

_EVALUATION_TOKENS = 8192  # in memory at a time at most, and
_EVALUATION_LOGITS = 1 << 25  # as many logits


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum, in nats and fp32, of −ln p(target) over the targets that are not `IGNORED`.

    Args:
        logits: [B, T, V]
        targets: [B, T]
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class Evaluation:
    """The loss over a whole split."""

    nats: float
    """Summed over all targets."""
    tokens: int
    bytes: int
    """Of text that the targets spell."""

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers."""
        return bits_per_byte(self.nats, self.bytes)


def bits_per_byte(nats: float, text_bytes: int) -> float:
    """The loss of a text as bits for each of its bytes of UTF-8."""
    return nats / math.log(2) / text_bytes


def evaluate(
    decoder: Decoder, split: Split, seq_len: int, device: torch.device, stop: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """The loss of every token of `split` but its first, each predicted once, in windows of seq_len.

    Returns None where `stop` asked to end early.
    """
    tokens_at_once = min(_EVALUATION_TOKENS, _EVALUATION_LOGITS // decoder.config.vocab_size)
    was_training = decoder.training
    decoder.eval()
    nats, tokens = 0.0, 0
    try:
        with torch.inference_mode():
            for inputs, targets in evaluation_batches(split, seq_len, max(1, tokens_at_once // seq_len)):
                if stop():
                    return None
                logits = decoder(torch.from_numpy(inputs).to(device))
                nats += loss_sum(logits, torch.from_numpy(targets).to(device)).item()
                tokens += int((targets != IGNORED).sum())
    finally:
        decoder.train(was_training)
    return Evaluation(nats, tokens, split.bytes)
