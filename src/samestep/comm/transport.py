"""The seam: what moves tensors between ranks, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Block until the tensors may be used again.

        Raises PeerLost when a rank is gone and TimedOut when one does not answer within the limit.
        """


class Transport(Protocol):
    """Moves tensors between the ranks of one generation; knows nothing of gradients.

    Every method is collective: all ranks call the same methods in the same order. Tensors are
    contiguous; None or an empty tensor stands for nothing to move, on both ends alike.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 .. world_size - 1."""

    @property
    def world_size(self) -> int:
        """How many ranks take part."""

    def exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Work:
        """Collective. Send sends[r] to each rank r, and fill receives[r] with what r sent here.

        The entries of this rank itself are ignored. Does not block.
        """

    def gather(self, mine: Tensor | None, into: Sequence[Tensor | None]) -> Work:
        """Collective. Send `mine` to every other rank, and fill into[r] with what rank r sent.

        The entry of this rank itself is ignored. Does not block.
        """

    def ballot(self, vector: Tensor) -> Tensor:
        """Collective. Return all ranks' int64 vectors, stacked: (world_size, len(vector)), on the CPU."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Collective. Sum a tensor over all ranks in place, in whatever order the backend likes."""

    def turn(self) -> AbstractContextManager[None]:
        """Return a context in which this rank has the process's random generators to itself."""

    def close(self) -> None:
        """Leave the group; later calls by peers end in PeerLost instead of waiting."""


class Finished:
    """A transfer that had nothing to move."""

    def wait(self) -> None:
        """Return at once."""


class All:
    """Several transfers waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each in turn."""
        for work in self._works:
            work.wait()


def moves(tensor: Tensor | None) -> bool:
    """Say whether there is anything to send or receive."""
    return tensor is not None and tensor.numel() > 0
