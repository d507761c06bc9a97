"""How one bucket's partial sums meet at their owners: ordered, or as the backend likes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, final

import torch
from torch import Tensor

from samestep.comm.transport import All, Transport, Work
from samestep.numerics.fold import Merge, Node, merge
from samestep.sync.layout import Bucket, Layout
from samestep.sync.partial_sums import RunPlan, plan_fast, plan_ordered
from samestep.sync.storage import GradientBuffer


class Pending(Protocol):
    """A bucket under way."""

    def finish(self) -> None:
        """Wait, and leave the global sum in the owner's part of the result."""


class Reduction(Protocol):
    """The rule by which partial sums of one bucket are added over ranks."""

    @property
    def leaves_result_everywhere(self) -> bool:
        """Whether `finish` leaves the sum of the whole bucket on every rank, not only at its owners."""

    def begin(self, runs: Sequence[range], num_leaves: int) -> None:
        """Take over the assignment of a step, the same on every rank."""

    def plan(self, run: range, num_leaves: int) -> RunPlan:
        """Plan what one rank does with its own leaves."""

    def start(self, bucket: Bucket, held: Sequence[GradientBuffer], result: GradientBuffer) -> Pending:
        """Collective. Send what this rank holds of a bucket to its owners; does not block.

        `held` are the buffers of this rank's subtrees in leaf order; `result` is the first of them where
        there is one.
        """


@lru_cache(maxsize=64)
def _meeting(runs: tuple[range, ...], num_leaves: int) -> tuple[tuple[int, ...], Merge]:
    """Return how many subtrees each rank sends, and the fold of all of them in leaf order."""
    nodes: list[list[Node]] = [list(plan_ordered(run, num_leaves).nodes) for run in runs]
    return tuple(len(held) for held in nodes), merge([node for held in nodes for node in held], num_leaves)


@final
class Ordered:
    """Owners fold all ranks' subtrees in the one tree, so the bits never move."""

    leaves_result_everywhere = False

    def __init__(self, layout: Layout, transport: Transport) -> None:
        self._layout = layout
        self._transport = transport
        self._counts: tuple[int, ...] = ()
        self._merge = Merge([], [], [])

    def begin(self, runs: Sequence[range], num_leaves: int) -> None:
        """Take over the assignment of a step: the same on every rank."""
        self._counts, self._merge = _meeting(tuple(runs), num_leaves)

    def plan(self, run: range, num_leaves: int) -> RunPlan:
        """Plan this rank's subtrees."""
        return plan_ordered(run, num_leaves)

    def start(self, bucket: Bucket, held: Sequence[GradientBuffer], result: GradientBuffer) -> Pending:
        """Collective. Send each owner its part of every subtree held here."""
        rank = self._transport.rank
        mine = [buffer.flats[bucket.flat] for buffer in held]
        own = slice(*bucket.cuts[rank])
        empty = result.flats[bucket.flat][own]
        arrived = [
            [part[own] for part in mine]
            if peer == rank
            else list(torch.empty(count, len(empty), dtype=empty.dtype, device=empty.device))
            for peer, count in enumerate(self._counts)
        ]
        works: list[Work] = []
        for turn in range(max(self._counts)):
            sends = [mine[turn][slice(*cut)] if turn < len(mine) else None for cut in bucket.cuts]
            receives = [parts[turn] if turn < len(parts) else None for parts in arrived]
            works.append(self._transport.exchange(sends, receives))
        values = [part for parts in arrived for part in parts]
        return _Folding(All(works), values, self._merge, empty)


@final
class _Folding:
    def __init__(self, arrival: Work, values: list[Tensor], plan: Merge, into: Tensor) -> None:
        self._arrival = arrival
        self._values = values
        self._plan = plan
        self._into = into

    def finish(self) -> None:
        self._arrival.wait()
        *steps, final_step = self._plan.steps or [(0, 0)]
        for left, right in steps:
            self._values[left].add_(self._values[right])
        left, right = final_step
        if self._plan.steps:
            torch.add(self._values[left], self._values[right], out=self._into)
        elif self._values[0].data_ptr() != self._into.data_ptr():
            self._into.copy_(self._values[0])
        self._values = []


@final
class Fast:
    """The backend's own all-reduce; the order of additions depends on the ranks and their number."""

    leaves_result_everywhere = True

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def begin(self, runs: Sequence[range], num_leaves: int) -> None:
        """Need nothing of the assignment."""

    def plan(self, run: range, num_leaves: int) -> RunPlan:  # noqa: ARG002
        """Plan a running sum."""
        return plan_fast(run)

    def start(self, bucket: Bucket, held: Sequence[GradientBuffer], result: GradientBuffer) -> Pending:  # noqa: ARG002
        """Collective. Hand the bucket to the backend."""
        return _Reducing(self._transport.all_reduce(result.flats[bucket.flat][bucket.start : bucket.stop]))


@final
class _Reducing:
    def __init__(self, work: Work) -> None:
        self._work = work

    def finish(self) -> None:
        self._work.wait()
