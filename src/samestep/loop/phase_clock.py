"""Where the wall time of this rank goes.

Host time is measured, and nothing waits for a device: where kernels run on their own, as on a GPU, a phase
is the time in which the host had its hands full with it, and waiting shows where the host next needs a
result: mostly in communication.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, final

PHASES: Final = ("data", "forward", "backward", "communication", "update", "checkpoint", "other")
_OTHER: Final = "other"


@final
class PhaseClock:
    """Adds up seconds by phase; every moment belongs to exactly one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._phase = _OTHER
        self._since = clock()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the block as this phase, but for blocks of other phases inside it."""
        before = self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by phase: their sum is the wall time."""
        self._switch(self._phase)
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return taken

    def _switch(self, phase: str) -> str:
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        before, self._phase, self._since = self._phase, phase, now
        return before
