"""Gradients of a tensor, for comparing those written by hand with autograd's."""

from __future__ import annotations

import torch


def gradients(output: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Of a random weighting of `output`, so that no element's gradient can hide."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
    return torch.autograd.grad((output * weights).sum(), inputs)
