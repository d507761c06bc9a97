"""Weights alone: read from whatever holds some, and put into a model, wholly or in part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from samestep.checkpoint.manifest import MANIFEST
from samestep.checkpoint.reader import StoredCheckpoint
from samestep.checkpoint.shelf import Shelf, newest_at, step_folder
from samestep.checkpoint.snapshot import plain_name, stored_state
from samestep.checkpoint.state import iterate_state
from samestep.errors import CheckpointError, ConfigError

_SHOWN: Final = 12  # names that are listed of each kind
_FINAL: Final = "state.safetensors"  # in the folder of a run that has ended


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What `load_weights` did; all names are the model's own, in its order."""

    path: Path  # the checkpoint or file that was read
    loaded: tuple[str, ...]
    missing: tuple[str, ...]  # in the model, not in the file: left as they were
    unexpected: tuple[str, ...]  # in the file, not in the model
    mismatched: dict[str, str]  # in both, with another shape: left as they were

    def __str__(self) -> str:
        told = [f"{self.path}: {len(self.loaded)} tensors loaded"]
        told += [*_listed("not in the file", self.missing), *_listed("not in the model", self.unexpected)]
        told += _listed("other", [f"{name}: {problem}" for name, problem in self.mismatched.items()])
        return "\n  ".join(told)


@torch.no_grad()
def load_weights(
    model: nn.Module, path: str | Path, *, partial: bool = False, ema: bool = False
) -> LoadReport:
    """Put stored parameters and buffers into a model, before it is set up for training.

    `path` is a checkpoint, a run folder (of which the newest checkpoint is taken), or a safetensors file of
    any writer. Values are converted to the dtypes of the model. With `partial` only what fits by name and
    shape is taken, and the report says what was not; without it anything that differs is an error, and the
    model is left alone. `ema` takes the averaged weights. Nothing in a file is executed.

    Raises CheckpointError for a file that is missing, damaged, or does not fit.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}, not a torch.nn.Module.")
    found, tensors = read_weights(Path(path), ema=ema)
    state = stored_state(model)
    stored = {plain_name(name): tensor for name, tensor in tensors.items()}
    tied = _tied(state)
    known = {name for names in tied for name in names if any(other in stored for other in names)}
    mismatched = {
        name: f"shape {tuple(stored[name].shape)} in the file, {tuple(tensor.shape)} in the model"
        for name, tensor in state.items()
        if name in stored and stored[name].shape != tensor.shape
    }
    mismatched |= _lossy(state, stored) | _untied(tied, stored)
    report = LoadReport(
        path=found,
        loaded=tuple(name for name in state if name in known and name not in mismatched),
        missing=tuple(name for name in state if name not in known),
        unexpected=tuple(name for name in stored if name not in state),
        mismatched=mismatched,
    )
    if not partial and (report.missing or report.unexpected or report.mismatched):
        raise CheckpointError(
            f"{report}\nNothing was changed. Build the model as it was, or take what fits: partial=True."
        )
    if not report.loaded:
        raise CheckpointError(f"{report}\nNothing fits: is this a file of another model?")
    for name in report.loaded:
        if name in stored:
            state[name].copy_(stored[name])
    return report


def read_weights(
    path: Path, *, ema: bool = False, step: int | None = None
) -> tuple[Path, Mapping[str, Tensor]]:
    """Return the checkpoint or file that `path` leads to, and its tensors, whole and on the CPU.

    `step` picks a checkpoint of a run. Raises CheckpointError.
    """
    if _is_file(path) and path.name != MANIFEST:
        if ema or step is not None:
            asked = "averaged weights" if ema else f"step {step}"
            raise CheckpointError(
                f"{path} is a single file, which has no {asked}. Name a checkpoint or a run folder."
            )
        return path, _read_file(path)
    if ema is False and step is None and newest_at(path) == path and _is_file(path / _FINAL):
        return path / _FINAL, _read_file(path / _FINAL)
    place = _checkpoint_at(path.parent if path.name == MANIFEST else path, step)
    with StoredCheckpoint(place) as stored:
        stored.require_whole(sorted(stored.manifest.files))
        state = stored.model_state()
        return place, _averaged(stored, state) if ema else state


def export_weights(path: Path, to: Path, *, ema: bool = False, step: int | None = None) -> Path:
    """Write weights to one safetensors file that plain torch and transformers load; return what was read.

    Law: the bytes follow from the weights and their names alone, not from who wrote the checkpoint. Tied
    tensors are there under each of their names, as a state dict has them. Raises CheckpointError.
    """
    found, stored = read_weights(path, ema=ema, step=step)
    if to.is_dir():
        raise CheckpointError(
            f"{to} is a folder. Name the file to be written, such as {to}/model.safetensors."
        )
    part = to.with_name(f".{to.name}.{os.getpid()}.part")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            # The metadata is what transformers asks for. Clones, since the format takes no shared memory.
            tensors = {
                name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in stored.items()
            }
            save_file(tensors, part, metadata={"format": "pt"})
            part.replace(to)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{to} cannot be written: {error}.") from None
    return found


def _checkpoint_at(path: Path, step: int | None) -> Path:
    if step is None:
        place = newest_at(path)
        if _is_file(place / MANIFEST):
            return place
        what = "holds no checkpoint that was finished" if _is_there(path) else "is not there"
        raise CheckpointError(
            f"{path} {what}. Name a checkpoint (a folder step-...), a run folder, or a safetensors file."
        )
    newest = newest_at(path)
    shelf = Shelf(path if newest == path else newest.parent)
    if newest == path:
        raise CheckpointError(f"{path} is no run folder, so it has no checkpoint of step {step} to pick.")
    place = shelf.folder / step_folder(step)
    if place not in shelf.whole():
        there = ", ".join(other.name for other in reversed(shelf.whole()))
        raise CheckpointError(f"{shelf.folder} holds no checkpoint of step {step}; there are: {there}.")
    return place


def _is_file(path: Path) -> bool:
    return _is_there(path) and path.is_file()


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that the system does not take
        return False


def _averaged(stored: StoredCheckpoint, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state with averages in the place of what is averaged, in the model's dtypes."""
    if stored.manifest.state.get("average") is None:
        raise CheckpointError(
            f"{stored.folder} holds no averaged weights: that run was made without ema. Leave ema out."
        )
    averaged: dict[str, Tensor] = {}
    for name, tensor in state.items():
        source = stored.manifest.aliases.get(name, name)
        held = [kept for kept in (f"ema/{source}", f"ema_buffer/{source}") if kept in stored]
        if source != name:
            averaged[name] = averaged[source]
        else:
            averaged[name] = stored.whole(held[0]).to(tensor.dtype) if held else tensor
    return averaged


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from None
    # A safetensors file may begin with the same byte as a pickle, but goes on with JSON after eight.
    if head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[8:] != b"{"):
        raise CheckpointError(
            f"{path} is a pickle, as torch.save writes them, which may run any code when it is loaded; it is "
            "not opened here. If you trust who wrote it, convert it once: safetensors.torch.save_file("
            f"torch.load({str(path)!r}, weights_only=True), 'model.safetensors')."
        )
    try:
        return dict(iterate_state(path))
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def _tied(state: Mapping[str, Tensor]) -> list[list[str]]:
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in state.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    return list(by_tensor.values())


def _untied(tied: Sequence[Sequence[str]], stored: Mapping[str, Tensor]) -> dict[str, str]:
    """Return names that the model ties to an earlier one, but of which the file holds other values."""
    found: dict[str, str] = {}
    for names in tied:
        first, *others = [name for name in names if name in stored] or [""]
        for name in others:
            same = stored[name].shape == stored[first].shape and torch.equal(stored[name], stored[first])
            if not same:
                found[name] = f"is one tensor with {first} in the model, but differs in the file"
    return found


def _lossy(state: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what would lose its meaning: complex numbers made real, fractions made whole."""
    return {
        name: f"dtype {stored[name].dtype} in the file, {tensor.dtype} in the model"
        for name, tensor in state.items()
        if name in stored and not torch.can_cast(stored[name].dtype, tensor.dtype)
    }


def _listed(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield f"{what}: {', '.join(names[:_SHOWN])}{more}"
