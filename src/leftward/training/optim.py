"""The optimizer: fp32 master weights of a Decoder, and the rules by which gradients move them.

The Decoder computes in the run's dtype. Where that is not fp32, each of its weights is a rounded copy of a master, made
anew after every step, and gradients are summed over micro-batches in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leftward.model.decoder import Decoder
from leftward.training.recipe import OptimizerSection


def parameter_groups(decoder: nn.Module) -> dict[str, list[str]]:
    """Every parameter's name in exactly one group.

    matrices: the weights of the blocks, which decay. embeddings: the tables and the head. vectors: norms and biases.
    Embeddings and vectors never decay: their scale carries meaning that a pull to zero would only work against.
    """
    groups: dict[str, list[str]] = {"matrices": [], "embeddings": [], "vectors": []}
    for name, parameter in decoder.named_parameters():
        is_matrix = parameter.ndim >= 2
        groups["vectors" if not is_matrix else "matrices" if name.startswith("blocks.") else "embeddings"].append(name)
    return groups


class Optimizer:
    """Master weights and their update. Casts `decoder` to `dtype` in place.

    Args:
        decoder: with fp32 weights, on its device.
        dtype: what the decoder is to compute in.
    """

    def __init__(self, decoder: Decoder, settings: OptimizerSection, dtype: torch.dtype) -> None:
        self._working = dict(decoder.named_parameters())
        self.masters = {
            name: p if dtype == torch.float32 else nn.Parameter(p.detach().clone()) for name, p in self._working.items()
        }
        decoder.to(dtype)
        self._grad_clip = settings.grad_clip
        groups = {kind: [self.masters[n] for n in names] for kind, names in parameter_groups(decoder).items()}
        matrices, rest = groups["matrices"], groups["embeddings"] + groups["vectors"]
        adamw_groups = [{"params": rest, "weight_decay": 0.0}]
        self._optimizers: list[torch.optim.Optimizer] = []
        if settings.name == "muon":
            muon = Muon(matrices, settings.lr, settings.momentum, settings.weight_decay, dtype)
            self._optimizers.append(muon)
        else:
            adamw_groups.append({"params": matrices, "weight_decay": settings.weight_decay})
        betas = (settings.betas[0], settings.betas[1])
        self._optimizers.append(torch.optim.AdamW(adamw_groups, lr=settings.adamw_lr, betas=betas, fused=True))
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]

    def accumulate(self) -> None:
        """Take the gradients that a backward pass left on the decoder."""
        for name, working in self._working.items():
            master = self.masters[name]
            if working is master:
                continue
            assert working.grad is not None, name
            if master.grad is None:
                master.grad = working.grad.float()
            else:
                master.grad.add_(working.grad)
            working.grad = None

    @torch.no_grad()
    def step(self, lr_fraction: float) -> float:
        """Move the weights along the accumulated gradients and forget these.

        Returns:
            The norm of the whole gradient before clipping.
        """
        masters = list(self.masters.values())
        norm = nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        if self._grad_clip:
            nn.utils.clip_grads_with_norm_(masters, self._grad_clip, norm)
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * lr_fraction
            optimizer.step()
            optimizer.zero_grad()
        self.publish()
        return float(norm)

    @torch.no_grad()
    def publish(self) -> None:
        """Give the decoder its rounded copies of the masters."""
        for name, working in self._working.items():
            if working is not self.masters[name]:
                working.copy_(self.masters[name])

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights under the decoder's names."""
        return {name: master.detach() for name, master in self.masters.items()}

    def state(self) -> dict[str, Tensor]:
        """What the optimizers remember, as flat tensors: "exp_avg.NAME", "momentum_buffer.NAME", …"""
        name_of = {id(master): name for name, master in self.masters.items()}
        return {
            f"{key}.{name_of[id(parameter)]}": torch.as_tensor(value)
            for optimizer in self._optimizers
            for parameter, slots in optimizer.state.items()
            for key, value in slots.items()
        }

    @torch.no_grad()
    def restore(self, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """Become what `weights` and `state` were taken from."""
        for name, master in self.masters.items():
            master.copy_(weights[name])
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter] = {}
        owner = {id(p): o for o in self._optimizers for group in o.param_groups for p in group["params"]}
        for flat, tensor in state.items():
            key, _, name = flat.partition(".")
            master = self.masters[name]
            owner[id(master)].state[master][key] = tensor.clone()
        self.publish()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: each matrix moves by the nearest semi-orthogonal matrix to its averaged gradient.

    Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks". The same function as torch.optim.Muon
    (a test holds them together), with matrices of one shape taken through the Newton–Schulz iteration as one batch.
    """

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
                assert len(grads) == len(parameters)
                for parameter in parameters:
                    if not self.state[parameter]:
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
                torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
                nesterov = torch._foreach_lerp(grads, buffers, group["momentum"])
                updates = orthogonalise(torch.stack(nesterov).to(self._dtype)).float().unbind()
                if group["weight_decay"]:
                    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                # A tall matrix's update is scaled so that its effect on a unit input does not shrink with its shape.
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_add_(parameters, updates, alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor) -> Tensor:
    """U Vᵀ of each of `matrices` [N, rows, columns] = U S Vᵀ, about: its singular values end between about 0.7 and 1.2.

    Five steps of the quintic Newton–Schulz iteration with Jordan's coefficients.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
