"""What a rank's optimizer sees: whole parameters, or the parts of them that the rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from samestep.sync.layout import Slot
from samestep.sync.storage import ParameterStore

Held: TypeAlias = list[list[Parameter]]  # by group: the parameters of an optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A parameter, or a part of one, with the tensor that the optimizer updates."""

    slot: Slot
    start: int  # in the flat buffer
    stop: int
    target: Parameter

    @property
    def is_whole(self) -> bool:
        """Whether it covers its parameter; it then has the parameter's own shape."""
        return self.start == self.slot.start and self.stop == self.slot.stop

    def view(self, flat: Tensor) -> Tensor:
        """Return this piece's part of a flat buffer, complex where the parameter is.

        torch's kernels round a complex number otherwise than its two parts, so a cut must stay complex.
        """
        if self.is_whole:
            return self.slot.view(flat)
        part = flat[self.start : self.stop]  # from and to an even element: tiles and starts are aligned
        return torch.view_as_complex(part.view(-1, 2)) if self.slot.is_complex else part


def cut_pieces(store: ParameterStore, ranges: Sequence[tuple[int, int, int]]) -> list[Piece]:
    """Cut the parameters by the (flat, start, stop) that a rank updates, in registration order.

    Where a rank updates a whole parameter that has no float32 master, the piece is the model's own
    Parameter, so that whatever else refers to it (optimizer state, hooks) still does.
    """
    pieces = []
    for slot in store.layout.slots:
        for flat, first, last in ranges:
            start, stop = max(slot.start, first), min(slot.stop, last)
            if flat == slot.flat and start < stop:
                pieces.append(_piece(store, slot, start, stop))
    return pieces


def _piece(store: ParameterStore, slot: Slot, start: int, stop: int) -> Piece:
    own = store.parameters[slot.index]
    piece = Piece(slot=slot, start=start, stop=stop, target=own)
    master = store.masters[slot.flat]
    if piece.is_whole and master is store.flats[slot.flat]:
        return piece
    return replace(piece, target=Parameter(piece.view(master)))


def retarget(optimizer: Optimizer, store: ParameterStore, pieces: Sequence[Piece]) -> Held:
    """Let an optimizer update pieces in place of the model's parameters, and move its state along.

    Groups keep their order and settings, so schedulers that hold the optimizer go on working. State of a
    parameter's shape is cut like the parameter; the rest (step counts) is copied to each piece. Returns what
    the groups held, for `give_back`.
    """
    held = [list(group["params"]) for group in optimizer.param_groups]
    by_parameter: dict[Parameter, list[Piece]] = {parameter: [] for parameter in store.parameters}
    for piece in pieces:
        by_parameter[store.parameters[piece.slot.index]].append(piece)
    for group in optimizer.param_groups:
        targets: list[Parameter] = []
        for parameter in group["params"]:
            cut = by_parameter.get(parameter)
            if cut is None:
                targets.append(parameter)
                continue
            state = optimizer.state.pop(parameter, None)
            for piece in cut:
                targets.append(piece.target)
                if state:
                    optimizer.state[piece.target] = {
                        key: _cut_value(value, piece) if isinstance(value, Tensor) else value
                        for key, value in state.items()
                    }
        group["params"] = targets
    return held


def give_back(optimizer: Optimizer, store: ParameterStore, pieces: Sequence[Piece], held: Held) -> None:
    """Let an optimizer hold the model's parameters again, with their state where this rank has all of it.

    Sharded state ends with the session, on every rank alike: a rank that went on with its part of it would
    train something else than its peers.
    """
    complete = {piece.slot.index for piece in pieces if piece.is_whole}
    is_sharded = len(complete) < sum(slot.numel > 0 for slot in store.layout.slots)
    for piece in pieces:
        own = store.parameters[piece.slot.index]
        if piece.target is not own:
            state = optimizer.state.pop(piece.target, None)
            if state and not is_sharded:
                optimizer.state[own] = state
    if is_sharded:
        optimizer.state.clear()
    for group, parameters in zip(optimizer.param_groups, held, strict=True):
        group["params"] = parameters


def _cut_value(value: Tensor, piece: Piece) -> Tensor:
    """Return the part of a tensor of a parameter's shape that belongs to a piece; others are copied whole."""
    shape = piece.slot.shape
    if tuple(value.shape) != shape or not shape or piece.is_whole:
        return value.clone()
    dense = torch.empty_strided(shape, piece.slot.stride, dtype=value.dtype, device=value.device)
    dense.copy_(value)
    flat = dense.as_strided((dense.numel(),), (1,))
    first, last = piece.start - piece.slot.start, piece.stop - piece.slot.start
    if flat.is_complex():
        first, last = first // 2, last // 2
    return flat[first:last].clone()
