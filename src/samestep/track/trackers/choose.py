"""From the names in a recipe to trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from samestep.config import nearest
from samestep.errors import ConfigError
from samestep.events import Event
from samestep.track.trackers.guard import Warn
from samestep.track.trackers.mlflow import MLflow
from samestep.track.trackers.tensorboard import TensorBoard
from samestep.track.trackers.wandb import WandB


class Tracker(Protocol):
    """A listener of events that is closed at the end."""

    def __call__(self, event: Event) -> None:
        """Log an event."""

    def close(self) -> None:
        """Finish what was begun."""


def trackers(names: Sequence[str], folder: Path, *, warn: Warn | None = None) -> list[Tracker]:
    """Return the trackers of these names, which keep what they write in the run folder; for the first rank.

    Raises ConfigError for an unknown name, a name that stands twice, and a package that is missing.
    """
    made: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard", warn=warn),
        "mlflow": lambda: MLflow(folder, warn=warn),
        "wandb": lambda: WandB(folder, warn=warn),
    }
    for name in names:
        if name not in made:
            raise ConfigError(f"track names {name!r}.{nearest(name, made)} Known: {', '.join(made)}.")
    if len(set(names)) < len(names):
        raise ConfigError(f"track is {list(names)}: each name stands once.")
    return [made[name]() for name in names]
