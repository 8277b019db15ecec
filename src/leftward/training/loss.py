"""Next-token cross-entropy, always as a sum beside its count of targets.

A mean of means over micro-batches, evaluation batches or ranks with unequal counts is wrong; sums add up right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from leftward.data.batches import IGNORED, Batch, Split, evaluation_rows
from leftward.kernels import functions, native
from leftward.model.decoder import Decoder
from leftward.planner import head_portions
from leftward.training.parallel import ALONE, World

_EVALUATION_TOKENS = 8192  # in memory at a time at most, and
_EVALUATION_LOGITS = 1 << 25  # as many logits


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum, in nats and fp32, of −ln p(target) over the targets that are not `IGNORED`.

    Args:
        logits: [B, T, V]
        targets: [B, T]
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def head_loss(decoder: Decoder, hidden: Tensor, targets: Tensor, n_targets: int = 1) -> Tensor:
    """`loss_sum` of the logits of `hidden` over `n_targets`. The logits are not held whole where there are many: the
    loss and its gradient are taken for some positions after others, and for all of a small vocabulary at once.

    Args:
        hidden: [B, T, D], what the head reads.
        targets: [B, T]
        n_targets: of the whole batch, of which this may be a part.
    """
    learning = [parameter for parameter in decoder.head.parameters() if parameter.requires_grad]
    trains = torch.is_grad_enabled() and (hidden.requires_grad or bool(learning))
    return _HeadLoss.apply(hidden, targets, decoder, 1 / n_targets, trains, *learning)


class _HeadLoss(torch.autograd.Function):
    """The gradient is computed with the loss, while the logits are there; going backward has next to nothing to do."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, decoder: Decoder, factor: float, trains: bool, *head: Tensor
    ) -> Tensor:
        rows, wanted = hidden.detach().flatten(0, -2), targets.flatten()
        n_parts = head_portions(len(rows), decoder.config.padded_vocab_size)
        total = torch.zeros((), device=hidden.device)
        of_rows: list[Tensor] = []
        of_head: list[Tensor] = []
        for some, targets_of in zip(rows.chunk(n_parts), wanted.chunk(n_parts), strict=True):
            loss, grads = _loss_and_gradients(decoder, head, some, targets_of, factor, trains)
            total += loss
            of_rows += grads[:1]
            # One part's gradients stay as they are; of several they are summed in fp32.
            of_head = [a.float() + b for a, b in zip(of_head, grads[1:], strict=True)] if of_head else grads[1:]
        if trains:
            grads = [torch.cat(of_rows), *of_head]
            ctx.save_for_backward(*(grad.to(p.dtype) for grad, p in zip(grads, (hidden, *head), strict=True)))
        ctx.shape = hidden.shape
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, *of_head = ctx.saved_tensors
        if grad.device.type != "cpu" or grad != 1:
            of_hidden, *of_head = (part * grad.to(part.dtype) for part in (of_hidden, *of_head))
        return of_hidden.view(ctx.shape), None, None, None, None, *of_head


def _loss_and_gradients(
    decoder: Decoder, head: Sequence[Tensor], hidden: Tensor, targets: Tensor, factor: float, trains: bool
) -> tuple[Tensor, list[Tensor]]:
    """The summed loss of some rows [N, D] times `factor`, and if it `trains` its gradients in them and in `head`, the
    parameters of the decoder's head that learn."""
    config, weight = decoder.config, decoder.head.weight.detach()
    plain = config.logit_scale == 1.0 and config.logit_softcap is None and decoder.head.bias is None
    plain = plain and isinstance(decoder.head, nn.Linear)  # and no adapter beside it
    if plain and native.serves(hidden) and config.padded_vocab_size == config.vocab_size:
        logits = hidden @ weight.t()
        losses = functions.cross_entropy_and_gradient(logits, targets, factor)
        grads = [logits @ weight, *(logits.t() @ hidden for _ in head)] if trains else []
        return losses.sum() * factor, grads
    with torch.set_grad_enabled(trains):
        rows = hidden.requires_grad_(trains)
        loss = loss_sum(decoder.logits(rows)[None], targets[None]) * factor
        grads = list(torch.autograd.grad(loss, (rows, *head))) if trains else []
        return loss.detach(), grads


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

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # e^710 is no float any more


def bits_per_byte(nats: float, text_bytes: int) -> float:
    """The loss of a text as bits for each of its bytes of UTF-8."""
    return nats / math.log(2) / text_bytes


def tensors(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """inputs, targets and documents of a batch, [B, T] each, on a device."""
    inputs, targets, documents = (None if part is None else torch.from_numpy(part).to(device) for part in batch)
    assert inputs is not None and targets is not None
    return inputs, targets, documents


def evaluate(
    decoder: Decoder,
    split: Split,
    seq_len: int,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
    world: World = ALONE,
) -> Evaluation | None:
    """The loss of every token of `split` but its first, each predicted once, in windows of seq_len; where the split's
    documents are apart, from its own document alone. The ranks of `world` share the windows out.

    Returns None where `stop` asked to end early.
    """
    tokens_at_once = min(_EVALUATION_TOKENS, _EVALUATION_LOGITS // decoder.config.vocab_size)
    was_training = decoder.training
    decoder.eval()
    nats, tokens = 0.0, 0
    try:
        # FSDP keeps what it gathers here, and a step couldn't go on with tensors of inference mode.
        with torch.inference_mode() if world.size == 1 else torch.no_grad():
            for batch in world.shared(evaluation_rows(split, seq_len, max(1, tokens_at_once // seq_len))):
                if stop():
                    return None
                inputs, targets, documents = tensors(batch, device)
                targets = world.own_tokens(targets)
                nats += head_loss(decoder, decoder.hidden(inputs, documents=documents), targets).item()
                tokens += int((targets != IGNORED).sum())
            nats, counted = world.sum(nats, tokens)
    finally:
        decoder.train(was_training)
    return Evaluation(nats, round(counted), split.bytes)
