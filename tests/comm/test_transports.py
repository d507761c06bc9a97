"""Every transport moves the same bytes, and says who is missing."""

from __future__ import annotations

from pathlib import Path

import link_checks as links
import pytest
import torch

from samestep.comm.alone import Alone
from samestep.comm.connect import connect
from samestep.comm.faulty import Fault, Faulty
from samestep.comm.threads import ThreadWorld
from samestep.comm.transport import Transport
from samestep.errors import ConfigError, PeerLost, TimedOut
from samestep.testing.processes import run_processes
from samestep.testing.threads import run_threads
from samestep.topology.environment import Place


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_threads(world_size: int) -> None:
    def work(transport: Transport) -> None:
        for check in links.CHECKS:
            check(transport)

    run_threads(work, world_size)


def test_alone() -> None:
    for check in links.CHECKS:
        check(Alone())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_over_gloo(world_size: int) -> None:
    assert run_processes(links.check_all, world_size) == [len(links.CHECKS)] * world_size


@pytest.mark.timeout(120)
def test_a_process_that_leaves_is_lost_at_once() -> None:
    told = run_processes(links.one_leaves, 3, 1)
    assert told[1] == "gone"
    for rank in (0, 2):
        assert told[rank].startswith(f"rank {rank} lost rank ")


@pytest.mark.timeout(120)
def test_a_silent_process_is_named_after_the_limit(tmp_path: Path) -> None:
    told = run_processes(links.one_is_silent, 3, 2, str(tmp_path))
    for rank in (0, 1):
        assert told[rank].startswith(f"rank {rank} waited 2 s for rank 2: no answer.")


@pytest.mark.timeout(120)
def test_a_process_that_never_comes_ends_the_meeting() -> None:
    told = run_processes(links.nobody_comes, 2)
    assert "rank 0 of 2 could not meet the others" in told[0]
    assert "within 2 s" in told[0]


def test_a_thread_that_leaves_is_lost_at_once() -> None:
    def work(transport: Transport) -> str:
        links.vote(transport)
        if transport.rank == 1:
            return "gone"
        with pytest.raises(PeerLost, match="rank 1") as caught:
            links.vote(transport)
        # Nobody hangs up while another still waits for rank 1.
        return str(caught.value)

    told = run_threads(work, 2, timeout_s=20)
    assert told == ["rank 0 waited for rank 1, which has left.", "gone"]


def test_what_was_sent_before_leaving_still_arrives() -> None:
    def work(transport: Transport) -> None:
        links.gather_from_some(transport)

    run_threads(work, 3, timeout_s=5)


def test_a_silent_thread_is_named_after_the_limit() -> None:
    world = ThreadWorld(2, timeout_s=0.05)
    with pytest.raises(TimedOut, match=r"rank 0 waited 0\.05 s for rank 1: no answer"):
        world.transport(0).ballot(torch.zeros(1, dtype=torch.int64))


def test_the_first_cause_is_raised_with_its_rank() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 2:
            raise KeyError("the cause")
        links.vote(transport)

    with pytest.raises(KeyError, match="the cause") as caught:
        run_threads(work, 3)
    assert caught.value.__notes__ == ["on rank 2 of 3"]


def test_what_is_sent_is_copied_before_the_call_returns_or_until_it_is_waited_for() -> None:
    def work(transport: Transport) -> None:
        peer = 1 - transport.rank
        outgoing, incoming = torch.full((3,), float(transport.rank)), torch.zeros(3)
        sends, receives = [None, None], [None, None]
        sends[peer], receives[peer] = outgoing, incoming
        transport.exchange(sends, receives).wait()
        outgoing.fill_(9.0)
        assert torch.equal(incoming, torch.full((3,), float(peer)))

    run_threads(work, 2)


def test_delays_go_through_the_given_clock() -> None:
    slept: list[float] = []
    faulty = Faulty(Alone(), {1: Fault(kind="delay", seconds=7.0)}, sleep=slept.append)
    for _ in range(3):
        faulty.ballot(torch.zeros(1, dtype=torch.int64))
    assert slept == [7.0]
    assert (faulty.rank, faulty.world_size) == (0, 1)


def test_a_world_of_one_needs_no_rendezvous() -> None:
    place = Place(reason="alone")
    assert isinstance(connect(place, device=torch.device("cpu"), timeout_s=1), Alone)


@pytest.mark.parametrize("rendezvous", [None, "", "http://here", "nowhere"])
def test_a_rendezvous_of_no_known_kind_is_refused(rendezvous: str | None) -> None:
    place = Place(rank=1, world_size=2, local_world_size=2, reason="a test", rendezvous=rendezvous)
    with pytest.raises(ConfigError, match="rendezvous of rank 1 is"):
        connect(place, device=torch.device("cpu"), timeout_s=1)
