"""ZeRO stage 1: the optimizer state is sharded; each rank updates the parameters it owns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import final

from samestep.comm.transport import Transport
from samestep.sync.collector import Collector
from samestep.sync.reduction import Reduction
from samestep.sync.storage import ParameterStore
from samestep.sync.strategy import GradientSync, Inspect, Reduced


@final
class Zero1:
    """Each rank keeps the optimizer state of the tiles it owns, 1/N of it, and sends out what it updated."""

    name = "zero1"

    def __init__(
        self, store: ParameterStore, collector: Collector, reduction: Reduction, transport: Transport
    ) -> None:
        self._store = store
        self._transport = transport
        self._sync = GradientSync(store.layout, collector, reduction, transport, everywhere=False)

    def begin(self, runs: Sequence[range], num_leaves: int) -> None:
        """Start a step."""
        self._sync.begin(runs, num_leaves)

    def collect(self, leaf: int) -> AbstractContextManager[None]:
        """Take the gradients made inside the block as those of one micro-batch."""
        return self._sync.collect(leaf)

    def drop(self) -> None:
        """Collective. Give up the step that was begun."""
        self._sync.drop()

    def reduce(self, inspect: Inspect) -> Reduced:
        """Collective. Leave each owner's part of the sum with its owner."""
        return self._sync.reduce(inspect)

    def updated(self, rank: int) -> list[tuple[int, int, int]]:
        """Return the parts that a rank owns."""
        return self._sync.layout.owned(rank)

    def publish(self) -> None:
        """Collective. Send the updated parameters from their owners to all."""
        works = []
        for bucket in self._sync.layout.buckets:
            flat = self._store.flats[bucket.flat]
            parts = [flat[slice(*cut)] for cut in bucket.cuts]
            works.append(self._transport.gather(parts[self._transport.rank], parts))
        for work in works:
            work.wait()

    def close(self) -> None:
        """Take the hooks off the model."""
        self._sync.close()
