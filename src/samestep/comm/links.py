"""How long the way to the other ranks is, how wide, and how far their clocks are off."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, final

import torch
from torch._C._distributed_c10d import HashStore

from samestep.comm.connect import Rendezvous
from samestep.comm.transport import Transport
from samestep.topology.environment import Place

ROUNDS = 10
BULK = 8 * 2**20  # bytes
MOST_PEERS = 64  # more would take longer than a look is worth
NS = 1e9
PAIR_S = 20.0  # time limit for two ranks of one process


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The way between rank 0 and another rank."""

    rank: int
    latency_us: float  # one way, the best of some
    megabytes_per_s: float  # both ways at once
    clock_ahead_s: float  # of the other rank's machine, known to within the latency


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """What was measured between the ranks."""

    ballot_us: float  # one ballot of all ranks, the median
    links: list[Link]

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def measure(transport: Transport, device: torch.device) -> Links:
    """Collective. Measure ballots, and the link between rank 0 and every other; only rank 0 gets links."""
    ballots = []
    for _ in range(ROUNDS):
        begin = time.perf_counter_ns()
        transport.ballot(torch.zeros(4, dtype=torch.int64))
        ballots.append((time.perf_counter_ns() - begin) / 1e3)
    peers = range(1, min(transport.world_size, MOST_PEERS + 1))
    links = [_link(transport, peer, device) for peer in peers]
    return Links(ballot_us=median(ballots), links=links if transport.rank == 0 else [])


def measure_pair() -> Links:
    """Measure gloo between two ranks of this process, as a stand-in for ranks of this machine."""
    store = HashStore()
    found: list[Links] = []
    failed: list[BaseException] = []

    def take_part(rank: int) -> None:
        place = Place(rank=rank, world_size=2, local_rank=rank, local_world_size=2, reason="a measurement")
        try:
            transport = Rendezvous(place=place, store=store, timeout_s=PAIR_S).connect(torch.device("cpu"))
            try:
                found.append(measure(transport, torch.device("cpu")))
                transport.ballot(torch.zeros(1, dtype=torch.int64))  # none leaves before the other is done
            finally:
                transport.close()
        except Exception as error:  # raised again below, in the thread of the caller
            failed.append(error)

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return next(links for links in found if links.links)


def gather_texts(transport: Transport, text: str, device: torch.device) -> list[str]:
    """Collective. Return every rank's text."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    sizes = transport.ballot(torch.tensor([len(mine)]))[:, 0].tolist()
    rows = [torch.empty(int(size), dtype=torch.uint8, device=device) for size in sizes]
    rows[transport.rank] = mine
    transport.gather(mine, rows).wait()
    return [bytes(row.cpu().numpy()).decode() for row in rows]


def _link(transport: Transport, peer: int, device: torch.device) -> Link:
    """Collective. Measure one link; ranks at neither end move nothing.

    The other rank's clock is read halfway through the quickest round, as network time protocols do.
    """
    is_end = transport.rank in (0, peer)
    rounds = [_round(transport, peer, device) for _ in range(ROUNDS)]
    trip_ns, ahead_ns = min(rounds)
    bulk = torch.zeros(BULK, dtype=torch.uint8, device=device)
    into = torch.empty_like(bulk)
    times = []
    for _ in range(3):
        begin = time.perf_counter_ns()
        other = peer if transport.rank == 0 else 0
        _move(transport, other, bulk if is_end else None, into if is_end else None)
        times.append(time.perf_counter_ns() - begin)
    return Link(
        rank=peer,
        latency_us=trip_ns / 2e3,
        megabytes_per_s=BULK / 1e6 / (min(times) / NS),
        clock_ahead_s=ahead_ns / NS,
    )


def _round(transport: Transport, peer: int, device: torch.device) -> tuple[int, int]:
    """Collective. Return a round trip from rank 0, and how far the clock of the peer is ahead, both in ns."""
    word = torch.zeros(1, dtype=torch.int64, device=device)
    begin, clock = time.perf_counter_ns(), time.time_ns()
    asks, answers = (word if transport.rank in (0, peer) else None), None
    if transport.rank == 0:
        _move(transport, peer, asks, None)
        _move(transport, peer, None, word)
    elif transport.rank == peer:
        _move(transport, 0, None, word)
        answers = torch.full((1,), time.time_ns(), dtype=torch.int64, device=device)
        _move(transport, 0, answers, None)
    else:
        _move(transport, 0, None, None)
        _move(transport, 0, None, None)
    trip = time.perf_counter_ns() - begin
    return trip, int(word) - (clock + trip // 2)


def _move(transport: Transport, other: int, send: torch.Tensor | None, receive: torch.Tensor | None) -> None:
    """Collective. Send to and receive from one other rank, and wait until the bytes are there."""
    sends: list[torch.Tensor | None] = [None] * transport.world_size
    receives: list[torch.Tensor | None] = [None] * transport.world_size
    sends[other], receives[other] = send, receive
    transport.exchange(sends, receives).wait()
    for tensor in _present((send, receive)):
        tensor[-1].item()  # a CUDA transfer is over only once its result is read


def _present(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
