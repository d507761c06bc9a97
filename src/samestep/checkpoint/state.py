"""The state of a model in one safetensors file: parameters and buffers under the model's own names.

Note [one tensor, many names]: tied tensors are stored once, under their first name. The file's metadata,
under the key "samestep", is a JSON object: `order` (all names in the order of the model), `aliases` (name ->
the name that holds its tensor) and `complex` (names stored as pairs of real numbers, since not every reader
of the format knows complex dtypes).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from samestep.errors import ConfigError

KEY = "samestep"


class Layout(NamedTuple):
    """What the metadata of a state file says."""

    order: list[str]
    aliases: dict[str, str]
    complex: list[str]


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, then buffers, under all of their names."""
    state: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return state | dict(model.named_buffers(remove_duplicate=False))


def save_state(model: nn.Module, path: Path) -> None:
    """Store a model's parameters and buffers, each tensor once, bit by bit.

    Law: `path` holds either what it held before or the whole new state, also after a loss of power.
    """
    state = named_state(model)
    aliases = aliases_of(state)
    tensors = {name: _plain(tensor) for name, tensor in state.items() if name not in aliases}
    numbers = [name for name in tensors if state[name].is_complex()]
    layout = Layout(order=list(state), aliases=aliases, complex=numbers)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, temporary, metadata={"format": "pt", KEY: json.dumps(layout._asdict())})
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def read_state(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a state file on the CPU, in the order of the model; tied ones are one object."""
    return dict(iterate_state(path))


def iterate_state(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state file, in the order of the model, one at a time.

    A file of another writer has no order of its own: its names come sorted. Raises ConfigError where the
    file is missing or damaged.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such state file.")
    try:
        with safe_open(path, framework="pt") as stored:
            layout = _layout(stored.metadata() or {}, list(stored.keys()))
            first: dict[str, Tensor] = {}
            shared = set(layout.aliases.values())
            for name in layout.order:
                source = layout.aliases.get(name, name)
                tensor = first[source] if source in first else stored.get_tensor(source)
                if source in layout.complex and not tensor.is_complex():
                    tensor = torch.view_as_complex(tensor)
                if source in shared:
                    first[source] = tensor
                yield name, tensor
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: this is no whole state file: {error}. Take another copy.") from error


def load_state(model: nn.Module, path: Path) -> None:
    """Write the stored bits into the model's own tensors, so that ties and views stay as they are.

    Raises ConfigError, and leaves the model alone, where names, shapes or dtypes differ, or where the
    model ties what was stored with different values.
    """
    state, stored = named_state(model), read_state(path)
    problems = [f"missing in the file: {name}" for name in state if name not in stored]
    problems += [f"not in the model: {name}" for name in stored if name not in state]
    for name in stored:
        if name in state:
            problems += _mismatch(name, state[name], stored[name])
    if not problems:
        for alias, name in aliases_of(state).items():
            if not torch.equal(_bits(stored[alias]), _bits(stored[name])):
                problems.append(f"{alias} and {name} are one tensor in the model, but differ in the file")
    if problems:
        raise ConfigError(
            f"{path} does not fit the model:\n  "
            + "\n  ".join(problems)
            + "\nBuild the model as it was when it "
            "was stored."
        )
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(stored[name])


def _mismatch(name: str, ours: Tensor, theirs: Tensor) -> Iterator[str]:
    if ours.shape != theirs.shape:
        yield f"{name}: shape {tuple(theirs.shape)} in the file, {tuple(ours.shape)} in the model"
    if ours.dtype != theirs.dtype:
        yield f"{name}: dtype {theirs.dtype} in the file, {ours.dtype} in the model"


def aliases_of(state: dict[str, Tensor]) -> dict[str, str]:
    """Return name -> first name, for each tensor that lies just where an earlier one lies."""
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        # Two empty tensors lie nowhere: they are one only where they are one object.
        place: object = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        holder = first.setdefault(place if tensor.numel() else id(tensor), name)
        if holder != name:
            aliases[name] = holder
    return aliases


def _plain(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU that shares its memory with nothing, complex as real pairs."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _bits(tensor: Tensor) -> Tensor:
    return _plain(tensor).reshape(-1).view(torch.uint8)


def _layout(metadata: dict[str, str], names: list[str]) -> Layout:
    if KEY not in metadata:
        return Layout(order=sorted(names), aliases={}, complex=[])
    return Layout(**json.loads(metadata[KEY]))


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
