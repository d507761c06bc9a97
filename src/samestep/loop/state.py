"""The whole state of a run between two steps: gathered for a checkpoint, and put back from one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, final

import torch
from torch.optim import Optimizer

from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.reader import StoredCheckpoint
from samestep.checkpoint.restore import (
    require_fit,
    restore_optimizer,
    restore_others,
    restore_parameters,
    run_of_slot,
)
from samestep.checkpoint.snapshot import (
    Part,
    optimizer_parts,
    optimizer_values,
    other_parts,
    parameter_parts,
    slot_part,
    stored_state,
    whole_part,
)
from samestep.checkpoint.state import aliases_of
from samestep.comm.transport import Transport
from samestep.errors import CheckpointError
from samestep.loop.engine import Engine
from samestep.loop.state_digest import state_digest

Groups = list[dict[str, Any]]  # by parameter group: its settings that are JSON


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a run stands, besides its tensors."""

    step: int
    walks: Sequence[Mapping[str, Any]]
    callbacks: Mapping[str, Any]
    metrics: Mapping[str, float]


@final
class RunState:
    """Gathers and restores the state of one engine."""

    def __init__(self, engine: Engine, transport: Transport) -> None:
        self._engine = engine
        self._transport = transport
        self._groups = settings_of(engine.optimizer)  # as the user's program made them
        self._versions = {name: version(name) for name in ("samestep", "torch")}

    def gather(
        self, position: Position, key: Mapping[str, str | int]
    ) -> tuple[list[Part], dict[str, Any], Manifest]:
        """Collective. Return views of what this rank stores, its other values, and the manifest."""
        parts, rank = self._engine.parts, self._transport.rank
        owned = parts.layout.owned(rank)
        trained = [slot.name for slot in parts.layout.slots]
        stored = [
            *parameter_parts(parts.store, owned),
            *optimizer_parts(parts.optimizer, parts.pieces, owned),
            *other_parts(parts.model, trained, rank, self._transport.world_size),
            *self._average_parts(),
        ]
        values = optimizer_values(parts.optimizer, parts.pieces, owned)
        state = stored_state(parts.model)
        manifest = Manifest(
            step=position.step,
            update=self._engine.update,
            world_size=self._transport.world_size,
            digest=state_digest(parts, self._transport),
            numerics_key=dict(key),
            versions=self._versions,
            state={
                "optimizer": type(parts.optimizer).__name__,
                "groups_made": self._groups,
                "groups": settings_of(parts.optimizer),
                "engine": self._engine.state(),
                "average": self._engine.average.state() if self._engine.average else None,
                "walks": [dict(walk) for walk in position.walks],
                "callbacks": dict(position.callbacks),
            },
            metrics=dict(position.metrics),
            order=tuple(state),
            aliases=aliases_of(state),
            tensors={},
        )
        return stored, values, manifest

    @torch.no_grad()
    def restore(self, stored: StoredCheckpoint) -> list[str]:
        """Collective. Put everything back; return what was not taken over, in sentences."""
        parts, state = self._engine.parts, stored.manifest.state
        kind = type(parts.optimizer).__name__
        if state["optimizer"] != kind:
            raise CheckpointError(
                f"{stored.folder} was written with the optimizer {state['optimizer']}, and this run has "
                f"{kind}: its state means nothing here. Use {state['optimizer']}, or start a run of its own "
                "from the weights: samestep.load_weights(model, path) and resume='never'."
            )
        require_fit(parts.model, parts.store, stored)
        restore_parameters(parts.store, stored)
        restore_others(parts.model, [slot.name for slot in parts.layout.slots], stored)
        restore_optimizer(parts.optimizer, parts.pieces, stored)
        self._engine.load_state(state["engine"])
        told = self._restore_settings(state["groups_made"], state["groups"])
        told += self._restore_average(stored)
        if (digest := state_digest(parts, self._transport)) != stored.manifest.digest:
            raise CheckpointError(
                f"{stored.folder}: the state has the digest {digest} after loading, but "
                f"{stored.manifest.digest} was stored: this is not what the run had. Take an older one: "
                "resume=PATH."
            )
        return told

    def _average_parts(self) -> Iterator[Part]:
        average = self._engine.average
        if average is None:
            return
        for slot, start, stop, tensor in average.pieces():
            yield slot_part(f"ema/{slot.name}", slot, start, stop, tensor)
        if self._transport.rank == 0:
            for name, tensor in average.averaged_buffers().items():
                yield whole_part(f"ema_buffer/{name}", tensor)

    def _restore_average(self, stored: StoredCheckpoint) -> list[str]:
        average, state = self._engine.average, stored.manifest.state["average"]
        if average is None:
            return (
                [] if state is None else ["the stored average of the weights is left out: ema is None now."]
            )
        if state is None:
            average.restart()
            return ["no average of the weights is stored: it starts from the weights as they are."]
        for slot, start, stop, tensor in average.pieces():
            tensor.copy_(run_of_slot(stored, f"ema/{slot.name}", slot, start, stop))
        for name, tensor in average.averaged_buffers().items():
            if f"ema_buffer/{name}" in stored:
                tensor.copy_(stored.whole(f"ema_buffer/{name}"))
        average.load_state(state)
        return []

    def _restore_settings(self, made: Groups, now: Groups) -> list[str]:
        """Give the groups the settings they had, unless the program makes them otherwise than before."""
        told: list[str] = []
        groups = self._engine.optimizer.param_groups
        if len(made) != len(groups):
            had = f"{len(made)} parameter group{'s' if len(made) > 1 else ''}"
            told.append(
                f"the optimizer had {had} and has {len(groups)}: those that are new keep their own settings."
            )
        for number, (group, before, ours, then) in enumerate(
            zip(groups, made, self._groups, now, strict=False)
        ):
            for name, value in ours.items():
                if name not in before or name not in then:
                    continue
                if before[name] != value:
                    told.append(
                        f"{name} of optimizer group {number} was {before[name]} and is now {value}: the new "
                        "value counts."
                    )
                elif then[name] != value:
                    _set(group, name, then[name])
        return told


def settings_of(optimizer: Optimizer) -> Groups:
    """Return the settings of each parameter group that JSON can hold."""
    return [
        {
            name: plain
            for name, value in group.items()
            if name != "params" and (plain := _plain(value)) is not None
        }
        for group in optimizer.param_groups
    ]


def _plain(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list) and all(isinstance(one, bool | int | float | str) for one in value):
        return list(value)
    return None


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    held = group[name]
    if isinstance(held, torch.Tensor):
        held.fill_(value)
    else:
        group[name] = tuple(value) if isinstance(held, tuple) else value
