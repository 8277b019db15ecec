"""A Decoder that says what kind of text it has read: a linear layer on the hidden state of each row's last token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leftward.model.decoder import Decoder


class Classifier(nn.Module):
    """`decoder` is kept, not copied, and trains along; freeze its parameters to train the new head alone.

    Radford et al. 2018 (GPT-1), section 3.2. The new head starts at zero: every class is equally likely.
    """

    def __init__(self, decoder: Decoder, n_classes: int) -> None:
        super().__init__()
        self.decoder = decoder
        kind = {"device": decoder.device, "dtype": decoder.dtype}
        self.class_head = nn.Linear(decoder.config.d_model, n_classes, bias=False, **kind)
        nn.init.zeros_(self.class_head.weight)

    def forward(self, ids: Tensor, lengths: list[int] | None = None) -> Tensor:
        """Logits [B, n_classes] of `ids` [B, T], of which `lengths[row]` are real and the rest is padding."""
        return self.class_head(last_hidden(self.decoder, ids, lengths))


def last_hidden(decoder: Decoder, ids: Tensor, lengths: list[int] | None = None) -> Tensor:
    """What the head reads at each row's last real token: [B, T] → [B, D]."""
    lengths = [ids.shape[1]] * len(ids) if lengths is None else lengths
    if len(lengths) != len(ids) or min(lengths) < 1:
        raise ValueError(f"{len(ids)} rows of {lengths} tokens: each needs at least one to be read")
    last = torch.tensor(lengths, device=ids.device) - 1
    return decoder.hidden(ids, lengths=lengths)[torch.arange(len(ids), device=ids.device), last]
