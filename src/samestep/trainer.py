"""`samestep.train`: the wiring of a whole run, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from samestep.checkpoint.state import save_state
from samestep.comm.transport import Transport
from samestep.config import Batching
from samestep.config.arguments import require_callable, require_callables
from samestep.events import Evaluated, Event, Notice, RunEnded, StepReport
from samestep.loop.evaluate import Evaluation
from samestep.loop.session import Listener, Session
from samestep.loop.step import take_step
from samestep.loop.terms import LossFunction
from samestep.loop.trainables import OptimizerLike
from samestep.optim.rates import ScheduleLike
from samestep.precision.policy import Precision
from samestep.track.folder import STATE, RunFolder, refuse_used


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to, the same on every rank."""

    fingerprint: str  # SHA-256 over parameters and buffers, 64 hex digits
    step: int  # steps taken, applied or skipped
    applied: int  # updates
    loss: float | None  # of the last step that had a weight
    history: list[StepReport]
    model: nn.Module
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    folder: Path | None = None


def train(
    model: nn.Module,
    dataset: Any,
    loss: LossFunction,
    *,
    optimizer: OptimizerLike,
    batching: Batching,
    steps: int | None = None,
    epochs: int | None = None,
    schedule: ScheduleLike | None = None,
    clip_norm: float | None = None,
    precision: str | Precision = "fp32",
    strategy: str = "replicate",
    reduction: Literal["ordered", "fast"] = "ordered",
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loader_workers: int = 0,
    weights: Callable[[Any], Any] | None = None,
    evaluate: Evaluation | None = None,
    seed: int = 0,
    threads: int = 1,
    digest_every: int = 10,
    callbacks: Sequence[Callable[[Event], None]] = (),
    listeners: Sequence[Listener] = (),
    folder: Path | str | None = None,
    transport: Transport | None = None,
    device: torch.device | None = None,
    timeout_s: float = 300.0,
) -> Result:
    """Collective. Train a model, and end in the same bits on any number of ranks.

    `loss(model, batch)` gets one collated micro-batch and returns samestep.weighted(values, weight), or a
    dict of such terms. `callbacks` are called with every event on every rank, `listeners` on the first rank
    only. In `folder` the first rank keeps the ledger, the events and the final state; it must hold no run
    yet. The process takes its rank from the launcher that started it; alone it is a run of one rank.

    Raises ConfigError for wrong settings, LossError for a loss that has no global meaning, DataError for a
    data set that fails, NonFinite for a gradient that is not finite, ClusterError for a lost rank.
    """
    require_callable("loss", loss, use="loss(model, batch) returns samestep.weighted(values, weight)")
    require_callables("callbacks", callbacks, use="each is given every event, on every rank")
    require_callables("listeners", listeners, use="each is given every event, on the first rank")
    folder = None if folder is None else Path(folder)
    history: list[StepReport] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepReport):
            history.append(event)
        for callback in callbacks:
            callback(event)
        if session.first:
            for listener in listeners:
                listener(event)
            if not listeners and isinstance(event, Notice) and event.level == "warning":
                sys.stderr.write(f"samestep: {event.message}\n")  # else nobody would hear of it

    session = Session(
        seed=seed,
        precision=precision,
        strategy=strategy,
        reduction=reduction,
        clip_norm=clip_norm,
        digest_every=digest_every,
        threads=threads,
        transport=transport,
        device=device,
        timeout_s=timeout_s,
        listeners=[listen],
    )
    with session, ExitStack() as kept:
        if folder is not None and session.first:
            refuse_used(folder)
            listeners = [*listeners, kept.enter_context(RunFolder(folder))]
        model, _ = session.setup(model, optimizer, schedule)
        batches = session.batches(
            dataset,
            batching,
            steps=steps,
            epochs=epochs,
            collate_fn=collate_fn,
            loader_workers=loader_workers,
            weights=weights,
        )
        metrics: dict[str, float] = {}
        for batch in batches:
            take_step(session, batch, loss)
            if evaluate is not None and evaluate.due(batch.step, is_last=batch.is_last):
                metrics = session.evaluate(evaluate)
                listen(Evaluated(step=batch.step, metrics=metrics))
        fingerprint = session.agreed_fingerprint()
        applied = history[-1].update if history else 0
        if folder is not None and session.first:
            save_state(model, folder / STATE)
        listen(RunEnded(step=len(history), update=applied, fingerprint=fingerprint))
    return Result(
        fingerprint=fingerprint,
        step=len(history),
        applied=applied,
        loss=next((report.loss for report in reversed(history) if report.loss is not None), None),
        history=history,
        metrics=metrics,
        model=model,
        folder=folder,
    )
