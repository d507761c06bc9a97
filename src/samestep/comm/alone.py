"""The transport of a run with one rank: everything is here already."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

from torch import Tensor

from samestep.comm.transport import Finished, Work


@final
class Alone:
    """One rank, no peers: the same calls, with nothing to move."""

    rank = 0
    world_size = 1

    def exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Work:  # noqa: ARG002
        """Move nothing."""
        return Finished()

    def gather(self, mine: Tensor | None, into: Sequence[Tensor | None]) -> Work:  # noqa: ARG002
        """Move nothing."""
        return Finished()

    def ballot(self, vector: Tensor) -> Tensor:
        """Return the one vector as the only row."""
        return vector.cpu().unsqueeze(0)

    def all_reduce(self, tensor: Tensor) -> Work:  # noqa: ARG002
        """Leave the tensor: it is the sum."""
        return Finished()

    def turn(self) -> AbstractContextManager[None]:
        """Return an empty context: nobody else uses this process's generators."""
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""
