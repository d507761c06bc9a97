"""Ranks as threads of this process: the fast tier of tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from samestep.comm.threads import ThreadWorld
from samestep.comm.transport import Transport
from samestep.errors import ClusterError, PeerLost, TimedOut

T = TypeVar("T")


def run_threads(function: Callable[[Transport], T], world_size: int, *, timeout_s: float = 60.0) -> list[T]:
    """Run a function on every rank of a world of threads; return what each rank returned, by rank.

    `timeout_s` bounds every wait of one rank for another. The first error that is not a mere consequence of
    another rank's is raised, after all ranks have ended.
    """
    world = ThreadWorld(world_size, timeout_s=timeout_s)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        transport = world.transport(rank)
        try:
            results[rank] = function(transport)
        except BaseException as error:  # raised again in the caller's thread
            error.add_note(f"on rank {rank} of {world_size}")
            errors.append(error)
        finally:
            transport.close()

    ranks = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    causes = [error for error in errors if not isinstance(error, PeerLost | TimedOut)]
    if errors:
        raise (causes or errors)[0]
    if len(results) != world_size:
        raise ClusterError(f"{world_size - len(results)} of {world_size} ranks returned nothing.")
    return [results[rank] for rank in range(world_size)]
