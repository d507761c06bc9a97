"""Replicated parameters: every rank holds the whole gradient sum and makes the whole update."""

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
class Replicate:
    """One full copy of parameters and optimizer state per rank.

    Memory per rank: parameters, one gradient copy, and up to log2(leaves per rank) further ones.
    """

    name = "replicate"

    def __init__(
        self, store: ParameterStore, collector: Collector, reduction: Reduction, transport: Transport
    ) -> None:
        self._sync = GradientSync(store.layout, collector, reduction, transport, everywhere=True)

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
        """Collective. Leave the whole sum on every rank."""
        return self._sync.reduce(inspect)

    def updated(self, rank: int) -> list[tuple[int, int, int]]:  # noqa: ARG002
        """Return everything: each rank updates all parameters."""
        return [(number, 0, flat.numel) for number, flat in enumerate(self._sync.layout.flats)]

    def publish(self) -> None:
        """Do nothing: every rank made the same update."""

    def close(self) -> None:
        """Take the hooks off the model."""
        self._sync.close()
