"""A limit on how long a callback may take: a rank that blocks would let all others wait."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SOONEST_S = 1e-6  # an earlier timer that has run out meanwhile goes off at once


@contextmanager
def time_limit(limit_s: float, error: Callable[[], Exception]) -> Iterator[None]:
    """Raise `error()` inside the block when it has run for `limit_s` seconds, and again after each limit.

    Works in the main thread of a process, on systems with SIGALRM; the signal's handler and timer are put
    back afterwards. In another thread nothing can interrupt: there the wait of the other ranks, which is
    bounded, ends the run. So it does for a block inside a C function that holds on to the interpreter. A
    timer that somebody else has set to go off earlier is left alone.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    if 0 < remaining <= limit_s:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  the signature of a handler
        raise error()

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            left = max(_SOONEST_S, remaining - (time.monotonic() - started))
            signal.setitimer(signal.ITIMER_REAL, left, interval)
