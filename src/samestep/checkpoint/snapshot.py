"""What this rank stores of the state: views of the tensors first, then one copy of them on the CPU.

Every rank stores what it owns, replicated state included, so that all write at once and none writes twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.checkpoint.manifest import TensorEntry
from samestep.checkpoint.state import aliases_of, named_state
from samestep.checkpoint.tensor_file import NAMES
from samestep.errors import CheckpointError
from samestep.sync.layout import Slot
from samestep.sync.pieces import Piece
from samestep.sync.storage import ParameterStore

BESIDE = "optimizer.group"  # how the names of parameters begin that are not the model's


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A run of elements of one tensor of the state."""

    name: str
    entry: TensorEntry
    start: int
    stop: int
    tensor: Tensor  # 1-D, real


def stored_name(slot: Slot) -> str:
    """Return the name of a trained parameter in checkpoints: see Note [names of tensors]."""
    return f"beside/{slot.name}" if slot.name.startswith(BESIDE) else f"model/{slot.name}"


def plain_name(name: str) -> str:
    """Return a name without the mark that torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def parameter_parts(store: ParameterStore, owned: Sequence[tuple[int, int, int]]) -> Iterator[Part]:
    """Yield the owned parts of trained parameters, and of their masters."""
    for slot in store.layout.slots:
        flat, master = store.flats[slot.flat], store.masters[slot.flat]
        if not slot.numel:  # has no owner, and is told of by all
            yield slot_part(stored_name(slot), slot, slot.start, slot.stop, flat[slot.start : slot.stop])
        for start, stop in _overlaps(slot, owned):
            yield slot_part(stored_name(slot), slot, start, stop, flat[start:stop])
            if master is not flat:
                yield slot_part(f"master/{slot.name}", slot, start, stop, master[start:stop])


def optimizer_parts(
    optimizer: Optimizer, pieces: Iterable[Piece], owned: Sequence[tuple[int, int, int]]
) -> Iterator[Part]:
    """Yield the owned parts of what the optimizer keeps; other shapes go with the first element."""
    for piece in pieces:
        slot = piece.slot
        for key, value in optimizer.state.get(piece.target, {}).items():
            if not isinstance(value, Tensor):
                continue
            name = f"optimizer/{slot.name}/{key}"
            if value.shape == piece.target.shape and value.is_complex() == slot.is_complex:
                flat = _in_memory_order(value, piece)
                for start, stop in _overlaps(slot, owned, piece.start, piece.stop):
                    yield slot_part(name, slot, start, stop, flat[start - piece.start : stop - piece.start])
            elif _holds_first(slot, piece, owned):
                apart = value.device.type == "cpu" and piece.target.device.type != "cpu"
                yield whole_part(name, value, on_cpu=apart)


def optimizer_values(
    optimizer: Optimizer, pieces: Iterable[Piece], owned: Sequence[tuple[int, int, int]]
) -> dict[str, Any]:
    """Return what the optimizer keeps for parameters and is no tensor. Raises CheckpointError."""
    values: dict[str, Any] = {}
    for piece in pieces:
        if _holds_first(piece.slot, piece, owned):
            for key, value in optimizer.state.get(piece.target, {}).items():
                if not isinstance(value, Tensor):
                    values[f"optimizer/{piece.slot.name}/{key}"] = _plain(value, piece.slot.name, str(key))
    return values


def other_parts(model: nn.Module, trained: Iterable[str], rank: int, world_size: int) -> Iterator[Part]:
    """Yield this rank's share of the tensors that are not trained: buffers, frozen parameters."""
    state = stored_state(model)
    known = set(trained)
    aliases = aliases_of(state)
    left = [name for name in state if name not in aliases and name not in known]
    for number, name in enumerate(left):
        if number % world_size == rank:
            yield whole_part(f"model/{name}", state[name])


def stored_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint holds of a model: all but buffers outside the state dict."""
    kept = {id(t) for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    kept |= {id(parameter) for parameter in model.parameters()}
    return {plain_name(name): tensor for name, tensor in named_state(model).items() if id(tensor) in kept}


def whole_part(name: str, tensor: Tensor, *, on_cpu: bool = False) -> Part:
    """Return one part that is a whole tensor, row by row."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    real = (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)
    entry = TensorEntry(
        dtype=_dtype_name(real.dtype, name),
        shape=tuple(tensor.shape),
        is_complex=tensor.is_complex(),
        on_cpu=on_cpu,
    )
    return Part(name=name, entry=entry, start=0, stop=real.numel(), tensor=real)


@torch.no_grad()
def copied(parts: Iterable[Part]) -> list[Part]:
    """Return the parts with copies of their tensors on the CPU: all that training has to wait for."""
    pinned = torch.accelerator.is_available()
    copies: list[Part] = []
    device = None
    for part in parts:
        source = part.tensor
        on_device = source.device.type != "cpu"
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned and on_device)
        copy.copy_(source, non_blocking=on_device)
        device = source.device if on_device else device
        copies.append(Part(name=part.name, entry=part.entry, start=part.start, stop=part.stop, tensor=copy))
    if device is not None:
        torch.accelerator.synchronize(device)
    return copies


def tensors_of(parts: Iterable[Part]) -> dict[str, Tensor]:
    """Return the parts under the names that they have in a tensor file."""
    return {f"{part.name}@{part.start}": part.tensor for part in parts}


def entries_of(parts: Iterable[Part], file: str) -> dict[str, TensorEntry]:
    """Return what the manifest will say of the parts that lie in `file`."""
    entries: dict[str, TensorEntry] = {}
    for part in parts:
        before = entries[part.name].pieces if part.name in entries else ()
        pieces = (*before, (file, part.start, part.stop))
        entries[part.name] = TensorEntry(
            dtype=part.entry.dtype,
            shape=part.entry.shape,
            stride=part.entry.stride,
            is_complex=part.entry.is_complex,
            on_cpu=part.entry.on_cpu,
            pieces=pieces,
        )
    return entries


def slot_part(name: str, slot: Slot, start: int, stop: int, tensor: Tensor) -> Part:
    """Return flat elements start..stop of something that lies like a parameter."""
    entry = TensorEntry(
        dtype=_dtype_name(tensor.dtype, name),
        shape=slot.shape,
        stride=None if slot.stride == row_major(slot.shape) else slot.stride,
        is_complex=slot.is_complex,
    )
    return Part(name=name, entry=entry, start=start - slot.start, stop=stop - slot.start, tensor=tensor)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)


def _overlaps(
    slot: Slot, owned: Sequence[tuple[int, int, int]], first: int | None = None, last: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield the runs of flat elements of a parameter that lie in the owned ranges."""
    begin = slot.start if first is None else first
    end = slot.stop if last is None else last
    for flat, low, high in owned:
        start, stop = max(begin, low), min(end, high)
        if flat == slot.flat and start < stop:
            yield start, stop


def _holds_first(slot: Slot, piece: Piece, owned: Sequence[tuple[int, int, int]]) -> bool:
    if piece.start != slot.start:
        return False
    return any(flat == slot.flat and low <= slot.start < high for flat, low, high in owned)


def _in_memory_order(value: Tensor, piece: Piece) -> Tensor:
    """Return a state tensor of a piece as real elements in the order of the parameter's memory."""
    if piece.is_whole and value.stride() != piece.slot.stride:
        laid = torch.empty_strided(
            piece.slot.shape, piece.slot.stride, dtype=value.dtype, device=value.device
        )
        value = laid.copy_(value)
    flat = value.detach().as_strided((value.numel(),), (1,), value.storage_offset())
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def _dtype_name(dtype: torch.dtype, name: str) -> str:
    if dtype not in NAMES:
        raise CheckpointError(
            f"{name} has the dtype {dtype}, which no checkpoint can hold. Keep such tensors out of the state "
            "dict (register_buffer(..., persistent=False))."
        )
    return NAMES[dtype]


def _plain(value: object, name: str, key: str) -> object:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise CheckpointError(
            f"the optimizer keeps {key} of {name} as a {type(value).__name__}, which no checkpoint can hold: "
            "tensors, numbers, strings, lists and dicts can be stored."
        ) from None
    return value
