"""Change what a model computes on its way, and see what comes of it.

`patch`, `ablate`, `steer` and `remask` are contexts that compose, in the order in which they are entered; a recording
sees what the contexts around it have changed, and not what those inside it will. Positions count over the whole
sequence, behind a cache too. Nothing is left behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from leftward.errors import UserError
from leftward.inspection.record import id_of, ids_of, labels, record
from leftward.inspection.sites import Site, Value, at_each_pass, attach, find, the_mask
from leftward.model.block import Block
from leftward.model.decoder import Decoder
from leftward.model.masks import Mask

if TYPE_CHECKING:
    from leftward.language_model import LanguageModel

Positions = int | slice | Sequence[int] | None
"""Places in the sequence, from 0 on. None: all."""

_Change = Callable[[Tensor, Callable[[], Tensor]], Tensor | None]
"""What stands at a site, and what gives the places [B or 1, T] of the pass → what is to stand there; None: the same."""


@contextmanager
def patch(
    decoder: Decoder,
    edits: Mapping[str, Tensor | Callable[[Tensor], Tensor | None]],
    *,
    positions: Positions = None,
) -> Iterator[None]:
    """Put other values in the place of what is at the named sites.

    Args:
        edits: for a site, or a pattern of several: a function from what is there to what shall be, or a tensor that
            broadcasts to it. The positions of a tensor are places in the sequence: where it has none, nothing changes.

    Raises:
        UserError: a name that there isn't, or where nothing can be changed; inside, a tensor of another shape.
    """
    with ExitStack() as stack:
        for pattern, edit in edits.items():
            for site in find(decoder, [pattern]):
                change = _given(site, edit) if isinstance(edit, Tensor) else _called(edit)
                stack.enter_context(_edited(decoder, site, change, positions))
        yield


@contextmanager
def ablate(
    decoder: Decoder,
    pattern: str,
    *,
    heads: Sequence[int] | None = None,
    neurons: Sequence[int] | None = None,
    positions: Positions = None,
    to: Literal["zero", "mean"] | Tensor = "zero",
) -> Iterator[None]:
    """Take something out: "attn.heads" with `heads`, "ff.hidden" with `neurons`, or a sublayer as a whole ("attn.out",
    "ff.out").

    Args:
        to: what stands in its place. "mean": the mean over rows and positions of the pass that began the sequence, the
            later ones too.

    Raises:
        UserError: as `patch`; heads or neurons that the site doesn't have.
    """
    if isinstance(to, str) and to not in ("zero", "mean"):
        raise UserError(f"to is {to!r}: it must be 'zero', 'mean' or a tensor")
    with ExitStack() as stack:
        for site in find(decoder, [pattern]):
            change = _given(site, to) if isinstance(to, Tensor) else _zero if to == "zero" else _mean(site)
            stack.enter_context(_edited(decoder, site, change, positions, {"H": heads, "F": neurons}))
        yield


@contextmanager
def steer(
    decoder: Decoder, pattern: str, vector: Tensor, *, scale: float = 1.0, positions: Positions = None
) -> Iterator[None]:
    """Add `scale` times a vector [width] to what is at a site.

    Raises: UserError: as `patch`.
    """
    with ExitStack() as stack:
        for site in find(decoder, [pattern]):

            def steered(old: Tensor, places: Callable[[], Tensor], site: Site = site) -> Tensor:
                return old + scale * _fitting(site, vector, old)

            stack.enter_context(_edited(decoder, site, steered, positions))
        yield


@contextmanager
def remask(
    decoder: Decoder,
    *,
    window: int | Literal["none"] | None = None,
    prefix: int | None = None,
    causal: bool | None = None,
    layers: Sequence[int] | None = None,
) -> Iterator[None]:
    """An experiment with who may look at whom, which the model was not trained for.

    Args:
        window: keys this far away, or further, are unseen; "none": the layer's own window goes. A cache of local layers
            still holds no more than its window.
        prefix: so many places at the beginning see each other, whatever their order.
        causal: False: everybody sees everybody who is there, padding of a batch too.
        layers: those that it is for. None: all.

    Raises:
        UserError: no such layer, or a window or prefix that is no length.
    """
    for name, length, least in (("window", window, 1), ("prefix", prefix, 0)):
        if length not in (None, "none") and (type(length) is not int or length < least):
            raise UserError(f"{name} is {length!r}: it must be a whole number, at least {least}")
    n_layers = len(decoder.blocks)
    wanted = range(n_layers) if layers is None else layers
    if wrong := [layer for layer in wanted if layer not in range(n_layers)]:
        raise UserError(f"there is no layer {wrong[0]}: the model has layers 0 to {n_layers - 1}")

    def look(module: Any, args: Any, value: Value) -> Value:
        q, k, v, mask = value
        return q, k, v, _remasked(mask, window, prefix, causal)

    with ExitStack() as hooks:
        for layer in wanted:
            block = decoder.blocks[layer]
            assert isinstance(block, Block)
            hooks.callback(block.attn.attending.register_forward_hook(look).remove)
        yield


def _remasked(mask: Mask, window: int | Literal["none"] | None, prefix: int | None, causal: bool | None) -> Mask:
    changed: dict[str, Any] = {"shortcut": None}  # which says what the old rules come to
    if window is not None:
        changed["window"] = None if window == "none" else window
    if prefix is not None:
        changed["prefix_lengths"] = torch.full((len(mask.queries), 1), prefix, device=mask.queries.device)
    if causal is not None:
        changed["causal"] = causal
    return dataclasses.replace(mask, **changed)


# ---- what is common to them


@contextmanager
def _edited(
    decoder: Decoder,
    site: Site,
    change: _Change,
    positions: Positions,
    chosen: Mapping[str, Sequence[int] | None] | None = None,
) -> Iterator[None]:
    """Args: chosen: of an axis, the indices that change."""
    if site.write is None:
        raise UserError(f"{site.name} can't be changed, only looked at: change {site.instead}")
    write, wanted = site.write, {axis: indices for axis, indices in (chosen or {}).items() if indices is not None}
    _check_positions(positions)
    for axis, indices in wanted.items():
        _check_indices(site, axis, indices, decoder)
    under_way: list[Mask] = []

    def begin(x: Tensor, masks: list[Mask]) -> None:
        under_way[:] = masks

    def places() -> Tensor:
        if site.name == "embed":
            raise UserError("embed is read before anything is known of positions: change layers.0.resid.pre there")
        return the_mask(under_way).queries

    def look(value: Value) -> Value | None:
        old = site.read(value)
        new = change(old, places)
        if new is None or new is old:
            return None
        new = _fitting(site, new, old)
        for axis, indices in wanted.items():
            new = torch.where(_of_axis(site, axis, indices, old), new, old)
        if positions is not None:
            new = torch.where(_of_positions(site, positions, places(), old), new, old)
        return write(value, new)

    with ExitStack() as hooks:
        hooks.callback(at_each_pass(decoder, begin).remove)
        hooks.callback(attach(site, look).remove)
        yield


def _zero(old: Tensor, places: Callable[[], Tensor]) -> Tensor:
    return torch.zeros_like(old)


def _called(edit: Callable[[Tensor], Tensor | None]) -> _Change:
    return lambda old, places: edit(old)


def _mean(site: Site) -> _Change:
    if "S" in site.axes:
        raise UserError(f"{site.name} has an axis of keys, which have no mean: give a tensor, or 'zero'")
    kept: list[Tensor] = []
    over = [site.axes.index("B"), site.axes.index("T")]

    def change(old: Tensor, places: Callable[[], Tensor]) -> Tensor:
        if int(places().min()) == 0:
            kept[:] = [old.float().mean(dim=over, keepdim=True)]
        if not kept:
            raise UserError(f"the mean of {site.name} is that of the beginning of a text, which was read before")
        return kept[0].to(old.dtype)

    return change


def _given(site: Site, tensor: Tensor) -> _Change:
    """A tensor with all of a site's axes has a place for each position, and for each key."""
    if tensor.ndim != len(site.axes):
        return lambda old, places: tensor

    def change(old: Tensor, places: Callable[[], Tensor]) -> Tensor:
        given = tensor.to(old)
        if "S" in site.axes:
            keys = site.axes.index("S")
            given = _of_length(given, keys, old.shape[keys])
        if "T" not in site.axes or given.shape[site.axes.index("T")] == 1:
            return given
        if len(places()) > 1:
            raise UserError(f"rows of unequal length have no common positions, as the tensor for {site.name} has")
        along, at = site.axes.index("T"), places()[0]
        there = at < given.shape[along]
        given = given.index_select(along, at.clamp(max=given.shape[along] - 1))
        return torch.where(_shaped(there[None], site, "BT"), _fitting(site, given, old), old)

    return change


def _of_length(x: Tensor, dim: int, length: int) -> Tensor:
    """Cut, or continued with zeros."""
    if x.shape[dim] in (1, length):
        return x
    short = max(0, length - x.shape[dim])
    filling = x.new_zeros([short if axis == dim else size for axis, size in enumerate(x.shape)])
    return torch.cat((x, filling), dim=dim).narrow(dim, 0, length)


def _fitting(site: Site, new: Tensor, old: Tensor) -> Tensor:
    try:
        return new.to(old).expand_as(old)
    except RuntimeError:
        raise UserError(
            f"{site.name} is {list(old.shape)}, and what shall stand there {list(new.shape)}: it must be the same, or "
            "broadcast to it"
        ) from None


def _of_axis(site: Site, axis: str, indices: Sequence[int], old: Tensor) -> Tensor:
    mask = torch.zeros(old.shape[_axis(site, axis)], dtype=torch.bool, device=old.device)
    mask[list(indices)] = True
    return mask.view([-1 if i == _axis(site, axis) else 1 for i in range(old.ndim)])


def _axis(site: Site, axis: str) -> int:
    """Keys and values have heads of their own."""
    return site.axes.find("K" if axis == "H" and "K" in site.axes else axis)


_HAVE = {"H": ("heads", "attn.heads, attn.weights and attn.q have"), "F": ("neurons", "ff.hidden has")}


def _check_indices(site: Site, axis: str, indices: Sequence[int], decoder: Decoder) -> None:
    name, who = _HAVE[axis]
    if _axis(site, axis) < 0:
        raise UserError(f"{site.name} has no {name}: {who}")
    config = decoder.config
    n = {"H": config.n_heads, "K": config.n_kv_heads, "F": config.d_ff}[site.axes[_axis(site, axis)]]
    if wrong := [index for index in indices if type(index) is not int or not 0 <= index < n]:
        raise UserError(f"{name} of {site.name} are 0 to {n - 1}, and {wrong[0]!r} is none")


def _check_positions(positions: Positions) -> None:
    numbers = _numbers(positions)
    if any(type(n) is not int or n < 0 for n in numbers) or (isinstance(positions, slice) and positions.step == 0):
        raise UserError(
            f"positions are {positions!r}: they must be whole numbers that count from the beginning of the text, 0 the "
            "first, since nobody knows its end while it is written"
        )


def _numbers(positions: Positions) -> list[Any]:
    if isinstance(positions, slice):
        return [n for n in (positions.start, positions.stop, positions.step) if n is not None]
    return [] if positions is None else list(positions) if isinstance(positions, Sequence) else [positions]


def _of_positions(site: Site, positions: Positions, places: Tensor, old: Tensor) -> Tensor:
    if "T" in site.axes:
        return _shaped(_are_among(places, positions), site, "BT")
    places = torch.arange(old.shape[site.axes.index("S")], device=old.device)[None]
    return _shaped(_are_among(places, positions), site, "BS")


def _shaped(mask: Tensor, site: Site, axes: str) -> Tensor:
    """[B or 1, n] → with ones for a site's other axes."""
    return mask.view([mask.shape[axes.index(axis)] if axis in axes else 1 for axis in site.axes])


def _are_among(places: Tensor, positions: Positions) -> Tensor:
    if not isinstance(positions, slice):
        return torch.isin(places, torch.tensor(_numbers(positions), dtype=places.dtype, device=places.device))
    start, step = positions.start or 0, positions.step or 1
    chosen = (places >= start) & ((places - start) % step == 0)
    return chosen if positions.stop is None else chosen & (places < positions.stop)


# ---- between two texts


@dataclass(frozen=True)
class Grid:
    """What a metric becomes where one text's value is put into another, a cell a place."""

    values: Tensor
    """[layers, positions], or [layers, heads]."""
    layers: tuple[int, ...]
    columns: tuple[str, ...]
    """The corrupted text's tokens, or the numbers of the heads."""
    clean: float
    """The metric of each text by itself."""
    corrupted: float

    @property
    def restored(self) -> Tensor:
        """How much of the way from corrupted (0) to clean (1) each cell goes alone."""
        return (self.values - self.corrupted) / (self.clean - self.corrupted)


_ROWS = 16
"""Cells that are tried in one pass."""


def activation_patching(
    model: LanguageModel,
    clean: str | Sequence[int],
    corrupted: str | Sequence[int],
    site: str = "resid.pre",
    *,
    metric: Callable[[Tensor], float] | tuple[int | str, int | str],
) -> Grid:
    """The corrupted text with the clean one's value at one place, for each layer and position; at a site of heads for
    each layer and head, at all positions at once.

    Args:
        site: the name of a site without its layer.
        metric: of the logits [V] behind the last token, a number; or two tokens, the difference of whose logits it is.

    Raises:
        UserError: texts of unequal length, a site that can't be changed, a token that is none.
    """
    decoder = model.decoder
    ids, others = ids_of(model, clean), ids_of(model, corrupted)
    if ids.shape != others.shape:
        raise UserError(f"the texts have {ids.shape[1]} and {others.shape[1]} tokens: they must have as many")
    measure = metric if callable(metric) else _difference(*(id_of(model, token) for token in metric))
    found = [each for each in find(decoder, [site]) if each.kind == site]
    if not found or site == found[0].name:
        raise UserError(f"site is {site!r}: it must be that of a layer, without the layer, as in 'resid.pre'")
    axes = found[0].axes
    along = next(axes.index(axis) for axis in "HKT" if axis in axes)

    def ask(rows: Tensor) -> list[float]:
        return [float(measure(row)) for row in decoder.logits(decoder.hidden(rows)[:, -1]).float()]

    cells = []
    with torch.inference_mode():
        with record(decoder, *(each.name for each in found)) as rec:
            (of_clean,) = ask(ids)
        (of_corrupted,) = ask(others)
        for each in found:
            known = rec[each.name].to(decoder.device)
            n = known.shape[along]
            for start in range(0, n, _ROWS):
                columns = range(start, min(start + _ROWS, n))

                def exchanged(old: Tensor, known: Tensor = known, columns: range = columns) -> Tensor:
                    new = old.clone()
                    for row, column in enumerate(columns):
                        new[row].select(along - 1, column).copy_(known[0].select(along - 1, column))
                    return new

                with patch(decoder, {each.name: exchanged}):
                    cells += ask(others.expand(len(columns), -1))
    names = [str(i) for i in range(known.shape[along])] if axes[along] != "T" else labels(model, others[0].tolist())
    values = torch.tensor(cells).view(len(found), -1)
    layers = tuple(int(each.name.split(".")[1]) for each in found)
    return Grid(values, layers, tuple(names), of_clean, of_corrupted)


def _difference(token: int, other: int) -> Callable[[Tensor], float]:
    return lambda logits: float(logits[token] - logits[other])
