"""Ranks as threads of one process: the transport that tests use most."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor

from samestep.comm.transport import All, Finished, Work, moves
from samestep.errors import PeerLost, TimedOut

Key = tuple[int, int, int]  # (sequence number of the call, source, destination)


@final
class ThreadWorld:
    """The memory that the ranks of one process meet in."""

    def __init__(self, world_size: int, *, timeout_s: float = 60.0) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._letters: dict[Key, Tensor] = {}
        self._gone: set[int] = set()
        self._generators = threading.Lock()

    def transport(self, rank: int) -> ThreadTransport:
        """Return the transport of one rank."""
        return ThreadTransport(self, rank)

    def post(self, key: Key, tensor: Tensor) -> None:
        """Leave a copy of a tensor for its receiver."""
        copy = tensor.detach().clone()
        with self._changed:
            self._letters[key] = copy
            self._changed.notify_all()

    def fetch(self, key: Key, into: Tensor) -> None:
        """Wait for a tensor; PeerLost when its sender has left, TimedOut after the limit."""
        _, source, destination = key
        limit = time.monotonic() + self.timeout_s
        with self._changed:
            while key not in self._letters:
                if source in self._gone:
                    raise PeerLost(f"rank {destination} waited for rank {source}, which has left.")
                if not self._changed.wait(timeout=max(0.0, limit - time.monotonic())):
                    raise TimedOut(
                        f"rank {destination} waited {self.timeout_s:g} s for rank {source}: no answer."
                    )
            letter = self._letters.pop(key)
        into.copy_(letter)

    def leave(self, rank: int) -> None:
        """Mark a rank as gone and wake those who wait for it."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the generators, which all threads of a process share."""
        with self._generators:
            yield


@final
class _Fetch:
    def __init__(self, receive: Callable[[], None]) -> None:
        self._receive: Callable[[], None] | None = receive

    def wait(self) -> None:
        if self._receive is not None:
            receive, self._receive = self._receive, None
            receive()


@final
class ThreadTransport:
    """One rank's end of a ThreadWorld; what is sent is copied at once, so sends never wait."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self._calls = 0
        self.rank = rank
        self.world_size = world.world_size

    def exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Work:
        """Collective. See Transport.exchange."""
        call, self._calls = self._calls, self._calls + 1
        works: list[Work] = []
        for peer in range(self.world_size):
            if peer == self.rank:
                continue
            outgoing, incoming = sends[peer], receives[peer]
            if outgoing is not None and moves(outgoing):
                self._world.post((call, self.rank, peer), outgoing)
            if incoming is not None and moves(incoming):
                works.append(_Fetch(partial(self._world.fetch, (call, peer, self.rank), incoming)))
        return All(works) if works else Finished()

    def gather(self, mine: Tensor | None, into: Sequence[Tensor | None]) -> Work:
        """Collective. See Transport.gather."""
        return self.exchange([mine] * self.world_size, into)

    def ballot(self, vector: Tensor) -> Tensor:
        """Collective. See Transport.ballot."""
        rows = torch.empty(self.world_size, len(vector), dtype=torch.int64)
        rows[self.rank] = vector
        self.gather(vector, list(rows)).wait()
        return rows

    def all_reduce(self, tensor: Tensor) -> Work:
        """Collective. See Transport.all_reduce; here in rank order."""
        others = [torch.empty_like(tensor) for _ in range(self.world_size)]
        arrival = self.gather(tensor, others)
        others[self.rank] = tensor.clone()

        def add() -> None:
            arrival.wait()
            tensor.copy_(others[0])
            for other in others[1:]:
                tensor.add_(other)

        return _Fetch(add)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Return the context in which this thread alone uses the generators."""
        with self._world.turn():
            yield

    def close(self) -> None:
        """Leave; peers that still wait get PeerLost."""
        self._world.leave(self.rank)
