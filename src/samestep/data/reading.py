"""What is asked of a stream for one step, and what comes back; plain values that go to a loader worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from samestep.config import Batching
from samestep.config.arguments import require_count
from samestep.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Where a stream is read, between two global batches."""

    epoch: int = 0  # the pass
    place: int = 0  # samples of this pass that are behind
    cursor: int = 0  # samples of all passes that are behind
    source: Any = None  # the stream's own state, where it has one
    is_end: bool = False  # nothing follows

    def next_pass(self) -> Reading:
        """Return the beginning of the pass after the one that was broken off, if one was."""
        return Reading(epoch=self.epoch + 1, cursor=self.cursor) if self.place else self

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Reading:
        """Return what `to_json` wrote."""
        return cls(**values)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRequest:
    """The samples of one step; the micro-batches of `run` are made of them."""

    step: int
    size: int
    begin: Reading | None = None  # where to read; None: behind the request before
    quarantine: tuple[int, ...] = ()  # places of every pass that are passed over, rising
    run: range = range(0)
    index: int = 0  # so that it reads like a micro-batch in messages


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StreamAnswer:
    """The samples of one step as the stream gave them; none at the end of the run."""

    ids: NDArray[np.int64]  # places in their passes
    epochs: NDArray[np.int64]
    start: int  # cursor before this step
    after: Reading
    word: int  # of what the first sample holds
    made: list[object]  # the micro-batches of the request's run, as far as there are samples for them


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPlan:
    """How a stream is cut into steps. Raises ConfigError for settings that no stream can follow."""

    num_samples: int | None  # of a pass, where it is known
    batching: Batching
    seed: int
    steps: int | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        """Check the settings, and fix the micro-batch where it was left out."""
        if not isinstance(self.batching, Batching):
            raise ConfigError(
                f"batching is {self.batching!r}. Give samestep.Batching(global_batch=64, micro_batch=8)."
            )
        object.__setattr__(self, "batching", self.batching.resolved())
        if self.batching.shuffle:
            raise ConfigError(
                "batching.shuffle is true, but the data set is a stream, which is read in its own order. Set "
                "shuffle to false; to mix neighbours, give samestep.data.Shuffled(stream, block=1000)."
            )
        if (self.steps is None) == (self.epochs is None):
            found = "neither is given" if self.steps is None else "both are given"
            raise ConfigError(
                f"steps={self.steps} and epochs={self.epochs}: a run ends after a number of steps or of "
                f"epochs, and {found}. Choose one."
            )
        name, count = ("epochs", self.epochs) if self.steps is None else ("steps", self.steps)
        require_count(name, count, least=0)

    @property
    def micro_batch(self) -> int:
        """Return the samples of a micro-batch: part of the numbers, so stored with a run."""
        chosen = self.batching.micro_batch
        assert chosen is not None
        return chosen

    def num_steps_from(self, step: int, reading: Reading) -> int | None:
        """Return at which step the run ends, by the length that a pass promises; None where that is open."""
        if self.steps is not None:
            return self.steps
        if self.num_samples is None or self.epochs is None or self.batching.grows:
            return None
        passes, size = self.epochs - reading.epoch, self.batching.global_batch
        if not passes:
            return step
        if self.batching.last == "wrap":
            return step + -(-(passes * self.num_samples - reading.place) // size)
        spare = 0 if self.batching.last == "drop" else size - 1
        whole, rest = self.num_samples + spare, self.num_samples - reading.place + spare
        return step + rest // size + (passes - 1) * (whole // size)


def at_end(reading: Reading) -> Reading:
    """Return the same place as one that nothing follows."""
    return replace(reading, is_end=True)
