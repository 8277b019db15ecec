"""LoRA: a matrix stays as it is and learns a sum of few directions beside it (Hu et al. 2021, arXiv 2106.09685).

    y = W x + b + alpha / rank · B A x        A [rank, in], B [out, rank]

B starts at zero, so that an adapted model begins as the one that it adapts; in the end the sum goes into W.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leftward.errors import UserError, nearest
from leftward.model.decoder import Decoder
from leftward.model.experts import Stacked

A, B = ".lora_a", ".lora_b"
"""What the names of the adapters' two matrices end with, behind the module's."""


class Adapted(nn.Module):
    """A linear, or those of stacked experts, with its adapter. It has the weight and bias under their old names."""

    def __init__(self, linear: nn.Linear | Stacked, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        *experts, n_out, n_in = linear.weight.shape
        device = linear.weight.device  # in fp32, whatever the weight is kept in
        self.lora_a = nn.Parameter(torch.empty(*experts, rank, n_in, device=device))
        self.lora_b = nn.Parameter(torch.zeros(*experts, n_out, rank, device=device))
        self.scale, self.dropout = alpha / rank, nn.Dropout(dropout)
        nn.init.uniform_(self.lora_a, -1 / math.sqrt(n_in), 1 / math.sqrt(n_in))

    def forward(self, x: Tensor, *expert: int) -> Tensor:  # [..., in] → [..., out]
        bias = None if self.bias is None else self.bias[expert]
        added = F.linear(F.linear(self.dropout(x), self.lora_a[expert]) * self.scale, self.lora_b[expert])
        return F.linear(x, self.weight[expert], bias) + added


def adapt(decoder: Decoder, targets: Sequence[str], rank: int, alpha: float, dropout: float) -> None:
    """Give the linears that `targets` name an adapter, and freeze everything else.

    Args:
        targets: ends of the linears' names: "qkv" is the one of every layer, "shared.up" of every shared expert,
            "blocks.0.attn.o" that one.

    Raises:
        UserError: a target names no linear, or the head where that is the embedding too.
    """
    linears = {name: module for name, module in decoder.named_modules() if isinstance(module, nn.Linear | Stacked)}
    decoder.requires_grad_(False)
    for target in targets:
        named = [name for name in linears if f".{name}".endswith(f".{target}")]
        if not named:
            known = {name.rpartition(".")[2] for name in linears}
            raise UserError(f"lora.targets: no linear of the model is called {target!r}: {nearest(target, known)}")
        if "head" in named and decoder.config.tie_embeddings:
            raise UserError(
                "lora.targets: the head of this model is its embedding too, and what is added to one would be missing "
                "in the other: leave head out"
            )
        for name in named:
            if not isinstance(decoder.get_submodule(name), Adapted):  # two targets may name one
                decoder.set_submodule(name, Adapted(linears[name], rank, alpha, dropout))


def is_adapter(name: str) -> bool:
    """Whether this is the name of an adapter's weight."""
    return name.endswith((A, B))


@torch.no_grad()
def merged(weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """W + scale · B A in fp32, for the weights that have an adapter; the others in fp32.

    Args:
        weights: of the model that was adapted, by name.
        adapters: their A and B.
        scale: alpha / rank
    """
    result = {name: weight.float() for name, weight in weights.items()}
    for name in adapters:
        if name.endswith(A):
            module = name.removesuffix(A)
            a, b = (adapters[module + which].float().to(result[f"{module}.weight"].device) for which in (A, B))
            result[f"{module}.weight"] = result[f"{module}.weight"] + scale * (b @ a)
    return result
