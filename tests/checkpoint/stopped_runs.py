"""Runs that are stopped again and again, and go on with other ranks, beside one in one go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

import samestep
from samestep.callbacks.callback import Callback, RunControl
from samestep.checkpoint.shelf import Shelf
from samestep.comm.transport import Transport
from samestep.numerics.fingerprint import fingerprint
from samestep.testing.threads import run_threads
from samestep.track.folder import LEDGER
from samestep.track.ledger import compared_values, read_ledger

RANKS = (4, 2, 3, 1)


class Fallen(Exception):
    """What ends a rank in the middle of a step."""


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, the same in every part of the run."""

    make_model: Callable[[], nn.Module]
    dataset: Any
    loss: Callable[[nn.Module, Any], Any]
    settings: Mapping[str, Any]


@final
@dataclass(frozen=True)
class Came:
    """What a run came to; two runs are the same when these are equal."""

    fingerprint: str
    averages: str | None
    applied: int
    ledger: list[dict[str, str]]
    visited: dict[int, tuple[int, ...]]  # the sample ids of each step


class Visits(Callback):
    """Notes which samples each step saw, and may ask for the end on the last rank."""

    ranks: ClassVar[Literal["all", "first"]] = "all"

    def __init__(self, visited: dict[int, tuple[int, ...]], stop_at: int | None = None) -> None:
        self.visited = visited
        self.stop_at = stop_at

    def on_step(self, report: samestep.StepReport, run: RunControl) -> None:
        if run.rank == 0:
            self.visited[report.step] = run.ids
        if run.rank == run.world_size - 1 and report.step == self.stop_at:
            run.stop("asked for")


@final
@dataclass(kw_only=True)
class Part:
    """One part of a run: on how many ranks, and what ends it."""

    world_size: int = 1
    strategy: str = "replicate"
    steps: int
    stop_at: int | None = None  # the step after which the last rank asks for the end
    fall_at: int | None = None  # the forward pass in which a rank falls
    fall_rank: int = 0
    model_seed: int = 0
    checkpoint: samestep.Checkpointing | None = None
    calls: int = field(default=0, init=False)


def take(case: Case, part: Part, folder: Path, visited: dict[int, tuple[int, ...]]) -> samestep.Result:
    """Run one part on threads; raises Fallen where that is how it ends."""
    calls = threading.local()

    def loss(model: nn.Module, batch: Any) -> Any:
        calls.number = getattr(calls, "number", 0) + 1
        if calls.number == part.fall_at and calls.rank == part.fall_rank:
            raise Fallen
        return case.loss(model, batch)

    def rank(transport: Transport) -> samestep.Result:
        calls.rank = transport.rank
        with transport.turn():
            torch.manual_seed(part.model_seed)
            model = case.make_model()
        return samestep.train(
            model,
            case.dataset,
            loss,
            steps=part.steps,
            strategy=part.strategy,
            transport=transport,
            folder=folder,
            checkpoint=part.checkpoint,
            callbacks=[Visits(visited, part.stop_at)],
            listeners=[lambda _: None],
            **case.settings,
        )

    return run_threads(rank, part.world_size)[0]


def came_to(result: samestep.Result, folder: Path, visited: dict[int, tuple[int, ...]]) -> Came:
    return Came(
        fingerprint=result.fingerprint,
        averages=fingerprint(result.ema) if result.ema else None,
        applied=result.applied,
        ledger=[compared_values(report) for report in read_ledger(folder / LEDGER).steps],
        visited=visited,
    )


def undisturbed(case: Case, steps: int, folder: Path) -> Came:
    """Run to the end on one rank, without checkpoints."""
    visited: dict[int, tuple[int, ...]] = {}
    return came_to(take(case, Part(steps=steps), folder, visited), folder, visited)


def disturbed(case: Case, steps: int, folder: Path, draw: Random) -> tuple[Came, int]:
    """Stop at random places, and go on with other ranks, the other strategy and a model of other values."""
    visited: dict[int, tuple[int, ...]] = {}
    stops = at = 0
    while True:
        kind = draw.choice(["end", "ask", "fall"]) if at < steps - 1 else "end"
        part = Part(
            world_size=RANKS[stops % 4],
            strategy=draw.choice(["replicate", "zero1"]),
            # A rank may have too few micro-batches to fall: it then ends where it would have.
            steps=steps if kind == "ask" else min(at + draw.choice([1, 1, 2]), steps),
            stop_at=at if kind == "ask" else None,
            fall_at=draw.randint(1, 8) if kind == "fall" else None,
            model_seed=stops if at else 0,  # of other values, where there is a state to go on from
            checkpoint=samestep.Checkpointing(
                every=draw.randint(1, 3), keep=draw.randint(1, 2), background=draw.random() < 0.7
            ),
        )
        part.fall_rank = draw.randrange(part.world_size)
        try:
            result = take(case, part, folder, visited)
        except Fallen:
            newest = Shelf(folder / "checkpoints").whole()
            at = int(newest[0].name.removeprefix("step-")) if newest else 0
        else:
            at = result.step
            if at == steps:
                return came_to(result, folder, visited), stops
        stops += 1


def by_size(loss: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], samestep.Weighted]:
    """Return a loss that weighs each value as 1."""
    return lambda model, batch: samestep.weighted(loss(model, batch))
