"""A mixture of experts: many feed-forwards, of which a router chooses a few for each token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leftward.config import Config
from leftward.model.feedforward import ACTIVATIONS, FeedForward


class Stacked(nn.Module):
    """The weights of one matrix of every expert: [n_experts, out, in]."""

    def __init__(self, n_experts: int, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, n_out, n_in))
        self.bias = nn.Parameter(torch.zeros(n_experts, n_out)) if bias else None

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return F.linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])


class Experts(nn.Module):
    """Σ over the n_experts_per_token likeliest experts of p · expert(x), and the shared expert, which has no router.

    Shazeer et al. 2017, arXiv 1701.06538; with the softmax before the choice as in Mixtral (arXiv 2401.04088), where
    making the chosen p sum to 1 is the same as a softmax after it.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_experts, self.per_token = config.n_experts, config.n_experts_per_token
        self.is_normalised = config.router_normalised
        self.router = nn.Linear(config.d_model, config.n_experts, bias=config.ff_bias)
        width = 2 * config.d_ff if config.is_gated else config.d_ff
        self.up = Stacked(config.n_experts, config.d_model, width, config.ff_bias)
        self.activation = ACTIVATIONS[config.feed_forward]
        self.down = Stacked(config.n_experts, config.d_ff, config.d_model, config.ff_bias)
        self.shared = FeedForward(config, config.d_shared) if config.d_shared else None
        self.balance_loss: Tensor | None = None
        """Of the last forward pass in training: 1 where experts are used evenly, n_experts where one has all. Padding
        counts like any token."""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "balance_loss": None}  # a copy has not run yet

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D] → [B, T, D]
        tokens = x.flatten(0, 1)  # [N, D]
        probabilities = self.router(tokens).float().softmax(dim=-1)  # [N, n_experts]
        weights, chosen = probabilities.topk(self.per_token, dim=-1)  # [N, per_token]
        if self.is_normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # Grouped by expert for the products, then back in the order of the tokens, so that each token's sum is taken in
        # one order whatever else is in the batch.
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.n_experts)
        groups = tokens[order // self.per_token].split(counts.tolist())
        outputs = torch.cat([self._expert(i, group) for i, group in enumerate(groups) if len(group)])
        each = outputs[order.argsort()].view(*chosen.shape, -1)  # [N, per_token, D]
        mixed = (each * weights.to(each.dtype)[..., None]).sum(dim=1).view(x.shape)
        if self.training:
            self.balance_loss = _balance_loss(probabilities, counts)
        return mixed if self.shared is None else mixed + self.shared(x)

    def _expert(self, number: int, tokens: Tensor) -> Tensor:
        return self.down(self.activation(self.up(tokens, number)), number)


def _balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """n_experts · Σ fᵢ Pᵢ, with fᵢ the share of choices that fell on expert i and Pᵢ its mean probability.

    Fedus et al. 2021, arXiv 2101.03961, eq. 4.
    """
    shares = counts / counts.sum()
    return probabilities.shape[1] * (shares * probabilities.mean(dim=0)).sum()
