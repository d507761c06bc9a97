"""Requests to stop, turned from signals into something a selector can wait for."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self, final

from samestep.processes.stop_signals import STOP_SIGNALS


@final
class StopRequests:
    """Catch the signals that ask for a stop for one `with` block; `stream` is readable after each.

    A SIGHUP that was ignored, as under nohup, stays ignored. Outside the main thread, where Python allows no
    handlers, nothing is caught.
    """

    def __init__(self) -> None:
        self.stream, self._writes = os.pipe()
        os.set_blocking(self.stream, False)
        os.set_blocking(self._writes, False)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*STOP_SIGNALS, signal.SIGHUP):
                before = signal.getsignal(number)
                if number is not signal.SIGHUP or before is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the earlier handlers back."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        os.close(self.stream)
        os.close(self._writes)

    def take(self) -> list[signal.Signals]:
        """Return the signals that came since the last call."""
        try:
            return [signal.Signals(number) for number in os.read(self.stream, 256)]
        except BlockingIOError:
            return []

    def _note(self, number: int, _frame: FrameType | None) -> None:
        os.write(self._writes, bytes([number]))
