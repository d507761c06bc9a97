"""The global batch of the next step, from where a run stands: with sizes that grow, and samples left out.

While the steps have one size and no sample is in quarantine, step s is found by arithmetic (`Batches`). Else
a step is found from the cursor at which it begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from samestep.data.global_batch import Batches, GlobalBatch
from samestep.errors import DataError

Ids: TypeAlias = NDArray[np.int64]
_AHEAD: Final = 1024  # places that are found in one go


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a run stands between two steps."""

    step: int = 0  # the next one
    cursor: int = 0  # the place of the stream from which it takes its samples
    update: int = 0  # updates that were applied


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """Finds global batches from where a run stands.

    Law: the next global batch is a pure function of (num_samples, batching, seed, quarantine, standing). It
    has `batching.sizes(update)` samples: those at the next places of the stream that are not in quarantine.
    The cursor counts the places of passed-over samples too. Of the others none is left out but by
    `last="drop"`, which drops the end of an epoch that is too short for a step, and none comes twice.
    """

    batches: Batches  # where the run ends, and the order
    quarantine: tuple[int, ...] = ()  # rising
    _passed: Ids = field(init=False, repr=False, compare=False)
    _found: list[_Places] = field(default_factory=list, init=False, repr=False, compare=False)  # last, if any

    def __post_init__(self) -> None:
        """Raise DataError where no sample is left."""
        object.__setattr__(self, "_passed", np.array(self.quarantine, dtype=np.int64))
        least = self.batches.batching.sizes.largest if self.batches.batching.last == "drop" else 1
        left = self.batches.num_samples - len(self.quarantine)
        if self.quarantine and left < least:
            raise DataError(
                f"{len(self.quarantine)} of {self.batches.num_samples} samples are in quarantine: {left} are "
                f"left, and a step takes {least} or more. The fault is hardly in the samples: look at the "
                "loss, the learning rate and the precision."
            )

    def is_regular(self, standing: Standing) -> bool:
        """Say whether all further steps are found by arithmetic."""
        regular = not self.quarantine and not self.batches.batching.grows
        return regular and self.batches.starts(standing.step, standing.cursor)

    def num_steps(self, standing: Standing) -> int | None:
        """Return at which step the run ends, where that is known before it is there."""
        if self.batches.steps is not None or self.is_regular(standing):
            return len(self.batches)
        return None

    def ahead(self, standing: Standing) -> Iterator[GlobalBatch]:
        """Yield the global batches to the end of the run, as they are if every step is applied."""
        if self.is_regular(standing):
            yield from self.batches.starting_at(standing.step)
            return
        while (batch := self.at(standing)) is not None:
            yield batch
            standing = Standing(step=batch.step + 1, cursor=batch.cursor, update=standing.update + 1)

    def at(self, standing: Standing) -> GlobalBatch | None:
        """Return the next global batch, or None at the end of the run."""
        batches = self.batches
        if self.is_regular(standing):
            return batches.batch(standing.step) if standing.step < len(batches) else None
        if batches.steps is not None and standing.step >= batches.steps:
            return None
        size = batches.batching.sizes(standing.update)
        if batches.batching.last == "wrap":
            return self._take(standing, size, least=1, worth=1, stop=batches.end)
        is_drop = batches.batching.last == "drop"
        least = size if is_drop else 1
        worth = self._smallest_from(standing.update) if is_drop else 1
        cursor, num_samples = standing.cursor, batches.num_samples
        while batches.end is None or cursor < batches.end:
            end_of_epoch = (cursor // num_samples + 1) * num_samples
            from_here = replace(standing, cursor=cursor)
            batch = self._take(from_here, size, least=least, worth=worth, stop=end_of_epoch)
            if batch is not None:
                return replace(batch, start=standing.cursor)
            cursor = end_of_epoch
        return None

    def is_last(self, batch: GlobalBatch, update: int) -> bool:
        """Say whether the run ends after a batch, if that becomes update number `update`."""
        after = Standing(step=batch.step + 1, cursor=batch.cursor, update=update)
        if (num_steps := self.num_steps(after)) is not None:
            return after.step >= num_steps
        return after.cursor == self.batches.end or self.at(after) is None

    def _smallest_from(self, update: int) -> int:
        """Return the smallest global batch that a step may have from an update on."""
        sizes = self.batches.batching.sizes
        return min([sizes(update), *(size for first, size in sizes.table if first > update)])

    def _take(
        self, standing: Standing, size: int, *, least: int, worth: int, stop: int | None
    ) -> GlobalBatch | None:
        """Cut a batch out of the places up to `stop`; None where `least` samples are not there.

        Fewer than `worth` samples behind it make no step, and are passed over with it.
        """
        usable = self._usable(standing.cursor, stop, at_least=size + worth)
        places = usable.places
        if len(places) < least:
            return None
        is_end = usable.is_all and len(places) - size < worth
        if is_end and stop is not None:
            cursor = stop  # what is left there makes no step
        else:
            cursor = int(places[min(size, len(places)) - 1]) + 1
        return GlobalBatch(
            step=standing.step,
            epoch=int(places[0]) // self.batches.num_samples,
            start=standing.cursor,
            cursor=cursor,
            ids=usable.ids[:size],
            epochs=usable.epochs[:size],
            micro_batch=self.batches.micro_batch,
        )

    def _usable(self, start: int, stop: int | None, *, at_least: int) -> _Places:
        """Return places from `start` on that are not passed over: as many, unless `stop` comes before."""
        if self._found and self._found[0].covers(start, stop):
            rest = self._found[0].after(start)
            if rest.is_all or len(rest.places) >= at_least:
                return rest
        found = self._find(start, stop, at_least=max(at_least, _AHEAD))
        self._found[:] = [found]
        return found

    def _find(self, start: int, stop: int | None, *, at_least: int) -> _Places:
        width = at_least + len(self.quarantine)
        while True:
            end = start + width if stop is None else min(start + width, stop)
            places = np.arange(start, end, dtype=np.int64)
            ids, epochs = self.batches.visits(places)
            if self.quarantine:
                use = ~np.isin(ids, self._passed)
                places, ids, epochs = places[use], ids[use], epochs[use]
                for shared in (ids, epochs):
                    shared.setflags(write=False)
            if end == stop or len(places) >= at_least:
                return _Places(start, stop, places, ids, epochs, is_all=end == stop)
            width *= 2


def planned_steps(batches: Batches) -> int:
    """Return the steps of a run from its first one on, if every step is applied and no sample is left out."""
    if batches.steps is not None or not batches.batching.grows:
        return len(batches)
    sizes, last = batches.batching.sizes, batches.batching.last
    assert batches.epochs is not None
    stretch = batches.epochs * batches.num_samples if last == "wrap" else batches.num_samples
    steps = 0
    for _ in range(1 if last == "wrap" else batches.epochs):
        left = stretch
        while left > 0 and (last != "drop" or left >= sizes(steps)):
            left -= sizes(steps)
            steps += 1
    return steps


@final
@dataclass(frozen=True, slots=True)
class _Places:
    """Places of the stream from `start` on that are not passed over, up to `stop` if it is all of them."""

    start: int
    stop: int | None
    places: Ids
    ids: Ids
    epochs: Ids
    is_all: bool

    def covers(self, start: int, stop: int | None) -> bool:
        return self.stop == stop and self.start <= start

    def after(self, start: int) -> _Places:
        first = int(np.searchsorted(self.places, start))
        return _Places(
            start, self.stop, self.places[first:], self.ids[first:], self.epochs[first:], self.is_all
        )
