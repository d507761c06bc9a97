"""Work for a server, done beside the training: a slow network must not hold up the ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final, final

from samestep.track.trackers.guard import Guard

MOST_WAITING: Final = 10_000
CLOSING_SECONDS: Final = 30.0


@final
class Background:
    """Run actions one after the other on a thread of its own, at most so many waiting.

    A server that does not keep up is switched off, like one that fails.
    """

    def __init__(self, guard: Guard, *, most: int = MOST_WAITING) -> None:
        self._guard = guard
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=most)
        self._thread = threading.Thread(target=self._work, name="samestep tracker", daemon=True)
        self._thread.start()

    def put(self, action: Callable[[], None]) -> None:
        """Let an action be run later."""
        if self._guard.off:
            return
        try:
            self._waiting.put_nowait(action)
        except queue.Full:
            self._guard.switch_off(f"{self._waiting.maxsize} actions wait for its server")

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Wait until all is done, for no longer than `seconds`."""
        try:
            self._waiting.put(None, timeout=seconds)
            self._thread.join(seconds)
        except queue.Full:
            pass  # the thread hangs in its server: the next line tells of it
        if self._thread.is_alive():
            self._guard.switch_off(f"its server did not take the rest within {seconds:g} s")

    def _work(self) -> None:
        while (action := self._waiting.get()) is not None:
            self._guard.run(action)
