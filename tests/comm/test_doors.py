"""Doors: ranks whose launcher tells no port meet all the same, and nobody else comes in."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from samestep.comm import connect as connecting
from samestep.comm.connect import Rendezvous, connect, meet
from samestep.comm.doors import Door, ring
from samestep.errors import ClusterError, ConfigError, TimedOut
from samestep.topology.meeting_point import NUM_DOORS
from samestep.topology.network import loopback_interface
from samestep.topology.place import Place

LIMIT_S = 30.0
SHORT_S = 0.3
CPU = torch.device("cpu")
T = TypeVar("T")


def place(rank: int, rendezvous: str, job: str, world_size: int = 3, *, known: bool = True) -> Place:
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        launcher="a launcher",
        reason="a test",
        rendezvous=rendezvous,
        job=job,
        locality_known=known,
    )


@pytest.fixture(autouse=True)
def _gloo_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", str(loopback_interface()))


@pytest.fixture
def job() -> str:
    return f"job {uuid.uuid4().hex}"


@pytest.fixture
def ports() -> str:
    """Give a door with room for all its ports; they are told apart from the system's by the number."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        first = 20000 + probe.getsockname()[1] % 12000
    return f"door://127.0.0.1:{first}"


def port_of(rendezvous: str) -> int:
    return int(rendezvous.rpartition(":")[2])


def all_ranks(function: Callable[[Place], T], places: list[Place]) -> list[T]:
    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(function, places, timeout=2 * LIMIT_S))


def sum_of_ranks(at: Place) -> float:
    transport = connect(at, device=CPU, timeout_s=LIMIT_S)
    with contextlib.closing(transport):
        tensor = torch.full((2,), float(at.rank))
        transport.all_reduce(tensor).wait()
        transport.ballot(torch.zeros(1, dtype=torch.int64))
        return float(tensor[0])


def test_ranks_of_one_machine_meet_and_meet_again(job: str) -> None:
    places = [place(rank, "here://", job) for rank in range(3)]
    for _ in range(2):
        assert all_ranks(sum_of_ranks, places) == [3.0, 3.0, 3.0]


def test_two_jobs_at_the_same_ports_do_not_mix(job: str, ports: str) -> None:
    places = [place(rank, ports, f"{job} {half}") for half in "ab" for rank in range(3)]
    assert all_ranks(sum_of_ranks, places) == [3.0] * 6


def test_taken_ports_and_strangers_are_passed_over(job: str, ports: str) -> None:
    """The first port belongs to a server that says something else, the second to one that is silent."""
    first = port_of(ports)
    with (
        socket.create_server(("", first)) as talker,
        socket.create_server(("", first + 1)),
        ThreadPoolExecutor(1) as pool,
    ):

        def talk() -> None:
            guest, _ = talker.accept()
            with guest:
                guest.sendall(b"SSH-2.0-server\r\n")

        talking = pool.submit(talk)
        places = [place(rank, ports, job, 2) for rank in range(2)]
        assert all_ranks(sum_of_ranks, places) == [1.0, 1.0]
        talking.result(LIMIT_S)


def test_all_ports_taken_is_said(job: str, ports: str) -> None:
    with contextlib.ExitStack() as stack:
        for port in range(port_of(ports), port_of(ports) + NUM_DOORS):
            stack.enter_context(socket.create_server(("", port)))
        with pytest.raises(ClusterError, match=r"are all taken\. Set MASTER_PORT"):
            Door(place(0, ports, job), LIMIT_S)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b'{"rank": 1}\n',
        json.dumps({"job": "another", "world_size": 2, "rank": 1, "who": "x"}).encode() + b"\n",
        b"",
    ],
)
def test_a_stranger_at_the_door_is_sent_away(job: str, ports: str, words: bytes) -> None:
    with contextlib.closing(Door(place(0, ports, job, 2), LIMIT_S)) as door:
        answering = threading.Thread(target=door.answer, args=(4321,))
        answering.start()
        with socket.create_connection(("127.0.0.1", port_of(ports))) as guest:
            guest.sendall(words)
            guest.shutdown(socket.SHUT_WR)
            assert guest.recv(100) == b""
        assert ring(place(1, ports, job, 2), LIMIT_S) == 4321
        answering.join(LIMIT_S)
        assert not answering.is_alive()


def test_two_processes_of_one_rank_are_an_error(job: str, ports: str) -> None:
    with contextlib.closing(Door(place(0, ports, job), LIMIT_S)) as door, ThreadPoolExecutor(1) as pool:
        answering = pool.submit(door.answer, 4321)
        for who in ("process 1 on a", "process 2 on a"):
            with socket.create_connection(("127.0.0.1", port_of(ports))) as guest:
                question = {"job": job, "world_size": 3, "rank": 1, "who": who}
                guest.sendall(json.dumps(question).encode() + b"\n")
                guest.recv(100)
        with pytest.raises(
            ClusterError, match=r"two processes say .* rank 1 .* process 1 on a and process 2"
        ):
            answering.result(LIMIT_S)


@pytest.mark.parametrize("rendezvous", ["here://", None])
def test_who_does_not_come_is_named(job: str, ports: str, rendezvous: str | None) -> None:
    where = rendezvous or ports
    with contextlib.closing(Door(place(0, where, job, 4), SHORT_S)) as door, ThreadPoolExecutor(1) as pool:
        came = pool.submit(ring, place(2, where, job, 4), LIMIT_S)
        with pytest.raises(TimedOut, match=r"waited 0\.3 s .* did not come: 1, 3\..* MASTER_ADDR"):
            door.answer(1)
        assert came.result(LIMIT_S) == 1


@pytest.mark.parametrize("rendezvous", ["here://", None])
def test_without_a_first_rank_the_others_do_not_wait_for_ever(
    job: str, ports: str, rendezvous: str | None
) -> None:
    with pytest.raises(TimedOut, match=r"rank 1 of 3 found no rank 0 of .* within 0\.3 s"):
        connect(place(1, rendezvous or ports, job), device=CPU, timeout_s=SHORT_S)


def test_a_first_rank_elsewhere_is_said(job: str) -> None:
    """The others would look on the host that the launcher lists first."""
    with pytest.raises(ConfigError, match=r"lists 192\.0\.2\.77 as the first host, but rank 0 runs on"):
        Door(place(0, "door://192.0.2.77:20000", job), LIMIT_S)
    with pytest.raises(ConfigError, match=r"'no\.such\.host\.invalid' .* cannot be resolved"):
        ring(place(1, "door://no.such.host.invalid:20000", job), LIMIT_S)


def test_local_ranks_come_from_who_shares_a_machine(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven, and not in blocks: five ranks on machines a, b, a, c, a."""
    machines = "abaca"
    monkeypatch.setattr(connecting, "machine_id", lambda: machines[int(threading.current_thread().name)])

    def meet_as(at: Place) -> Rendezvous:
        threading.current_thread().name = str(at.rank)
        return meet(at, timeout_s=LIMIT_S)

    places = [place(rank, "here://", job, 5, known=False) for rank in range(5)]
    meetings = all_ranks(meet_as, places)  # the store lives as long as the meeting of the first rank
    found = [met.place for met in meetings]
    assert [place.local_rank for place in found] == [0, 0, 1, 0, 2]
    assert [place.local_world_size for place in found] == [3, 1, 3, 1, 3]
    assert all(place.locality_known for place in found)
