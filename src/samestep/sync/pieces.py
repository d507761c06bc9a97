"""What a rank's optimizer sees: whole parameters, or the parts of them that the rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from samestep.sync.layout import Slot
from samestep.sync.storage import ParameterStore


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
        """Return this piece's part of a flat buffer."""
        return self.slot.view(flat) if self.is_whole else flat[self.start : self.stop]


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
    whole = start == slot.start and stop == slot.stop
    master = store.masters[slot.flat]
    if whole and master is store.flats[slot.flat]:
        target = store.parameters[slot.index]
    else:
        target = Parameter(slot.view(master) if whole else master[start:stop])
    return Piece(slot=slot, start=start, stop=stop, target=target)


def retarget(optimizer: Optimizer, store: ParameterStore, pieces: Sequence[Piece]) -> None:
    """Let an optimizer update pieces in place of the model's parameters, and move its state along.

    Groups keep their order and settings, so schedulers that hold the optimizer go on working. State of a
    parameter's shape is cut like the parameter; the rest (step counts) is copied to each piece.
    """
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
                    optimizer.state[piece.target] = {k: _cut_state(v, piece) for k, v in state.items()}
        group["params"] = targets


def _cut_state(value: object, piece: Piece) -> object:
    if not isinstance(value, Tensor):
        return value
    shape = piece.slot.shape
    if tuple(value.shape) != shape or not shape or piece.is_whole:
        return value.clone()
    dense = torch.empty_strided(shape, piece.slot.stride, dtype=value.dtype, device=value.device)
    dense.copy_(value)
    flat = dense.as_strided((dense.numel(),), (1,))
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    return flat[piece.start - piece.slot.start : piece.stop - piece.slot.start].clone()
