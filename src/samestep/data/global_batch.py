"""Which samples a step owns, and how they are cut into micro-batches.

Everything here is arithmetic over (number of samples, batching settings, seed, step). The ranks do not occur
in it: they only share out the micro-batches (see `assign`).

The stream is all epochs, one after another. A cursor is a place in it, in samples: epoch e begins at
e x num_samples. What `last="drop"` leaves out is passed over, and counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from samestep.config import Batching
from samestep.config.arguments import require_count
from samestep.data.order import Order, Placing
from samestep.errors import ConfigError

_AHEAD: Final = 1024  # samples whose order is found in one go when steps are walked through


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """The samples of one forward and backward pass: entry k is sample `ids[k]` as of epoch `epochs[k]`."""

    step: int
    index: int  # within its global batch
    ids: NDArray[np.int64]
    epochs: NDArray[np.int64]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GlobalBatch:
    """All samples of one step, over all ranks, in their order."""

    step: int
    epoch: int  # of the first sample
    start: int  # cursor before this step
    cursor: int  # cursor after it
    ids: NDArray[np.int64]
    epochs: NDArray[np.int64]  # of each sample: which visit of it this is, from 0
    micro_batch: int  # samples in each micro-batch; the last one may be short

    @property
    def num_samples(self) -> int:
        """Return how many samples this step owns."""
        return len(self.ids)

    @property
    def num_micro_batches(self) -> int:
        """Return how many micro-batches the samples fill, the last one perhaps in part."""
        return _parts(len(self.ids), self.micro_batch)

    def micro(self, index: int) -> MicroBatch:
        """Return one micro-batch. Law: joined in the order of their index they are the global batch."""
        if not 0 <= index < self.num_micro_batches:
            raise ConfigError(
                f"micro-batch {index} of step {self.step} was asked for, but the step has "
                f"{self.num_micro_batches} micro-batches, counted from 0."
            )
        part = slice(index * self.micro_batch, (index + 1) * self.micro_batch)
        return MicroBatch(step=self.step, index=index, ids=self.ids[part], epochs=self.epochs[part])

    @property
    def sample_hash(self) -> str:
        """Return 16 hex digits over the sample ids in their order (BLAKE2b over little-endian int64)."""
        return hashlib.blake2b(self.ids.astype("<i8").tobytes(), digest_size=8).hexdigest()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """The global batches of a run whose steps all have one size, found at random access.

    Law: which samples step s owns depends on (num_samples, batching, seed, s) alone. With `last="keep"` and
    `"wrap"` every epoch visits each sample once; with `"drop"` each step is a full global batch, and an
    epoch leaves out the last num_samples mod global_batch places of its order. With `"wrap"` a step may
    span epochs, and a run of whole epochs ends with the samples that are left.

    Raises ConfigError where the run has no samples, no steps, or no end.

    >>> batches = Batches(
    ...     num_samples=10, batching=Batching(global_batch=4, micro_batch=3, shuffle=False), seed=0, epochs=2
    ... )
    >>> [batches.batch(step).ids.tolist() for step in range(3)], len(batches)
    ([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], 6)
    """

    num_samples: int
    batching: Batching
    seed: int
    steps: int | None = None
    epochs: int | None = None
    placing: Placing | None = field(default=None, repr=False, compare=False)  # another order than Order's
    _order: Placing = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the settings, and fix the micro-batch where it was left out."""
        if not isinstance(self.batching, Batching):
            raise ConfigError(
                f"batching is {self.batching!r}. Give samestep.Batching(global_batch=64, micro_batch=8)."
            )
        object.__setattr__(self, "batching", self.batching.resolved())
        order = Order(num_samples=self.num_samples, seed=self.seed, shuffle=self.batching.shuffle)
        object.__setattr__(self, "_order", self.placing or order)
        if (self.steps is None) == (self.epochs is None):
            found = "neither is given" if self.steps is None else "both are given"
            raise ConfigError(
                f"steps={self.steps} and epochs={self.epochs}: a run ends after a number of steps or of "
                f"epochs, and {found}. Choose one."
            )
        name, count = ("epochs", self.epochs) if self.steps is None else ("steps", self.steps)
        require_count(name, count, least=0)
        largest = self.batching.sizes.largest
        if self.batching.last == "drop" and self.num_samples < largest:
            raise ConfigError(
                f"batching.last is drop, and the data set has {self.num_samples} samples, fewer than the "
                f"global batch of {largest}: no step would ever be taken. Lower "
                f"global_batch to {self.num_samples} or less, or set last to keep or wrap."
            )

    @property
    def micro_batch(self) -> int:
        """Return the samples of a micro-batch: part of the numbers, so stored with a run."""
        chosen = self.batching.resolved().micro_batch
        assert chosen is not None
        return chosen

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps that pass over the samples once; with `last="wrap"` that is rounded up."""
        if self.batching.last == "drop":
            return self.num_samples // self.batching.global_batch
        return _parts(self.num_samples, self.batching.global_batch)

    def __len__(self) -> int:
        """Return the number of steps of the run."""
        if self.epochs is None:
            assert self.steps is not None
            return self.steps
        if self.batching.last == "wrap":
            return _parts(self.epochs * self.num_samples, self.batching.global_batch)
        return self.epochs * self.steps_per_epoch

    def batch(self, step: int) -> GlobalBatch:
        """Return the samples of one step. Raises ConfigError beyond the end of the run."""
        if not 0 <= step < len(self):
            raise ConfigError(
                f"step {step} was asked for, but the run has {len(self)} steps, counted from 0. "
                "Give more steps or epochs to go on."
            )
        return self._cut(range(step, step + 1))[0]

    def starting_at(self, step: int) -> Iterator[GlobalBatch]:
        """Return the batches from a step to the end of the run: those of `batch`, found at less cost."""
        ahead = max(1, _AHEAD // self.batching.global_batch)
        for first in range(step, len(self), ahead):
            yield from self._cut(range(first, min(first + ahead, len(self))))

    def step_at(self, cursor: int) -> int:
        """Return the step that starts at a cursor; at the cursor of the last step, the number of steps.

        Raises ConfigError where no step starts: the cursor was written with other data or other settings.
        """
        per_batch, num_samples = self.batching.global_batch, self.num_samples
        if self.batching.last == "wrap":
            step = len(self) if cursor == self.end else cursor // per_batch
        else:
            epoch, place = divmod(cursor, num_samples)
            step = epoch * self.steps_per_epoch + place // per_batch
        if cursor < 0 or cursor not in (self._span(step)[0], self.end):
            raise ConfigError(
                f"no step starts at sample {cursor} of the stream, where the run is to go on: the data set "
                f"has {num_samples} samples, the global batch {per_batch}, and last is {self.batching.last}. "
                "Resume with the data set and the batching of the run that was stopped."
            )
        return step

    def starts(self, step: int, cursor: int) -> bool:
        """Say whether a step starts at a cursor: not where sizes changed or samples were passed over."""
        return self._span(step)[0] == cursor

    @property
    def end(self) -> int | None:
        """Return the length of the stream, where it has one."""
        return None if self.epochs is None else self.epochs * self.num_samples

    def visits(self, stream: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the samples at places of the stream, and which visit of each that is; not to be changed."""
        epochs, places = np.divmod(stream, self.num_samples)
        ids, epochs = self._order.visits(epochs, places)
        for shared in (ids, epochs):
            shared.setflags(write=False)
        return ids, epochs

    def _span(self, step: int) -> tuple[int, int, int]:
        """Return where a step starts, where its samples stop, and the cursor after it."""
        if self.batching.last == "wrap":
            start = step * self.batching.global_batch
            stop = start + self.batching.global_batch
            if self.end is not None:
                stop = min(stop, self.end)
            return start, stop, stop
        epoch, number = divmod(step, self.steps_per_epoch)
        start = epoch * self.num_samples + number * self.batching.global_batch
        stop = min(start + self.batching.global_batch, (epoch + 1) * self.num_samples)
        is_last = number == self.steps_per_epoch - 1
        return start, stop, (epoch + 1) * self.num_samples if is_last else stop

    def _cut(self, steps: range) -> list[GlobalBatch]:
        spans = [self._span(step) for step in steps]
        stream = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop, _ in spans])
        ids, epochs = self.visits(stream)
        batches, taken = [], 0
        for step, (start, stop, cursor) in zip(steps, spans, strict=True):
            part = slice(taken, taken + stop - start)
            taken = part.stop
            batches.append(
                GlobalBatch(
                    step=step,
                    epoch=start // self.num_samples,
                    start=start,
                    cursor=cursor,
                    ids=ids[part],
                    epochs=epochs[part],
                    micro_batch=self.micro_batch,
                )
            )
        return batches


def _parts(count: int, size: int) -> int:
    """Return how many parts of a size hold a count, the last one perhaps short."""
    return (count + size - 1) // size
