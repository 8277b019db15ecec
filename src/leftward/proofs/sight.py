"""Who sees whom: proofs that a position depends on its past, all of it that its window holds, and on nothing else.

Two ways to find out, which have no fault in common: change a token and see which outputs move; and ask for gradients,
which are exactly zero where there is no path. Either gives a table [positions, T] of who sees whom, and `future_faults`
and `past_faults` say what is wrong with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leftward.proofs.report import Fails, Skips
from leftward.proofs.subject import Subject, distance, embeddings_through


def by_change(subject: Subject) -> str:
    """Change one token after another: no output before it moves."""
    ids = subject.need(2)
    length, others = ids.shape[1], subject.another(ids)
    before = subject.ask(ids)[0]
    moved = torch.zeros(length, length)  # [output, token changed]
    for token in range(length):
        changed = ids.clone()
        changed[0, token] = others[0, token]
        moved[:, token] = (subject.ask(changed)[0] - before).float().abs().amax(dim=-1)
    most = float(moved.triu(1).max())
    if not most <= subject.tolerance:
        fault = future_faults(list(range(length)), moved > subject.tolerance) or "outputs are no numbers"
        raise Fails(f"{fault} (a changed token moves logits before it by {most:.1e})")
    return f"{length} tokens changed in turn: outputs before them moved by {most:.0e}{_alone(moved > 0)}"


def by_gradient(subject: Subject) -> str:
    """The gradient of output t with respect to the embeddings after t is zero, exactly."""
    ids = subject.need(2)
    length = ids.shape[1]
    with torch.enable_grad():
        with embeddings_through(subject.awake, ids, lambda output: output.detach().requires_grad_()) as leaves:
            logits = subject.logits_of(subject.awake(ids), ids)
        if not leaves:
            raise Skips("no nn.Embedding reads the ids, so that there is nothing to take gradients of")
        seen = who_sees_whom(logits, leaves[0], list(range(length)), subject)
    if fault := future_faults(list(range(length)), seen):
        raise Fails(f"{fault} (its gradient is not zero)")
    return f"∂ output t / ∂ input after t is exactly 0 at all {length} positions{_alone(seen)}"


def by_layer(subject: Subject) -> str:
    """Each layer by itself: which of its inputs reach which of its outputs."""
    ids = subject.long_ids
    length = ids.shape[1]
    if length < 2:
        raise Skips("the model takes one token only")
    rows = subject.some_places(length)
    config, faults = subject.config, dict[str, list[int]]()
    with torch.enable_grad():
        ends = _cut_into_layers(subject, ids)
        for layer, (leaf, output) in enumerate(ends):
            seen = who_sees_whom(output, leaf, rows, subject)
            fault = future_faults(rows, seen)
            if fault is None and config is not None:
                fault = past_faults(rows, seen, config.window if config.is_local(layer) else None)
            if fault is not None:
                faults.setdefault(fault, []).append(layer)
    if faults:
        raise Fails("; ".join(f"{_listing(layers)}: {fault}" for fault, layers in faults.items()))
    if config is None:
        return f"none of {len(ends)} layers sees a later token, of {length}"
    local = [layer for layer in range(config.n_layers) if config.is_local(layer)]
    widest = min(config.window or length, length)
    windows = ""
    if local:
        too_long = f"; {length} tokens are too few to try it" if widest == length else ""
        windows = f", in {len(local)} of them through a window of {config.window:,} exactly{too_long}"
    return f"each of {len(ends)} layers sees its whole past, of {length} tokens, and nothing else{windows}"


def _listing(layers: list[int]) -> str:
    numbers = ", ".join(map(str, layers[:8])) + (" …" if len(layers) > 8 else "")
    return f"layer{'s' if len(layers) > 1 else ''} {numbers}"


def prefix_sees_itself(subject: Subject) -> str:
    """With prefix_lengths the prompt sees itself whole, and the rest is causal as ever."""
    decoder, ids = subject.the_decoder(), subject.need(6)
    if not decoder.config.causal:
        raise Skips("causal is false: everything sees everything")
    length, prefix = ids.shape[1], 3
    with torch.enable_grad():
        with embeddings_through(decoder, ids, lambda output: output.detach().requires_grad_()) as leaves:
            logits = decoder(ids, prefix_lengths=[prefix])
        if not leaves:
            raise Skips("no nn.Embedding reads the ids, so that there is nothing to take gradients of")
        seen = who_sees_whom(logits, leaves[0], list(range(length)), subject)
    if fault := future_faults(list(range(length))[prefix:], seen[prefix:]):
        raise Fails(f"behind the prefix: {fault}")
    if seen[:prefix, prefix:].any():
        raise Fails(f"the prefix of {prefix} tokens sees what comes after it")
    reaches = decoder.config.window is None or decoder.config.window > 1
    if reaches and not seen[:prefix, :prefix].triu(1).any():
        raise Fails(f"no token of the prefix of {prefix} sees a later one of it")
    return f"{prefix} tokens see each other, the {length - prefix} behind them only leftward"


def who_sees_whom(outputs: Tensor, leaf: Tensor, rows: list[int], subject: Subject) -> Tensor:
    """bool [rows, T]: whether outputs[0, row] has a gradient with respect to leaf[0, t].

    The output is weighed with random numbers: the plain sum of a LayerNorm's output is a constant, without gradient.
    """
    weights = torch.randn(outputs.shape[-1], generator=subject.generator()).to(outputs)
    seen = torch.zeros(len(rows), leaf.shape[1], dtype=torch.bool)
    for i, row in enumerate(rows):
        if not outputs.requires_grad:
            break
        (gradient,) = torch.autograd.grad(outputs[0, row] @ weights, leaf, retain_graph=True, allow_unused=True)
        if gradient is not None:
            seen[i] = (gradient[0] != 0).any(dim=-1).cpu()
    return seen


def future_faults(rows: list[int], seen: Tensor) -> str | None:
    """What is wrong with a table of who sees whom [rows, T], as far as the future goes; None: nothing."""
    length = seen.shape[1]
    ahead = [[t - row for t in range(row + 1, length) if seen[i, t]] for i, row in enumerate(rows)]
    if not any(ahead):
        return None
    possible = [list(range(1, length - row)) for row in rows]
    behind = any(seen[i, :row].any() for i, row in enumerate(rows))
    if not behind and length > 2:
        return "sees only the future: its mask is upside down"
    if ahead == possible:
        return "sees the whole future: no mask, or one upside down beside others"
    furthest = max(map(max, filter(None, ahead)))
    if ahead == [[step for step in steps if step <= furthest] for steps in possible]:
        many = f" in {furthest} layers, or by more in fewer" if furthest > 1 else ""
        return f"position t sees t+{furthest}: the mask is off by one{many}"
    row, steps = next((row, steps) for row, steps in zip(rows, ahead, strict=True) if steps)
    return f"sees a part of the future: position {row} sees {row + steps[0]}"


def past_faults(rows: list[int], seen: Tensor, window: int | None) -> str | None:
    """The same of the past, which a layer must see whole, or the last `window` positions of, its own among them."""
    distances = sorted({row - t for i, row in enumerate(rows) for t in range(row + 1) if seen[i, t]})
    reach = max(rows) if window is None else min(window - 1, max(rows))
    furthest = max(distances, default=-1)
    if furthest > reach:
        return f"a window of {furthest + 1}, and the Config says {window}: {furthest - reach} too wide"
    if furthest < reach:
        if window is None:
            return f"a window of {furthest + 1}, and the Config has none here"
        return f"a window of {furthest + 1}, and the Config says {window}: {reach - furthest} too narrow"
    for i, row in enumerate(rows):
        for t in range(max(0, row - reach), row + 1):
            if not seen[i, t]:
                return f"has a hole in its past: position {row} does not see {t}"
    return None


def _alone(seen: Tensor) -> str:
    """A remark, where positions see nothing of their past either."""
    return "" if seen.tril(-1).any() else "; nor does any position see its past: each sees itself only"


def _cut_into_layers(subject: Subject, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The input of each layer, cut off from the layer before it, and the output: both [1, T, D].

    Layers are the members of the list of modules that holds the most parameters, so that this works for any model that
    has one.

    Raises:
        Skips: there is none, or its members don't map a stream of vectors to another.
    """
    lists = [m for m in subject.awake.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m)]
    if not lists:
        raise Skips("the model has no list of layers")
    layers = max(lists, key=lambda module: sum(p.numel() for p in module.parameters()))
    leaves: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}

    def is_stream(value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and value.shape[:2] == ids.shape

    def before(number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}  # by place and by name
            place = next((place for place, value in given.items() if is_stream(value)), None)
            if place is None:
                return None
            given[place] = leaves[number] = given[place].detach().requires_grad_()
            return tuple(given[i] for i in range(len(args))), {name: given[name] for name in kwargs}

        return hook

    def after(number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            output = output[0] if isinstance(output, tuple | list) else output
            if is_stream(output):
                outputs[number] = output

        return hook

    handles = []
    for number, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(before(number), with_kwargs=True))
        handles.append(layer.register_forward_hook(after(number)))
    try:
        subject.awake(ids)
    finally:
        for handle in handles:
            handle.remove()
    if not set(leaves) == set(outputs) == set(range(len(layers))):
        raise Skips("the members of the model's list of modules do not map a stream [B, T, D] to another")
    return [(leaves[number], outputs[number]) for number in range(len(layers))]


def of_a_prefix(subject: Subject) -> str:
    """Appending tokens changes nothing before them."""
    ids = subject.need(2)
    length = ids.shape[1]
    whole = subject.ask(ids)
    most = 0.0
    for end in sorted({1, length // 3 or 1, length // 2, length - 1}):
        difference = distance(subject.ask(ids[:, :end]), whole[:, :end])
        if not difference <= subject.tolerance:
            raise Fails(
                f"the first {end} outputs are others when {length - end} tokens follow: logits differ by "
                f"{difference:.1e}, where rounding explains {subject.tolerance:.0e}"
            )
        most = max(most, difference)
    return f"prefixes read alone give the logits that they have in the whole: they differ by {most:.0e}"
