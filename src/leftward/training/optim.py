"""The optimizer: fp32 master weights of a Decoder, and the rules by which gradients move them.

The Decoder computes in the run's dtype. Where that is not fp32, each of its weights is a rounded copy of a master, made
anew after every step, and gradients are summed over micro-batches in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_of_torch

from leftward.errors import UserError
from leftward.kernels import functions, native
from leftward.model.decoder import Decoder
from leftward.training.recipe import OptimizerSection

if TYPE_CHECKING:
    from leftward.training.sharding import Sharding  # FSDP takes a second to import


def parameter_groups(decoder: nn.Module) -> dict[str, list[str]]:
    """The name of every parameter that learns, in exactly one group.

    matrices: the weights of the blocks, which decay. embeddings: the tables and the head. vectors: norms and biases.
    Embeddings and vectors never decay: their scale carries meaning that a pull to zero would only work against.
    """
    groups: dict[str, list[str]] = {"matrices": [], "embeddings": [], "vectors": []}
    for name, parameter in _learning(decoder).items():
        is_matrix = parameter.ndim >= 2 and not name.endswith(".bias")  # experts have theirs stacked
        groups["vectors" if not is_matrix else "matrices" if name.startswith("blocks.") else "embeddings"].append(name)
    return groups


def _learning(decoder: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name."""
    return {name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad}


class Optimizer:
    """Master weights and their update, of what learns. Casts `decoder` to `dtype` in place.

    Holds its state as named tensors and calls PyTorch's update rule as a function: torch.optim.Optimizer, the class,
    loads the compiler when it is made, a second that a short run would feel.

    Args:
        decoder: on its device. What learns is in fp32; what is frozen has no master, gradient or state.
        dtype: what the decoder is to compute in.
        sharding: that has built the decoder, computing in `dtype`: its weights are the masters of this rank's part.
    """

    def __init__(
        self, decoder: Decoder, settings: OptimizerSection, dtype: torch.dtype, sharding: Sharding | None = None
    ) -> None:
        self._settings, self._dtype, self._sharding = settings, dtype, sharding
        self._working = _learning(decoder)
        self._has_copies = dtype != torch.float32 and sharding is None
        self.masters: dict[str, Tensor] = {
            name: nn.Parameter(p.detach().clone()) if self._has_copies else self._local(p)
            for name, p in self._working.items()
        }
        if self._has_copies:
            decoder.to(dtype)
        self.grads: dict[str, Tensor] = {}
        groups = parameter_groups(decoder)
        undecayed = groups["embeddings"] + groups["vectors"]
        uses_muon = settings.name == "muon"
        self._muon = self._by_shape(groups["matrices"]) if uses_muon else []
        # (names, weight decay) of what AdamW moves
        moved = [(undecayed, 0.0)] if uses_muon else [(undecayed, 0.0), (groups["matrices"], settings.weight_decay)]
        self._adamw = [(names, weight_decay) for names, weight_decay in moved if names]
        self._state: dict[str, dict[str, Tensor]] = {"momentum_buffer": {}, "exp_avg": {}, "exp_avg_sq": {}, "step": {}}
        for names in self._muon:
            self._state["momentum_buffer"] |= {name: torch.zeros_like(self.masters[name].detach()) for name in names}
        for names, _ in self._adamw:
            for slot in ("exp_avg", "exp_avg_sq"):
                self._state[slot] |= {name: torch.zeros_like(self.masters[name].detach()) for name in names}
            self._state["step"] |= {name: torch.zeros((), device=self.masters[name].device) for name in names}

    def accumulate(self) -> None:
        """Take the gradients that a backward pass left on the decoder. Those of one pass stay in its dtype; of several
        they are summed in fp32."""
        for name, working in self._working.items():
            assert working.grad is not None, name
            if working.dtype == torch.float32:  # autograd adds the next ones to it by itself
                self.grads[name] = self._local(working.grad)
                continue
            held = self.grads.get(name)
            self.grads[name] = working.grad if held is None else held.float().add_(working.grad)
            working.grad = None

    @torch.no_grad()
    def grad_norm(self) -> float:
        """The norm of the whole accumulated gradient. To be asked once a step: over several ranks it completes that."""
        return _total_norm(list(self.grads.values())) if self._sharding is None else self._sharding.norm(self.grads)

    @torch.no_grad()
    def step(self, lr_fraction: float, norm: float | None = None) -> None:
        """Move the weights along the accumulated gradients, and forget these.

        Args:
            norm: what `grad_norm` gave, where it was asked already.
        """
        settings = self._settings
        norm = self.grad_norm() if norm is None else norm
        clipped = min(1.0, settings.grad_clip / (norm + 1e-6)) if settings.grad_clip else 1.0
        lr = settings.lr * lr_fraction
        if self._sharding is not None:
            self._muon_over_ranks(self._sharding, clipped, lr)
        else:
            for names in self._muon:
                muon(
                    *self._columns(names, "momentum_buffer"),
                    grad_scale=clipped,
                    lr=lr,
                    momentum=settings.momentum,
                    weight_decay=settings.weight_decay,
                    dtype=self._dtype,
                )
                self._round(names)
        for names, weight_decay in self._adamw:
            adamw(
                *self._columns(names, "exp_avg", "exp_avg_sq", "step"),
                copies=[self._working[name] for name in names] if self._has_copies else None,
                grad_scale=clipped,
                lr=settings.adamw_lr * lr_fraction,
                betas=settings.betas,
                weight_decay=weight_decay,
            )
        self.forget()

    def _muon_over_ranks(self, sharding: Sharding, grad_scale: float, lr: float) -> None:
        """The same step where a rank has a part of each matrix: averages are taken in place, and each matrix is put
        together and orthogonalised on one of the ranks."""
        settings = self._settings
        directions: dict[str, Tensor] = {}
        for names in self._muon:
            _, grads, buffers = self._columns(names, "momentum_buffer")
            averages = nesterov(grads, buffers, grad_scale, settings.momentum)
            directions |= {name: average.to(self._dtype) for name, average in zip(names, averages, strict=True)}
        updates = sharding.transformed(directions, orthogonalised)
        for names in self._muon:
            masters = [self.masters[name] for name in names]
            moved = [updates[name].float() for name in names]
            move(masters, moved, self._shape(names[0]), lr, settings.weight_decay)

    def forget(self) -> None:
        """Drop the accumulated gradients."""
        self.grads.clear()
        for working in self._working.values():
            working.grad = None

    @property
    def nbytes(self) -> int:
        """Memory of all that learns: masters, copies, gradients and what the update rules remember."""
        held = [*self.masters.values(), *self.state().values(), *self._working.values()]  # a gradient is as a weight
        copies = [*self._working.values()] if self._has_copies else []
        return sum(tensor.nbytes for tensor in held + copies)

    @torch.no_grad()
    def _round(self, names: Iterable[str]) -> None:
        """Give the decoder new rounded copies of the masters."""
        if self._has_copies:
            torch._foreach_copy_([self._working[name] for name in names], [self.masters[name] for name in names])

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights under the decoder's names."""
        return {name: master.detach() for name, master in self.masters.items()}

    def state(self) -> dict[str, Tensor]:
        """What the update rules remember, under "exp_avg.NAME", "momentum_buffer.NAME" …"""
        return {f"{slot}.{name}": tensor for slot, named in self._state.items() for name, tensor in named.items()}

    @torch.no_grad()
    def restore(self, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """Become what `weights` and `state` were taken from. Raises: UserError where they are of another run."""
        for ours, theirs in ((self.weights(), weights), (self.state(), state)):
            if {n: t.shape for n, t in ours.items()} != {n: t.shape for n, t in theirs.items()}:
                raise UserError("the checkpoint holds other tensors than this recipe's model and optimizer have")
            for name, tensor in ours.items():
                tensor.copy_(theirs[name])
        self._round(self.masters)

    def _local(self, tensor: Tensor) -> Tensor:
        """What this rank has of a weight of the decoder, or of its gradient."""
        return tensor if self._sharding is None else self._sharding.local(tensor)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of a whole weight."""
        return tuple(self.masters[name].shape) if self._sharding is None else self._sharding.cuts[name].shape

    def count(self, names: Iterable[str]) -> int:
        """Numbers in whole weights of these names."""
        return sum(math.prod(self._shape(name)) for name in names)

    def _by_shape(self, names: list[str]) -> list[list[str]]:
        """`names` in groups whose weights have one shape."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            groups.setdefault(self._shape(name), []).append(name)
        return list(groups.values())

    def _columns(self, names: list[str], *slots: str) -> list[list[Tensor]]:
        """The masters of `names`, their gradients, and what the update rule keeps of each in `slots`."""
        return [
            [self.masters[name].detach() for name in names],
            [self.grads[name] for name in names],
            *([self._state[slot][name] for name in names] for slot in slots),
        ]


def _total_norm(grads: list[Tensor]) -> float:
    if all(map(native.serves, grads)):
        return functions.norm(grads)
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, torch.float32))))


def adamw(
    parameters: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    *,
    copies: list[Tensor] | None,
    grad_scale: float,
    lr: float,
    betas: Sequence[float],
    weight_decay: float,
    eps: float = 1e-8,
) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), and `copies` become the parameters, rounded to
    bf16. Gradients may be of any dtype; they count times `grad_scale`."""
    if all(map(native.serves, parameters)) and all(map(native.serves, grads)):
        rounded: Sequence[Tensor | None] = copies or [None] * len(parameters)
        for parameter, grad, average, square, step, copy in zip(
            parameters, grads, averages, squares, steps, rounded, strict=True
        ):
            step += 1
            corrections = (1 - beta ** step.item() for beta in betas)
            native.call(
                *("adamw", grad.dtype, parameter, grad.contiguous(), average, square, copy, grad.numel()),
                *(grad_scale, lr, *map(float, betas), eps, float(weight_decay), *corrections),
            )
        return
    scaled = [grad.float() if grad_scale == 1.0 else grad.float() * grad_scale for grad in grads]
    adamw_of_torch(
        parameters,
        scaled,
        averages,
        squares,
        max_exp_avg_sqs=[],
        state_steps=steps,
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    if copies is not None:
        torch._foreach_copy_(copies, parameters)


def muon(
    parameters: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    *,
    grad_scale: float = 1.0,
    lr: float,
    momentum: float,
    weight_decay: float,
    dtype: torch.dtype,
) -> None:
    """One step of Muon for matrices of one shape: each moves by the orthogonalised average of its gradients.

    Axes before the last two stand for several matrices: those of experts.

    Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks", with Nesterov momentum and decoupled
    decay; the same function as torch.optim.Muon (a test holds them together), but for the batch.
    """
    directions = torch.stack(nesterov(grads, buffers, grad_scale, momentum))
    updates = list(orthogonalised(directions.to(dtype)).float().unbind())
    move(parameters, updates, tuple(parameters[0].shape), lr, weight_decay)


def nesterov(grads: list[Tensor], buffers: list[Tensor], grad_scale: float, momentum: float) -> list[Tensor]:
    """Muon's directions, before they are orthogonalised; the buffers go on."""
    grads = [grad.float() if grad_scale == 1.0 else grad.float() * grad_scale for grad in grads]
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    return list(torch._foreach_lerp(grads, buffers, momentum))


def move(
    parameters: list[Tensor], updates: list[Tensor], shape: tuple[int, ...], lr: float, weight_decay: float
) -> None:
    """Decay matrices of one `shape`, of which each parameter may be a part, and move them by orthogonal updates."""
    rows, columns = shape[-2:]
    if weight_decay:
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    # A tall matrix's update is scaled so that its effect on a unit input does not shrink with its shape.
    torch._foreach_add_(parameters, updates, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def orthogonalised(matrices: Tensor) -> Tensor:
    """`orthogonalise` of [..., rows, columns], axes before the last two standing for several matrices."""
    return orthogonalise(matrices.reshape(-1, *matrices.shape[-2:])).view(matrices.shape)


def orthogonalise(matrices: Tensor) -> Tensor:
    """U Vᵀ of each of `matrices` [N, rows, columns] = U S Vᵀ, about: its singular values end between some 0.7 and 1.2.

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
