"""samestep: train PyTorch models on any number of devices, and end in the same bits.

Names are imported when they are first used, so that `samestep --help` and the processes that only
supervise ranks do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samestep import schedules
    from samestep.config import Batching
    from samestep.errors import (
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
    from samestep.events import Evaluated, Event, Notice, RunEnded, RunStarted, StepReport, TermReport
    from samestep.loop.evaluate import Evaluation
    from samestep.loop.session import Session
    from samestep.loop.weighted import Weighted, weighted
    from samestep.precision.policy import Precision
    from samestep.trainer import Result, train

_HOMES = {
    "Batching": "samestep.config",
    "ClusterError": "samestep.errors",
    "ConfigError": "samestep.errors",
    "DataError": "samestep.errors",
    "Disagreement": "samestep.errors",
    "Evaluated": "samestep.events",
    "Evaluation": "samestep.loop.evaluate",
    "Event": "samestep.events",
    "LossError": "samestep.errors",
    "NonFinite": "samestep.errors",
    "NotReproducible": "samestep.errors",
    "Notice": "samestep.events",
    "PeerLost": "samestep.errors",
    "Precision": "samestep.precision.policy",
    "Result": "samestep.trainer",
    "RunEnded": "samestep.events",
    "RunStarted": "samestep.events",
    "SamestepError": "samestep.errors",
    "Session": "samestep.loop.session",
    "StepReport": "samestep.events",
    "TermReport": "samestep.events",
    "TimedOut": "samestep.errors",
    "Weighted": "samestep.loop.weighted",
    "train": "samestep.trainer",
    "weighted": "samestep.loop.weighted",
}

__all__ = [
    "Batching",
    "ClusterError",
    "ConfigError",
    "DataError",
    "Disagreement",
    "Evaluated",
    "Evaluation",
    "Event",
    "LossError",
    "NonFinite",
    "NotReproducible",
    "Notice",
    "PeerLost",
    "Precision",
    "Result",
    "RunEnded",
    "RunStarted",
    "SamestepError",
    "Session",
    "StepReport",
    "TermReport",
    "TimedOut",
    "Weighted",
    "schedules",
    "train",
    "weighted",
]


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name == "schedules":
        return import_module("samestep.schedules")
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
