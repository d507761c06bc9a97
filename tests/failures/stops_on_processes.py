"""Runs with checkpoints whose ranks are killed or asked to stop: on ranks of any kind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import samestep
from samestep.callbacks.callback import Callback, RunControl
from samestep.comm.connect import connect
from samestep.comm.transport import Transport
from samestep.processes.failure import Failure
from samestep.testing.workloads import WORKLOADS
from samestep.topology.environment import Place

STEPS = 24
LOAD = WORKLOADS["mlp"]()
assert Failure  # imported with the server of processes, which forks ranks that have it


class Harm(Callback):
    """Notes which samples each step saw, and sends this process a signal after a step."""

    ranks = "all"

    def __init__(self, visits: Path, step: int | None, number: int) -> None:
        self.visits = visits
        self.step = step
        self.number = number

    def on_step(self, report: samestep.StepReport, run: RunControl) -> None:
        if run.rank == 0:
            with self.visits.open("a") as file:
                file.write(json.dumps([report.step, run.ids]) + "\n")
        if report.step == self.step:
            os.kill(os.getpid(), self.number)


def train(
    transport: Transport | None,
    folder: Path,
    *,
    strategy: str = "replicate",
    harm_at: int | None = None,
    number: int = signal.SIGKILL,
    within: int | None = None,
    listeners: tuple[Callable[[samestep.Event], None], ...] = (),
) -> samestep.Result:
    """Train; `harm_at` is a step after which a signal comes, `within` a forward pass in which a kill does."""
    calls = 0

    def loss(model: nn.Module, batch: Any) -> samestep.Weighted:
        nonlocal calls
        calls += 1
        if calls == within:
            os.kill(os.getpid(), signal.SIGKILL)
        return samestep.weighted(*LOAD.values(model, batch))

    if transport is None:
        torch.manual_seed(0)
        model = LOAD.make_model()
    else:
        with transport.turn():
            torch.manual_seed(0)
            model = LOAD.make_model()
    return samestep.train(
        model,
        LOAD.dataset,
        loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        schedule=samestep.schedules.warmup_cosine(updates=STEPS, warmup=4),
        batching=samestep.Batching(global_batch=12, micro_batch=2),
        steps=STEPS,
        strategy=strategy,
        ema=0.9,
        folder=folder,
        checkpoint=samestep.Checkpointing(every=2),
        callbacks=[Harm(folder.parent / "visits", harm_at, number)],
        listeners=[lambda _: None, *listeners],
        transport=transport,
        timeout_s=60.0,
    )


def killed(place: Place, folder: str, strategy: str, at: dict[int, tuple[int | None, int | None]]) -> str:
    """Train as one of several processes; `at` says by rank after which step or in which pass it dies."""
    harm_at, within = at.get(place.rank, (None, None))
    transport = connect(place, device=torch.device("cpu"), timeout_s=60.0)
    return train(transport, Path(folder), strategy=strategy, harm_at=harm_at, within=within).fingerprint


def asked(place: Place, folder: str, rank: int, step: int, number: int) -> tuple[Any, list[int]]:
    """Train while one rank gets a signal; return how this rank ended, and after which steps it stopped."""
    stops: list[int] = []

    def see(event: samestep.Event) -> None:
        if isinstance(event, samestep.Stopping):
            stops.append(event.step)
            assert event.reason == signal.Signals(number).name

    transport = connect(place, device=torch.device("cpu"), timeout_s=60.0)
    try:
        harm_at = step if place.rank == rank else None
        listeners = (see,) if place.rank == 0 else ()
        ended: Any = train(
            transport, Path(folder), harm_at=harm_at, number=number, listeners=listeners
        ).fingerprint
    except SystemExit as stopped:
        ended = stopped.code
    return ended, stops


def custom_loop(
    folder: Path | None, steps: int, after: Callable[[int], None] = lambda _: None, **settings: Any
) -> str:
    """A loop of one's own, with BatchNorm, clipping and a schedule; `after` is called when a step ends."""
    torch.manual_seed(0)
    images = torch.randn(48, 1, 8, 8)
    labels = (images.mean((1, 2, 3)) > 0).long()
    model: nn.Module = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpoint = samestep.Checkpointing(folder=folder) if folder else None
    with samestep.Session(seed=1, clip_norm=1.0, checkpoint=checkpoint, **settings) as session:
        model, _ = session.setup(model, optimizer, samestep.schedules.warmup_cosine(updates=steps, warmup=3))
        batching = samestep.Batching(global_batch=16, micro_batch=4)
        for batch in session.batches(TensorDataset(images, labels), batching, steps=steps):
            for micro in batch:
                with micro.collect() as record:
                    inputs, targets = micro.data
                    record(samestep.weighted(cross_entropy(model(inputs), targets, reduction="none")))
            after(session.step(batch).step)
        return session.fingerprint()
