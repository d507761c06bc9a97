"""A small run with checkpoints, on threads, and the events that each rank saw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import samestep
from samestep.checkpoint.shelf import Shelf
from samestep.comm.transport import Transport
from samestep.testing.threads import run_threads
from samestep.testing.workloads import Drawn

DATA = Drawn(40, lambda g: (torch.randn(3, generator=g), torch.randn((), generator=g)))
STEPS = 8


def loss(model: nn.Module, batch: Any) -> samestep.Weighted:
    return samestep.weighted((model(batch[0])[:, 0] - batch[1]) ** 2)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def train(
    folder: Path | None,
    world_size: int = 1,
    *,
    make: Callable[[], nn.Module] = make_model,
    events: list[list[samestep.Event]] | None = None,
    callback: Callable[[samestep.Event], None] | None = None,
    dataset: Any = DATA,
    **changes: Any,
) -> samestep.Result:
    """Train, and add a list of events for each rank to `events`; `callback` is called on the first."""
    by_rank: list[list[samestep.Event]] = [[] for _ in range(world_size)]
    if events is not None:
        events[:] = by_rank

    def rank(transport: Transport) -> samestep.Result:
        with transport.turn():
            torch.manual_seed(0)
            model = make()

        def see(event: samestep.Event) -> None:
            by_rank[transport.rank].append(event)
            if callback is not None and transport.rank == 0:
                callback(event)

        arguments: dict[str, Any] = {
            "optimizer": lambda params: torch.optim.AdamW(params, lr=0.05),
            "batching": samestep.Batching(global_batch=8, micro_batch=2),
            "steps": STEPS,
            "checkpoint": samestep.Checkpointing(folder=folder, every=2) if folder else None,
            "timeout_s": 30.0,
        }
        return samestep.train(
            model,
            dataset,
            loss,
            callbacks=[see],
            listeners=[lambda _: None],
            transport=transport,
            **{**arguments, **changes},
        )

    return run_threads(rank, world_size)[0]


def of_kind(events: list[samestep.Event], *kinds: type) -> list[Any]:
    return [event for event in events if isinstance(event, kinds)]


def warnings_of(events: list[samestep.Event]) -> list[str]:
    return [notice.message for notice in of_kind(events, samestep.Notice) if notice.level == "warning"]


def steps_on(folder: Path) -> list[int]:
    return [int(place.name.removeprefix("step-")) for place in Shelf(folder).whole()]
