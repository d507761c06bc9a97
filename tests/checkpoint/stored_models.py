"""Checkpoints of small models, made rank by rank without a run around them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.shelf import Shelf, step_folder
from samestep.checkpoint.snapshot import copied, other_parts, parameter_parts, stored_state, whole_part
from samestep.checkpoint.state import aliases_of
from samestep.checkpoint.writer import Task, finish, write_share
from samestep.sync.layout import lay_out
from samestep.sync.storage import ParameterStore


class Motley(nn.Module):
    """Parameters and buffers of every kind that a model may hold."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)

        def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, generator=made, dtype=torch.float64).to(dtype)

        self.plain = nn.Parameter(drawn(7, 5))
        self.scalar = nn.Parameter(drawn())
        self.empty = nn.Parameter(drawn(0, 3))
        self.image = nn.Parameter(drawn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(drawn(6, 4).t())
        self.waves = nn.Parameter(torch.complex(drawn(5, 3), drawn(5, 3)))
        self.halves = nn.Parameter(drawn(33, dtype=torch.bfloat16))
        self.doubles = nn.Parameter(drawn(3, dtype=torch.float64))
        self.frozen = nn.Parameter(drawn(4, dtype=torch.float16), requires_grad=False)
        self.tied = self.plain
        for name, dtype in {"b": torch.bool, "i": torch.int64, "u": torch.uint8, "h": torch.int16}.items():
            self.register_buffer(name, torch.randint(0, 2, (3,), generator=made).to(dtype))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("spectrum", torch.complex(drawn(4), drawn(4)).to(torch.complex128))
        self.register_buffer("passing", drawn(2), persistent=False)


def storage_of(model: nn.Module, world_size: int) -> ParameterStore:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    layout = lay_out(named, world_size=world_size, whole=False)
    return ParameterStore(layout, [parameter for _, parameter in named], masters=True)


def manifest_of(tensors: Mapping[str, Tensor], step: int, world_size: int, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "step": step,
        "update": step,
        "world_size": world_size,
        "digest": "0" * 16,
        "numerics_key": {},
        "versions": {"samestep": "0"},
        "state": {"average": None},
        "metrics": {},
        "order": tuple(tensors),
        "aliases": aliases_of(dict(tensors)),
        "tensors": {},
    }
    return Manifest(**{**values, **changes})


def done(task: Task) -> None:
    """Wait for a piece of work that must succeed."""
    assert task.is_done(within_s=30.0)
    assert task.problem is None, task.problem


def store_model(folder: Path, model: nn.Module, *, step: int, world_size: int, **changes: Any) -> Path:
    """Store a model as so many ranks would; its parameters move into flat memory."""
    store, shelf = storage_of(model, world_size), Shelf(folder)
    shelf.open()
    trained = [slot.name for slot in store.layout.slots]
    for rank in range(world_size):
        owned = store.layout.owned(rank)
        parts = [*parameter_parts(store, owned), *other_parts(model, trained, rank, world_size)]
        done(write_share(shelf.unfinished(step), rank, copied(parts), {}))
    manifest = manifest_of(stored_state(model), step, world_size, **changes)
    done(finish(shelf, manifest, keep=100, best=lambda _: []))
    return folder / step_folder(step)


def store_tensors(folder: Path, tensors: Mapping[str, Tensor], *, step: int = 1, **changes: Any) -> Path:
    """Store tensors as the state of a model, by one rank; keep any number of checkpoints."""
    shelf = Shelf(folder)
    shelf.open()
    parts = [whole_part(f"model/{name}", tensor) for name, tensor in tensors.items()]
    done(write_share(shelf.unfinished(step), 0, copied(parts), {}))
    done(finish(shelf, manifest_of(tensors, step, 1, **changes), keep=100, best=lambda _: []))
    return folder / step_folder(step)
