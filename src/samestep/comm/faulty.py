"""A transport that breaks, delays or reorders on a schedule: for tests of everything above it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor

from samestep.comm.transport import Transport, Work
from samestep.errors import PeerLost


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens at one call of a transport."""

    kind: Literal["break", "delay", "late"]  # late: the transfer starts only when it is waited for
    seconds: float = 0.0


@final
class Faulty:
    """Wrap a transport; `schedule` maps the number of a call (0, 1, ...) to its fault.

    A `late` transfer reorders: it starts after transfers that were asked for later. The sequence numbers
    of the wrapped transport would then differ between ranks, so a late call must be late on every rank.
    """

    def __init__(
        self,
        inner: Transport,
        schedule: Mapping[int, Fault],
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._schedule = schedule
        self._sleep = sleep
        self._calls = 0
        self.rank = inner.rank
        self.world_size = inner.world_size

    def exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Work:
        """Collective. Exchange, with the fault that is due."""
        return self._started(lambda: self._inner.exchange(sends, receives))

    def gather(self, mine: Tensor | None, into: Sequence[Tensor | None]) -> Work:
        """Collective. Gather, with the fault that is due."""
        return self._started(lambda: self._inner.gather(mine, into))

    def all_reduce(self, tensor: Tensor) -> Work:
        """Collective. Reduce, with the fault that is due."""
        return self._started(lambda: self._inner.all_reduce(tensor))

    def ballot(self, vector: Tensor) -> Tensor:
        """Collective. Vote, with the fault that is due."""
        self._strike()
        return self._inner.ballot(vector)

    def turn(self) -> AbstractContextManager[None]:
        """Return the wrapped transport's context."""
        return self._inner.turn()

    def close(self) -> None:
        """Close the wrapped transport."""
        self._inner.close()

    def _started(self, start: Callable[[], Work]) -> Work:
        if self._strike() == "late":
            return _Late(start)
        return start()

    def _strike(self) -> str | None:
        call, self._calls = self._calls, self._calls + 1
        fault = self._schedule.get(call)
        if fault is None:
            return None
        if fault.kind == "break":
            self._inner.close()
            raise PeerLost(f"rank {self.rank}: the link was cut on purpose at call {call}.")
        if fault.kind == "delay":
            self._sleep(fault.seconds)
        return fault.kind


@final
class _Late:
    def __init__(self, start: Callable[[], Work]) -> None:
        self._start = start

    def wait(self) -> None:
        self._start().wait()
