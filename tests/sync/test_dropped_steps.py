"""A step that is given up while its buckets are under way: the next one sums as if it never was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.comm.transport import Transport
from samestep.errors import InternalError
from samestep.numerics.fold import fold
from samestep.sync.collector import Collector
from samestep.sync.layout import lay_out
from samestep.sync.reduction import Ordered
from samestep.sync.replicate import Replicate
from samestep.sync.storage import ParameterStore
from samestep.sync.strategy import WINDOW
from samestep.sync.zero import Zero1
from samestep.testing.threads import run_threads

RUNS = [range(2), range(2, 3), range(3, 5)]


def gradient(leaf: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(leaf))


def sums(transport: Transport, size: int, num_collected: int, kind: Any) -> Tensor:
    """Reduce, give up a step after `num_collected` leaves, reduce again; return what is owned here."""
    parameter = Parameter(torch.zeros(size))
    layout = lay_out([("p", parameter)], world_size=transport.world_size, whole=False, bucket=128)
    store = ParameterStore(layout, [parameter], masters=False)
    strategy = kind(store, Collector(layout, [parameter]), Ordered(layout, transport), transport)
    for step in range(3):
        strategy.begin(RUNS, 5)
        is_dropped = step % 2 == 1
        for leaf in RUNS[transport.rank][: num_collected if is_dropped else None]:
            with strategy.collect(leaf):
                (parameter * gradient(leaf + 10 * step, size)).sum().backward()
        if is_dropped:
            strategy.drop()
            strategy.drop()  # nothing is left to give up
        else:
            found = strategy.reduce(lambda flat, start, part: None)
        transport.ballot(torch.tensor([step]))  # would meet what was still under way
    strategy.close()
    own = torch.zeros(layout.flats[0].numel)
    for _, start, stop in layout.owned(transport.rank):
        own[start:stop] = found.gradient.flats[0][start:stop]
    return own[:size]


@pytest.mark.parametrize("kind", [Replicate, Zero1])
@pytest.mark.parametrize("num_collected", [0, 1, 2])
@pytest.mark.parametrize("size", [60, 128 * (WINDOW + 3)])
def test_the_next_sum_is_the_pure_fold(size: int, num_collected: int, kind: Any) -> None:
    parts = run_threads(lambda t: sums(t, size, num_collected, kind), 3, timeout_s=20)
    wanted = fold([gradient(leaf + 20, size) + 0.0 for leaf in range(5)])
    assert torch.equal(torch.stack(parts).sum(0), wanted)


def test_nothing_is_sent_before_the_end_where_a_rank_has_no_leaves() -> None:
    """It may call another collective, for it cannot know that its peers are past that."""
    runs = [range(1), range(1, 2), range(2, 2)]

    def work(transport: Transport) -> None:
        parameter = Parameter(torch.zeros(60))
        layout = lay_out([("p", parameter)], world_size=3, whole=False)
        store = ParameterStore(layout, [parameter], masters=False)
        strategy = Replicate(store, Collector(layout, [parameter]), Ordered(layout, transport), transport)
        for step in range(3):
            strategy.begin(runs, 2)
            for leaf in runs[transport.rank]:
                with strategy.collect(leaf):
                    (parameter * gradient(leaf + 10 * step, 60)).sum().backward()
            assert transport.ballot(torch.tensor([transport.rank])).tolist() == [[0], [1], [2]]
            found = strategy.reduce(lambda flat, start, part: None).gradient.views[0]
            assert torch.equal(found, fold([gradient(leaf + 10 * step, 60) + 0.0 for leaf in range(2)]))

    run_threads(work, 3, timeout_s=20)


def test_a_step_is_not_begun_while_buckets_are_under_way() -> None:
    def work(transport: Transport) -> None:
        parameter = Parameter(torch.zeros(3))
        layout = lay_out([("p", parameter)], world_size=1, whole=False)
        store = ParameterStore(layout, [parameter], masters=False)
        strategy = Replicate(store, Collector(layout, [parameter]), Ordered(layout, transport), transport)
        for _ in range(2):
            strategy.begin([range(1)], 1)
            with strategy.collect(0):
                parameter.sum().backward()
            if strategy._sync._queue._early:
                with pytest.raises(InternalError, match="while buckets of another are under way"):
                    strategy.begin([range(1)], 1)
            strategy.reduce(lambda flat, start, part: None)

    run_threads(work, 1)
