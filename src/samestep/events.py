"""Frozen records of what happened: what listeners (console, ledger, callbacks) are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True, slots=True)
class TermReport:
    """One loss term of a step: its global mean, the weight that divided it, and what it adds to the loss."""

    loss: float
    weight: float
    contribution: float  # the mean times the term's coefficient


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One finished step, the same on every rank but for `seconds`."""

    step: int  # 0, 1, ...: applied or skipped
    update: int  # applied updates after this step
    epoch: int  # of the first sample of this step
    cursor: int  # samples of the stream that are consumed after this step
    samples: int  # in this global batch
    sample_hash: str  # 16 hex digits over the sample ids in their order
    micro_batches: int
    weight: float  # the divisor: the sum of all weights (several terms: of the first)
    loss: float | None  # global weighted mean; None where the weight is zero
    terms: dict[str, TermReport] = field(default_factory=dict)  # only where the loss has names
    grad_norm: float | None  # after dividing, before clipping; None where the step has no gradient
    learning_rate: float  # of the first parameter group, as used (or, when skipped, not used) in this step
    applied: bool
    skipped: str | None = None  # why, where `applied` is false
    loss_scale: float | None = None  # only where a loss scale is in use
    generation: int = 0
    world_size: int = 1
    digest: str | None = None  # 16 hex digits over parameters and buffers, every `digest_every` steps
    seconds: float = 0.0  # wall time of this step on this rank, data included


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The metrics after a step: weighted means over all samples of the evaluation."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """Training is about to begin; `facts` are the resolved settings, for people and for run.json."""

    world_size: int
    steps: int | None
    facts: dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """Something the user may not expect: a choice made for him, or a repair."""

    level: str  # "info" or "warning"
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded:
    """Training is over; the fingerprint covers parameters and buffers."""

    step: int
    update: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaved:
    """A whole checkpoint lies in its place."""

    step: int  # steps that were taken when its state was copied
    folder: str
    num_bytes: int
    stall_seconds: (
        float  # for which training stood still: a copy of the state, and an unfinished write before
    )
    write_seconds: float  # from the copy to the commit, beside training
    reason: str  # "every 50 steps", "SIGTERM", "the end of the run", the name of a callback


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFailed:
    """A checkpoint could not be written; training goes on, and the ones before it are whole."""

    step: int
    folder: str
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The run goes on from a checkpoint."""

    step: int
    update: int
    folder: str
    world_size_before: int
    broken_key: dict[str, str] = field(default_factory=dict)  # numerics key: what is not as it was, and how


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping:
    """All ranks end the run after this step, before its planned end."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """Samples that the run passes over from now on; later global batches are filled up behind them."""

    step: int
    ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Where the wall time of a step went on this rank, in seconds; every rank has its own."""

    step: int
    rank: int
    seconds: dict[str, float]  # data, forward, backward, communication (exposed), update, checkpoint, other


Event: TypeAlias = (
    StepReport
    | Evaluated
    | RunStarted
    | Notice
    | RunEnded
    | CheckpointSaved
    | CheckpointFailed
    | Resumed
    | Stopping
    | Quarantined
    | Phases
)
