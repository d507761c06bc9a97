"""samestep: train PyTorch models on any number of devices, and end in the same bits."""

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
from samestep.events import Event, Notice, RunEnded, RunStarted, StepReport
from samestep.loop.session import Session
from samestep.loop.weighted import Weighted, weighted
from samestep.precision.policy import Precision
from samestep.trainer import Result, train

__all__ = [
    "Batching",
    "ClusterError",
    "ConfigError",
    "DataError",
    "Disagreement",
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
    "TimedOut",
    "Weighted",
    "schedules",
    "train",
    "weighted",
]
