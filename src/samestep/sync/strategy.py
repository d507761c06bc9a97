"""A strategy: which rank holds which part of the gradient sum, and which parameters it updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, final

from torch import Tensor

from samestep.comm.transport import Transport, Work
from samestep.errors import InternalError
from samestep.sync.collector import Collector
from samestep.sync.layout import Bucket, Layout
from samestep.sync.reduction import Pending, Reduction
from samestep.sync.storage import GradientBuffer

# How many buckets may be under way: bounds the memory for what peers send, whatever the model's size.
WINDOW = 8

Inspect = Callable[[int, int, Tensor], None]  # flat, first element, the folded part this rank owns


class Strategy(Protocol):
    """Replicated or sharded: the step is the same."""

    name: str

    def begin(self, runs: Sequence[range], num_leaves: int) -> None:
        """Start a step with this assignment of leaves to ranks."""

    def drop(self) -> None:
        """Collective. Give up a step that was begun, so that nothing of it is under way."""

    def collect(self, leaf: int) -> AbstractContextManager[None]:
        """Take the gradients made inside the block as those of one micro-batch."""

    def reduce(self, inspect: Inspect) -> Reduced:
        """Collective. Form the ordered sum over all leaves; `inspect` sees each part owned here once."""

    def updated(self, rank: int) -> list[tuple[int, int, int]]:
        """Return the (flat, start, stop) that the optimizer of a rank updates."""

    def publish(self) -> None:
        """Collective. Make the updated parameters known to all ranks."""

    def close(self) -> None:
        """Take the hooks off the model."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """The sum over the global batch."""

    gradient: GradientBuffer  # holds the sum in the elements that this rank updates
    used: bytearray  # by parameter: 1 where a leaf of this rank made a gradient


class Phase(Enum):
    """Where a step stands."""

    IDLE = auto()  # before the first step and after each reduce
    COLLECTING = auto()  # from begin until reduce or drop is called


@final
class BucketQueue:
    """Sends buckets in their fixed order as they become ready, and folds them in that order.

    The order is the same on every rank, whatever the order in which gradients are made: a rank whose
    micro-batches skip a branch still meets its peers bucket by bucket.

    Note [buckets under way]: no other collective may be called while a bucket is, or they cross. A rank that
    has collected micro-batches knows that and refuses. A rank without any cannot know how far its peers are,
    so where there is one, all hold their buckets back until `finish`.
    """

    def __init__(self, layout: Layout, reduction: Reduction) -> None:
        self._layout = layout
        self._reduction = reduction
        self._finished_a_step = False
        self._early = False  # whether buckets are sent while micro-batches are still computed, on all ranks
        self._held: list[GradientBuffer] = []
        self._result: GradientBuffer | None = None
        self._is_ready = bytearray(0)
        self._pending: dict[int, Pending] = {}
        self._started = 0

    def begin(self, held: list[GradientBuffer], result: GradientBuffer, *, early: bool) -> None:
        """Start a step whose partial sums will lie in these buffers; `early` must be alike on all ranks."""
        if self._pending:
            raise InternalError("a step was begun while buckets of another are under way.")
        self._held, self._result = held, result
        # In the first step ranks still have things to agree on, and collectives must not cross.
        self._early = early and self._finished_a_step
        self._is_ready = bytearray(len(self._layout.buckets))
        self._pending = {}
        self._started = 0

    def ready(self, bucket: Bucket) -> None:
        """Note that a bucket holds its final partial sums; never blocks."""
        self._is_ready[bucket.index] = 1
        if self._early:
            self._start(limit=WINDOW)

    def finish(self, folded: Callable[[Bucket], None]) -> None:
        """Collective. Fold every bucket and call `folded` for each, in order."""
        self._is_ready = bytearray(b"\1" * len(self._layout.buckets))
        for bucket in self._layout.buckets:
            self._start(limit=bucket.index + WINDOW)
            self._pending.pop(bucket.index).finish()
            folded(bucket)
        self._finished_a_step = True

    def drain(self) -> None:
        """Collective. Complete all that any rank may have sent of a step that is given up."""
        if not self._early:
            return
        early = self._layout.buckets[:WINDOW]
        for bucket in early:
            self._is_ready[bucket.index] = 1
        self._start(limit=WINDOW)
        for bucket in early:
            self._pending.pop(bucket.index).finish()

    def _start(self, *, limit: int) -> None:
        if self._result is None:
            raise InternalError("a bucket is ready, but no step was begun.")
        while self._started < min(limit, len(self._is_ready)) and self._is_ready[self._started]:
            bucket = self._layout.buckets[self._started]
            self._pending[bucket.index] = self._reduction.start(bucket, self._held, self._result)
            self._started += 1


@final
class GradientSync:
    """Collect and reduce: what all strategies share."""

    def __init__(
        self,
        layout: Layout,
        collector: Collector,
        reduction: Reduction,
        transport: Transport,
        *,
        everywhere: bool,
    ) -> None:
        self.layout = layout
        self._collector = collector
        self._reduction = reduction
        self._transport = transport
        self._everywhere = everywhere
        self._queue = BucketQueue(layout, reduction)
        self._phase = Phase.IDLE
        self._result: GradientBuffer | None = None

    def begin(self, runs: Sequence[range], num_leaves: int) -> None:
        """Start a step, or the one that was begun anew; of that nothing may have been recorded."""
        run = runs[self._transport.rank]
        plan = self._reduction.plan(run, num_leaves)
        self._reduction.begin(runs, num_leaves)
        self._collector.begin(plan, self._queue.ready)
        buffers = self._collector.buffers
        self._result = buffers[plan.result]
        everybody_has_leaves = all(len(one) > 0 for one in runs)
        kept = [buffers[number] for number in plan.kept]
        self._queue.begin(kept, self._result, early=everybody_has_leaves)  # Note [buckets under way]
        if not run and self._reduction.leaves_result_everywhere:
            for flat in self._result.flats:
                flat.zero_()  # takes part in the backend's sum with nothing
        self._phase = Phase.COLLECTING

    def collect(self, leaf: int) -> AbstractContextManager[None]:
        """Return the block whose gradients are this leaf's."""
        if self._phase is not Phase.COLLECTING:
            raise InternalError("a micro-batch was collected outside a step.")
        return self._collector.leaf(leaf)

    def reduce(self, inspect: Inspect) -> Reduced:
        """Collective. Fold all buckets; where asked, give every rank the whole sum."""
        result = self._result
        if self._phase is not Phase.COLLECTING or result is None:
            raise InternalError("reduce was called, but no step was begun.")
        self._phase = Phase.IDLE
        self._collector.end()
        rank = self._transport.rank
        gathering: list[Work] = []

        def folded(bucket: Bucket) -> None:
            flat = result.flats[bucket.flat]
            start, stop = bucket.cuts[rank]
            if start < stop:
                inspect(bucket.flat, start, flat[start:stop])
            if self._everywhere and not self._reduction.leaves_result_everywhere:
                into = [flat[slice(*cut)] for cut in bucket.cuts]
                gathering.append(self._transport.gather(flat[start:stop], into))

        self._queue.finish(folded)
        for work in gathering:
            work.wait()
        return Reduced(gradient=result, used=self._collector.used)

    def drop(self) -> None:
        """Collective. Give up the step that was begun, if there is one."""
        if self._phase is Phase.COLLECTING:
            self._phase = Phase.IDLE
            self._collector.end()
            self._queue.drain()

    def close(self) -> None:
        """Take the hooks off the model."""
        self._collector.close()
