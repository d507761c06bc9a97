"""Putting a stored state back into a model and its optimizer, whoever owns what now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.checkpoint.manifest import TensorEntry
from samestep.checkpoint.reader import StoredCheckpoint
from samestep.checkpoint.snapshot import row_major, stored_name, stored_state
from samestep.checkpoint.state import aliases_of
from samestep.checkpoint.tensor_file import DTYPES
from samestep.errors import CheckpointError
from samestep.sync.layout import Slot
from samestep.sync.pieces import Piece
from samestep.sync.storage import ParameterStore

_SHOWN = 8  # problems that are listed


def require_fit(model: nn.Module, store: ParameterStore, stored: StoredCheckpoint) -> None:
    """Raise CheckpointError where the checkpoint is that of another model; it lists what differs."""
    here = {f"model/{name}": tensor for name, tensor in stored_state(model).items()}
    aliases = aliases_of(stored_state(model))
    here = {name: t for name, t in here.items() if name.removeprefix("model/") not in aliases}
    for slot in store.layout.slots:
        here.setdefault(stored_name(slot), store.parameters[slot.index])
    there = {
        name: entry
        for name, entry in stored.manifest.tensors.items()
        if name.startswith(("model/", "beside/"))
    }
    problems = [f"not in the checkpoint: {_shown(name)}" for name in here if name not in there]
    problems += [f"not in the model: {_shown(name)}" for name in there if name not in here]
    for name in here:
        if name in there and (problem := _mismatch(here[name], there[name])):
            problems.append(f"{_shown(name)}: {problem}")
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise CheckpointError(
            f"{stored.folder} is the checkpoint of another model:\n  "
            + "\n  ".join([*problems[:_SHOWN], *more])
            + "\nBuild the model as it was, or start a run of its own (resume='never', another folder) from "
            "its weights: samestep.load_weights(model, path, partial=True)."
        )


@torch.no_grad()
def restore_parameters(store: ParameterStore, stored: StoredCheckpoint) -> None:
    """Write the stored values into parameters and their masters."""
    for slot in store.layout.slots:
        flat, master = store.flats[slot.flat], store.masters[slot.flat]
        _fill(slot, flat, stored, stored_name(slot))
        if master is not flat:
            name = f"master/{slot.name}"
            if name in stored:
                _fill(slot, master, stored, name)
            else:  # written by a run without masters
                store.follow(slot)
    store.edited()  # what was written here is no change of the user's


@torch.no_grad()
def restore_others(model: nn.Module, trained: Iterable[str], stored: StoredCheckpoint) -> None:
    """Write the stored values into buffers and frozen parameters."""
    state = stored_state(model)
    known, aliases = set(trained), aliases_of(state)
    for name, tensor in state.items():
        if name not in known and name not in aliases:
            tensor.copy_(stored.whole(f"model/{name}"))


@torch.no_grad()
def restore_optimizer(optimizer: Optimizer, pieces: Sequence[Piece], stored: StoredCheckpoint) -> None:
    """Give each piece the part of the optimizer's state that belongs to it."""
    optimizer.state.clear()
    values = _values_by_parameter(stored.manifest.values)
    tensors = _values_by_parameter({n: n for n in stored.manifest.tensors if n.startswith("optimizer/")})
    on_device = {
        target
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for target in group["params"]
    }
    for piece in pieces:
        slot = piece.slot
        state: dict[str, Any] = {}
        for key, name in tensors.get(slot.name, {}).items():
            part = _cut(stored, name, piece)
            # Where step counts lie depends on how the optimizer was made, as torch's load_state_dict has it.
            counts = key == "step" and piece.target not in on_device
            state[key] = part if counts or stored.entry(name).on_cpu else part.to(piece.target.device)
        state |= values.get(slot.name, {})
        if state:
            optimizer.state[piece.target] = state


def run_of_slot(stored: StoredCheckpoint, name: str, slot: Slot, start: int, stop: int) -> Tensor:
    """Return flat elements start..stop of something that lies like a parameter: 1-D, real, on the CPU."""
    if stored.entry(name).stride == _stride_of(slot):
        return stored.run(name, start - slot.start, stop - slot.start)
    laid = torch.empty_strided(slot.shape, slot.stride, dtype=_dtype(stored.entry(name)))
    laid.copy_(stored.whole(name))
    flat = laid.as_strided((laid.numel(),), (1,))
    real = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return real[start - slot.start : stop - slot.start]


def _values_by_parameter(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
        found.setdefault(parameter, {})[key] = value
    return found


def _fill(slot: Slot, flat: Tensor, stored: StoredCheckpoint, name: str) -> None:
    flat[slot.start : slot.stop] = run_of_slot(stored, name, slot, slot.start, slot.stop).to(flat.device)


def _stride_of(slot: Slot) -> tuple[int, ...] | None:
    return None if slot.stride == row_major(slot.shape) else slot.stride


def _cut(stored: StoredCheckpoint, name: str, piece: Piece) -> Tensor:
    entry, slot = stored.entry(name), piece.slot
    if entry.shape != slot.shape or entry.is_complex != slot.is_complex:
        return stored.whole(name)
    if piece.is_whole:
        whole = torch.empty_strided(slot.shape, slot.stride, dtype=_dtype(entry))
        return whole.copy_(stored.whole(name))
    part = run_of_slot(stored, name, slot, piece.start, piece.stop)
    return torch.view_as_complex(part.view(-1, 2)) if slot.is_complex else part


def _dtype(entry: TensorEntry) -> torch.dtype:
    real = DTYPES[entry.dtype]
    complexes = {
        torch.float16: torch.complex32,
        torch.float32: torch.complex64,
        torch.float64: torch.complex128,
    }
    return complexes[real] if entry.is_complex else real


def _mismatch(tensor: Tensor, entry: TensorEntry) -> str | None:
    if tuple(tensor.shape) != entry.shape:
        return f"shape {entry.shape} in the checkpoint, {tuple(tensor.shape)} in the model"
    if tensor.dtype != _dtype(entry):
        return f"dtype {_dtype(entry)} in the checkpoint, {tensor.dtype} in the model"
    return None


def _shown(name: str) -> str:
    return name.removeprefix("model/")
