"""`samestep.train`: the wiring of a whole run, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.audience import Audience
from samestep.callbacks.dispatch import CallbackLike
from samestep.checkpoint.state import save_state
from samestep.comm.transport import Transport
from samestep.config import Batching
from samestep.config.arguments import require_callable, require_callables
from samestep.config.checkpointing import Checkpointing
from samestep.events import Evaluated, RunEnded, StepReport
from samestep.loop.batches import LoadedBatch
from samestep.loop.evaluate import Evaluation
from samestep.loop.session import Listener, Session
from samestep.loop.step import take_step
from samestep.loop.terms import LossFunction
from samestep.loop.trainables import OptimizerLike
from samestep.optim.ema import EMA
from samestep.optim.rates import ScheduleLike
from samestep.precision.policy import Precision
from samestep.track.folder import CHECKPOINTS, STATE


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
    ema: dict[str, Tensor] | None = None  # the averaged weights by parameter, where they are kept
    ema_moves: int = 0  # how often that average has moved


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
    ema: float | EMA | None = None,
    evaluate: Evaluation | None = None,
    checkpoint: Checkpointing | None = None,
    resume: str | Path = "auto",
    seed: int = 0,
    threads: int = 1,
    digest_every: int = 10,
    callbacks: Sequence[CallbackLike] = (),
    listeners: Sequence[Listener] = (),
    folder: Path | str | None = None,
    track: Sequence[str] = (),
    transport: Transport | None = None,
    device: torch.device | None = None,
    timeout_s: float = 300.0,
) -> Result:
    """Collective. Train a model, and end in the same bits on any number of ranks, stopped or not.

    `loss(model, batch)` gets one collated micro-batch and returns samestep.weighted(values, weight), or a
    dict of such terms. `callbacks` are samestep.Callback objects, or functions of an event, which are called
    on every rank; `listeners` get every event on the first rank only. In `folder` the first rank keeps the
    ledger, the events, the report and the final state, and what `track` names ("tensorboard", "mlflow",
    "wandb"). It may hold a run already only where `checkpoint` lets that run go on. The process takes its
    rank from the launcher that started it; alone it is a run of one rank.

    Raises ConfigError for wrong settings, LossError for a loss that has no global meaning, DataError for a
    data set that fails, NonFinite for a gradient that is not finite, CallbackError for a callback that fails
    or blocks, ClusterError for a lost rank, and SystemExit with code 3 where a signal asked to store the
    state and go.
    """
    require_callable("loss", loss, use="loss(model, batch) returns samestep.weighted(values, weight)")
    require_callables("listeners", listeners, use="each is given every event, on the first rank")
    folder = None if folder is None else Path(folder)
    audience = Audience(callbacks, listeners, folder, track=track, timeout_s=timeout_s)
    session = Session(
        seed=seed,
        precision=audience.suited(precision),
        strategy=strategy,
        reduction=reduction,
        clip_norm=clip_norm,
        ema=ema,
        checkpoint=_in_run_folder(checkpoint, folder),
        resume=resume,
        digest_every=digest_every,
        threads=threads,
        transport=transport,
        device=device,
        timeout_s=timeout_s,
        listeners=[audience],
    )
    with session, audience.attending(session) as attending:
        model, made = session.setup(model, optimizer, schedule)
        attending.attach(model, made)
        if attending.needs_noise:
            session.measure_noise()
        batches = session.batches(
            dataset,
            batching,
            steps=steps,
            epochs=epochs,
            collate_fn=collate_fn,
            loader_workers=loader_workers,
            weights=weights,
        )
        for batch in batches:
            audience.expect(batch)
            take_step(session, batch, loss)
            if evaluate is not None and _is_due(evaluate, batch, session):
                audience(Evaluated(step=batch.step, metrics=session.evaluate(evaluate)))
                session.persistence.decide()
        return _conclude(session, audience)


def _is_due(evaluation: Evaluation, batch: LoadedBatch, session: Session) -> bool:
    return session.persistence.take_evaluation() or evaluation.due(batch.step, is_last=batch.is_last)


def _conclude(session: Session, audience: Audience) -> Result:
    """Collective. Store the last state, and say what the run came to."""
    session.conclude()
    model, history, folder = session.model, audience.history, audience.folder
    average = session.average
    fingerprint = session.agreed_fingerprint()
    if folder is not None and session.first:
        save_state(model, folder / STATE)
    audience(RunEnded(step=session.step_number, update=session.update, fingerprint=fingerprint))
    return Result(
        fingerprint=fingerprint,
        step=session.step_number,
        applied=session.update,
        loss=next((report.loss for report in reversed(history) if report.loss is not None), None),
        history=history,
        metrics=session.persistence.metrics,
        model=model,
        folder=folder,
        ema=average.gathered() if average else None,
        ema_moves=average.moves if average else 0,
    )


def _in_run_folder(checkpoint: Checkpointing | None, folder: Path | None) -> Checkpointing | None:
    """Let checkpoints lie in the run folder, where no folder of their own is named."""
    if not isinstance(checkpoint, Checkpointing) or checkpoint.folder is not None or folder is None:
        return checkpoint
    return checkpoint.model_copy(update={"folder": folder / CHECKPOINTS})
