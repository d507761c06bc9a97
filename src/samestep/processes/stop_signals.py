"""A request to store the state and go, made by a signal to a rank."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, Self, final

STOP_SIGNALS: Final = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)


@final
class Stopped(SystemExit):
    """All ranks leave after the same step, their state stored; any other SystemExit is one rank's own."""


@final
class StopSignals:
    """Note the first SIGINT, SIGTERM, SIGUSR1 or SIGUSR2 inside the block; a second SIGINT ends at once.

    Schedulers send SIGTERM some time before they kill, and whatever signal a job asked for before that;
    both mean the same. Outside the main thread, where Python allows no handlers, nothing is caught.
    """

    def __init__(self) -> None:
        self.requested: str | None = None  # the name of the first signal
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the earlier handlers back."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = self.requested or signal.Signals(number).name
