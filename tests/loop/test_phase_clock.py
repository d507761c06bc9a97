"""Where the time of a step goes: every moment in one phase, and phases of real steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep
from samestep.comm.transport import Transport
from samestep.loop.phase_clock import PHASES, PhaseClock
from samestep.testing.threads import run_threads


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_moment_belongs_to_one_phase() -> None:
    hands = Hands()
    clock = PhaseClock(hands)
    hands.now = 1.0
    with clock.during("forward"):
        hands.now = 3.0
        with clock.during("data"):
            hands.now = 7.0
        hands.now = 8.0
    hands.now = 8.5
    taken = clock.take()
    assert list(taken) == list(PHASES)
    assert {name: seconds for name, seconds in taken.items() if seconds} == {
        "data": 4.0,
        "forward": 3.0,
        "other": 1.5,
    }
    hands.now = 9.0
    assert clock.take()["other"] == 0.5


def test_a_phase_ends_with_an_error_too() -> None:
    hands = Hands()
    clock = PhaseClock(hands)
    with pytest.raises(ValueError, match="broken"), clock.during("update"):
        hands.now = 2.0
        raise ValueError("broken")
    hands.now = 3.0
    assert (clock.take()["update"], clock.take()["other"]) == (2.0, 0.0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_reports_the_phases_of_each_step(world_size: int) -> None:
    told: dict[int, list[samestep.Phases]] = {rank: [] for rank in range(world_size)}

    def run(transport: Transport) -> None:
        def callback(event: samestep.Event) -> None:
            if isinstance(event, samestep.Phases):
                told[transport.rank].append(event)

        with transport.turn():
            torch.manual_seed(0)
            model = nn.Linear(4, 1)
        samestep.train(
            model,
            torch.randn(12, 4, generator=torch.Generator().manual_seed(0)),
            lambda model, batch: samestep.weighted(model(batch).square().flatten()),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            batching=samestep.Batching(global_batch=6, micro_batch=2),
            steps=3,
            callbacks=[callback],
            transport=transport,
        )

    run_threads(run, world_size)
    for rank, events in told.items():
        assert [(event.step, event.rank) for event in events] == [(0, rank), (1, rank), (2, rank)]
        for event in events:
            assert min(event.seconds.values()) >= 0
            busy = ("data", "forward", "backward", "communication", "update")
            assert all(event.seconds[name] > 0 for name in busy), event.seconds
