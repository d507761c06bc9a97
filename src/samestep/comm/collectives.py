"""The transport over torch.distributed: gloo for CPU tensors, NCCL for CUDA, the same code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import NoReturn, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.transport import All, Finished, Work, moves
from samestep.errors import ClusterError, PeerLost, TimedOut

# What gloo and NCCL say, in plain RuntimeErrors, when a peer is gone; anything else is a mistake of ours.
_WORDS_OF_LOSS = ("connection", "reset by peer", "read error", "write error", "broken pipe", "socket", "nccl")


class Group(Protocol):
    """What is used of a torch process group."""

    def rank(self) -> int:
        """Return this rank."""

    def size(self) -> int:
        """Return the world size."""

    def send(self, tensors: list[Tensor], destination: int, tag: int, /) -> dist.Work:
        """Start sending."""

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> dist.Work:
        """Start receiving."""

    def allreduce(self, tensors: list[Tensor], /) -> dist.Work:
        """Start summing."""

    def abort(self) -> None:
        """Drop all connections."""

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> dist.Work: ...


@final
class Collectives:
    """Ranks as processes, each connected to each by a torch process group.

    Point-to-point transfers rather than gloo's own all-to-all and all-gather: measured at 100 MB they
    take 36 ms where all_to_all_single takes 53 and all_gather 129. Since every rank talks to every
    rank, a lost one is noticed by all at once and not only by its neighbours in a ring.
    """

    def __init__(self, group: Group, *, device: torch.device, timeout_s: float) -> None:
        self._group = group
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._calls = 0
        self.rank = group.rank()
        self.world_size = group.size()

    def exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Work:
        """Collective. See Transport.exchange."""
        return self._move(sends, receives, self._peers_from_next())

    def gather(self, mine: Tensor | None, into: Sequence[Tensor | None]) -> Work:
        """Collective. See Transport.gather."""
        return self._move([mine] * self.world_size, into, self._peers_from_next())

    def ballot(self, vector: Tensor) -> Tensor:
        """Collective. See Transport.ballot."""
        rows = torch.empty(self.world_size, len(vector), dtype=torch.int64, device=self._device)
        rows[self.rank] = vector
        self.gather(rows[self.rank], list(rows)).wait()
        return rows.cpu()

    def all_reduce(self, tensor: Tensor) -> Work:
        """Collective. See Transport.all_reduce; the backend's own algorithm."""
        return self._watched(partial(self._group.allreduce, [tensor]), None)

    def turn(self) -> AbstractContextManager[None]:
        """Return an empty context: a process has generators of its own."""
        return nullcontext()

    def close(self) -> None:
        """Leave the group without waiting for anybody."""
        self._group.abort()

    def _peers_from_next(self) -> list[int]:
        # Each rank starts with another peer, so that not all of them send to rank 0 first.
        return [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]

    def _move(
        self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], peers: Sequence[int]
    ) -> Work:
        # Every call has a tag of its own, so that transfers under way at once cannot be mixed up.
        tag, self._calls = self._calls % 2**30, self._calls + 1
        works: list[Work] = []
        # NCCL needs the sends and receives of one exchange in one group call, or they can deadlock.
        coalesce = self._device.type == "cuda"
        if coalesce:
            self._group._start_coalescing()
        for peer in peers:
            outgoing, incoming = sends[peer], receives[peer]
            if incoming is not None and moves(incoming):
                works.append(self._watched(partial(self._group.recv, [incoming], peer, tag), peer))
            if outgoing is not None and moves(outgoing):
                works.append(self._watched(partial(self._group.send, [outgoing], peer, tag), peer))
        if coalesce:
            works = [self._watched(self._group._end_coalescing, None)]
        return All(works) if works else Finished()

    def _watched(self, start: Callable[[], dist.Work], peer: int | None) -> Work:
        return _Watched(start, peer=peer, rank=self.rank, timeout=self._timeout)


@final
class _Watched:
    """A transfer of torch.distributed whose failures name the rank that was waited for."""

    def __init__(
        self, start: Callable[[], dist.Work], *, peer: int | None, rank: int, timeout: timedelta
    ) -> None:
        self._peer = peer
        self._rank = rank
        self._timeout = timeout
        try:
            self._work = start()
        except RuntimeError as error:
            self._tell(error)

    def wait(self) -> None:
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            self._tell(error)

    def _tell(self, error: RuntimeError) -> NoReturn:
        told = self._named(error)
        if told is None:
            raise error
        raise told from error

    def _named(self, error: RuntimeError) -> ClusterError | None:
        whom = "its peers" if self._peer is None else f"rank {self._peer}"
        text = str(error).strip().splitlines()[0]
        # gloo raises a plain RuntimeError for both; only the text tells a silent peer from a dead one.
        if "timed out" in text.lower() or "timeout" in text.lower():
            return TimedOut(
                f"rank {self._rank} waited {self._timeout.total_seconds():g} s for {whom}: no answer. "
                "It may hang, be stopped, or be slower than the limit `timeout_s` allows."
            )
        if any(word in text.lower() for word in _WORDS_OF_LOSS):
            return PeerLost(f"rank {self._rank} lost {whom}: {text}")
        return None
