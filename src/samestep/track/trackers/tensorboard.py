"""TensorBoard: the numbers of each step as event files in the run folder."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any, Final, Self, final

from samestep.events import Event, Resumed, RunEnded, Stopping
from samestep.track.trackers.guard import Guard, Warn, require
from samestep.track.trackers.scalars import scalars

FLUSH_SECONDS: Final = 5


@final
class TensorBoard:
    """Write a run for `tensorboard --logdir`; a listener of events, for the first rank.

    A resumed run goes on in the same curves: what lies behind the checkpoint is taken back. Raises
    ConfigError where the package `tensorboard` is missing; what fails later is one warning.
    """

    def __init__(self, folder: Path | str, *, warn: Warn | None = None) -> None:
        require("tensorboard", "tensorboard")
        self._folder = Path(folder)
        self._guard = Guard("tensorboard", warn)
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        """Write the numbers of an event."""
        self._guard.run(lambda: self._log(event))

    def close(self) -> None:
        """Finish the file; a later event begins another one."""
        self._guard.run(self._close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log(self, event: Event) -> None:
        if isinstance(event, Resumed):
            events = importlib.import_module("tensorboard.compat.proto.event_pb2")
            self._write(event.step, session_log=events.SessionLog(status=events.SessionLog.START))
        elif found := scalars(event):
            step, numbers = found
            summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
            values = [summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
            self._write(step, summary=summary(value=values))
        elif isinstance(event, RunEnded | Stopping) and self._writer is not None:
            self._writer.flush()

    def _write(self, step: int, **content: Any) -> None:
        if self._writer is None:
            writers = importlib.import_module("tensorboard.summary.writer.event_file_writer")
            self._writer = writers.EventFileWriter(str(self._folder), flush_secs=FLUSH_SECONDS)
        record = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._writer.add_event(record(wall_time=time.time(), step=step, **content))

    def _close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
