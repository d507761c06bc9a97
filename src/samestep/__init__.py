"""samestep: train PyTorch models on any number of devices, and end in the same bits.

Names are imported when they are first used, so that `samestep --help` and the processes that only
supervise ranks do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samestep import data, schedules
    from samestep.callbacks.callback import Callback, RunControl
    from samestep.callbacks.evaluations import BestCheckpoint, EarlyStopping
    from samestep.callbacks.noise_scale import GradientNoiseScale
    from samestep.callbacks.spikes import SpikeWatch
    from samestep.checkpoint.weights import LoadReport, load_weights
    from samestep.config import Batching
    from samestep.config.checkpointing import Checkpointing
    from samestep.errors import (
        CallbackError,
        CheckpointError,
        ClusterError,
        ConfigError,
        DataError,
        Disagreement,
        LossError,
        NonFinite,
        NotReproducible,
        PeerLost,
        SamestepError,
        TimedOut,
    )
    from samestep.events import (
        CheckpointFailed,
        CheckpointSaved,
        Evaluated,
        Event,
        Notice,
        Phases,
        Quarantined,
        Resumed,
        RunEnded,
        RunStarted,
        StepReport,
        Stopping,
        TermReport,
    )
    from samestep.loop.evaluate import Evaluation
    from samestep.loop.session import Session
    from samestep.loop.weighted import Weighted, weighted
    from samestep.optim.ema import EMA
    from samestep.precision.policy import Precision
    from samestep.track.trackers.mlflow import MLflow
    from samestep.track.trackers.tensorboard import TensorBoard
    from samestep.track.trackers.wandb import WandB
    from samestep.trainer import Result, train

_HOMES = {
    "Batching": "samestep.config",
    "BestCheckpoint": "samestep.callbacks.evaluations",
    "Callback": "samestep.callbacks.callback",
    "CallbackError": "samestep.errors",
    "CheckpointError": "samestep.errors",
    "CheckpointFailed": "samestep.events",
    "CheckpointSaved": "samestep.events",
    "Checkpointing": "samestep.config.checkpointing",
    "ClusterError": "samestep.errors",
    "ConfigError": "samestep.errors",
    "DataError": "samestep.errors",
    "Disagreement": "samestep.errors",
    "EMA": "samestep.optim.ema",
    "EarlyStopping": "samestep.callbacks.evaluations",
    "Evaluated": "samestep.events",
    "Evaluation": "samestep.loop.evaluate",
    "Event": "samestep.events",
    "GradientNoiseScale": "samestep.callbacks.noise_scale",
    "LoadReport": "samestep.checkpoint.weights",
    "LossError": "samestep.errors",
    "MLflow": "samestep.track.trackers.mlflow",
    "NonFinite": "samestep.errors",
    "NotReproducible": "samestep.errors",
    "Notice": "samestep.events",
    "PeerLost": "samestep.errors",
    "Phases": "samestep.events",
    "Precision": "samestep.precision.policy",
    "Quarantined": "samestep.events",
    "Result": "samestep.trainer",
    "Resumed": "samestep.events",
    "RunControl": "samestep.callbacks.callback",
    "RunEnded": "samestep.events",
    "RunStarted": "samestep.events",
    "SamestepError": "samestep.errors",
    "Session": "samestep.loop.session",
    "SpikeWatch": "samestep.callbacks.spikes",
    "StepReport": "samestep.events",
    "Stopping": "samestep.events",
    "TensorBoard": "samestep.track.trackers.tensorboard",
    "TermReport": "samestep.events",
    "TimedOut": "samestep.errors",
    "WandB": "samestep.track.trackers.wandb",
    "Weighted": "samestep.loop.weighted",
    "load_weights": "samestep.checkpoint.weights",
    "train": "samestep.trainer",
    "weighted": "samestep.loop.weighted",
}

__all__ = [
    "EMA",
    "Batching",
    "BestCheckpoint",
    "Callback",
    "CallbackError",
    "CheckpointError",
    "CheckpointFailed",
    "CheckpointSaved",
    "Checkpointing",
    "ClusterError",
    "ConfigError",
    "DataError",
    "Disagreement",
    "EarlyStopping",
    "Evaluated",
    "Evaluation",
    "Event",
    "GradientNoiseScale",
    "LoadReport",
    "LossError",
    "MLflow",
    "NonFinite",
    "NotReproducible",
    "Notice",
    "PeerLost",
    "Phases",
    "Precision",
    "Quarantined",
    "Result",
    "Resumed",
    "RunControl",
    "RunEnded",
    "RunStarted",
    "SamestepError",
    "Session",
    "SpikeWatch",
    "StepReport",
    "Stopping",
    "TensorBoard",
    "TermReport",
    "TimedOut",
    "WandB",
    "Weighted",
    "data",
    "load_weights",
    "schedules",
    "train",
    "weighted",
]


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name in ("data", "schedules"):
        return import_module(f"samestep.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
