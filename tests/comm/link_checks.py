"""What every transport must do, as functions of one rank: run over threads and over processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from samestep.comm.connect import connect
from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.errors import PeerLost, TimedOut
from samestep.topology.environment import Place

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.complex64,
)
CPU = torch.device("cpu")


def letter(source: int, destination: int, dtype: torch.dtype = torch.float32, numel: int = 3) -> Tensor:
    """Return what one rank sends to another."""
    return (torch.arange(numel) + 10 * source + 100 * destination).to(dtype)


def exchange_letters(transport: Transport, dtype: torch.dtype, numel: int = 3) -> None:
    """Send to each rank what is meant for it alone."""
    me, ranks = transport.rank, range(transport.world_size)
    sends: list[Tensor | None] = [letter(me, rank, dtype, numel) for rank in ranks]
    receives: list[Tensor | None] = [torch.zeros(numel, dtype=dtype) for _ in ranks]
    sends[me] = receives[me] = None
    transport.exchange(sends, receives).wait()
    for rank, got in enumerate(receives):
        if got is not None:
            assert torch.equal(got, letter(rank, me, dtype, numel)), f"{dtype} from rank {rank}"


def exchange_pairs_only(transport: Transport) -> None:
    """Move something on some links, an empty tensor on others, and nothing on the rest."""
    me, ranks = transport.rank, range(transport.world_size)
    numel = {(a, b): (a + 2 * b) % 3 for a in ranks for b in ranks}
    sends = [letter(me, rank, numel=numel[me, rank]) if rank != 1 else None for rank in ranks]
    receives = [torch.zeros(numel[rank, me]) if me != 1 else None for rank in ranks]
    transport.exchange(sends, receives).wait()
    for rank, got in enumerate(receives):
        if got is not None and rank != me:
            assert torch.equal(got, letter(rank, me, numel=numel[rank, me]))


def gather_unequal(transport: Transport) -> None:
    """Gather parts of unequal length, one of them empty, into slices of one tensor."""
    lengths = [(5 * rank) % 7 for rank in range(transport.world_size)]
    whole = torch.full((sum(lengths),), -1.0)
    parts = list(whole.split(lengths))
    parts[transport.rank].copy_(letter(transport.rank, 0, numel=lengths[transport.rank]))
    transport.gather(parts[transport.rank], parts).wait()
    wanted = [letter(rank, 0, numel=length) for rank, length in enumerate(lengths)]
    assert torch.equal(whole, torch.cat(wanted))


def gather_from_some(transport: Transport) -> None:
    """Gather where only the last rank has something."""
    last = transport.world_size - 1
    is_last = transport.rank == last
    into = [torch.zeros(3) if rank == last and not is_last else None for rank in range(last + 1)]
    transport.gather(letter(last, 0) if is_last else None, into).wait()
    for got in into:
        if got is not None:
            assert torch.equal(got, letter(last, 0))


def vote(transport: Transport) -> None:
    """Bring int64 vectors of the largest and smallest numbers."""
    edge = torch.iinfo(torch.int64)
    vector = torch.tensor([transport.rank, edge.max - transport.rank, edge.min + transport.rank])
    rows = transport.ballot(vector)
    assert rows.shape == (transport.world_size, 3)
    for rank, row in enumerate(rows.tolist()):
        assert row == [rank, edge.max - rank, edge.min + rank]
    assert transport.ballot(torch.empty(0, dtype=torch.int64)).shape == (transport.world_size, 0)


def sum_up(transport: Transport) -> None:
    """Sum whole numbers, which any order of additions gives alike."""
    tensor = torch.arange(5.0) + transport.rank
    transport.all_reduce(tensor).wait()
    ranks = range(transport.world_size)
    assert torch.equal(tensor, torch.arange(5.0) * len(ranks) + sum(ranks))


def send_messages(transport: Transport) -> None:
    """Send texts of any length, empty ones included."""
    told = gather_bytes(transport, b"x" * (1000 * transport.rank), device=CPU)
    assert told == [b"x" * (1000 * rank) for rank in range(transport.world_size)]
    assert gather_bytes(transport, b"", device=CPU) == [b""] * transport.world_size


def wait_in_another_order(transport: Transport) -> None:
    """Have eight exchanges under way and wait for them from the last, or in an order of the rank's own."""
    world_size, me = transport.world_size, transport.rank
    works, received = [], []
    for call in range(8):
        sends = [letter(me, rank) + 1000 * call for rank in range(world_size)]
        receives = [torch.zeros(3) for _ in range(world_size)]
        received.append(receives)
        works.append(transport.exchange(sends, receives))
    order = list(reversed(range(8))) if me % 2 else [3, 1, 7, 0, 2, 6, 4, 5]
    for call in order:
        works[call].wait()
    for call, receives in enumerate(received):
        for rank, got in enumerate(receives):
            if rank != me:
                assert torch.equal(got, letter(rank, me) + 1000 * call)


def large(transport: Transport) -> None:
    """Move more than any buffer of a socket holds, both ways at once."""
    exchange_letters(transport, torch.float32, numel=300_000)


CHECKS: tuple[Callable[[Transport], None], ...] = (
    *(lambda t, d=dtype: exchange_letters(t, d) for dtype in DTYPES),
    exchange_pairs_only,
    gather_unequal,
    gather_from_some,
    vote,
    sum_up,
    send_messages,
    wait_in_another_order,
    large,
)


def check_all(place: Place) -> int:
    """Run all checks over one process group."""
    transport = connect(place, device=CPU, timeout_s=30)
    for check in CHECKS:
        check(transport)
    transport.ballot(torch.zeros(1, dtype=torch.int64))
    transport.close()
    return len(CHECKS)


def one_leaves(place: Place, leaver: int) -> str:
    """Let one rank go while the others wait for it; return what they are told."""
    transport = connect(place, device=CPU, timeout_s=20)
    vote(transport)
    if place.rank == leaver:
        transport.close()
        return "gone"
    started = time.monotonic()
    try:
        vote(transport)
    except PeerLost as error:
        assert time.monotonic() - started < 10, "found out by the time limit only"
        return str(error)
    finally:
        transport.close()
    return "nothing was noticed"


def one_is_silent(place: Place, silent: int, folder: str) -> str:
    """Let one rank not answer; return what the others are told."""
    limit = 2.0
    transport = connect(place, device=CPU, timeout_s=limit)
    vote(transport)
    told = "nothing was noticed"
    if place.rank != silent:
        try:
            vote(transport)
        except TimedOut as error:
            told = str(error)
        except PeerLost as error:
            told = f"lost: {error}"
    Path(folder, str(place.rank)).touch()
    deadline = time.monotonic() + 30
    while len(list(Path(folder).iterdir())) < place.world_size and time.monotonic() < deadline:
        time.sleep(0.01)  # nobody hangs up while another still waits
    transport.close()
    return told


def nobody_comes(place: Place) -> str:
    """Wait at a rendezvous to which rank 1 does not come."""
    if place.rank == 1:
        return "stayed away"
    try:
        connect(place, device=CPU, timeout_s=2)
    except TimedOut as error:
        return str(error)
    return "nothing was noticed"
