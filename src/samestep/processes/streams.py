"""The output of the ranks that do not write to the terminal themselves."""

from __future__ import annotations

import os
from typing import IO, TextIO, final

KEPT_BYTES = 1 << 16  # of the end of a stream: memory stays bounded, however much a rank writes
READ_BYTES = 1 << 16


@final
class Capture:
    """Read one output stream of a rank, keep its end, and pass it on line by line where asked."""

    def __init__(self, stream: IO[bytes], *, prefix: str, shown_on: TextIO | None) -> None:
        os.set_blocking(stream.fileno(), False)
        self.stream = stream
        self.ended = False
        self.shown = shown_on is not None
        self._prefix = prefix
        self._shown_on = shown_on
        self._kept = b""
        self._line = b""  # begun, but not ended yet

    def pump(self) -> bool:
        """Take what is there to read, without waiting; return whether there was anything."""
        try:
            chunk = os.read(self.stream.fileno(), READ_BYTES)
        except BlockingIOError:
            return False
        self.ended = not chunk
        self._kept = (self._kept + chunk)[-KEPT_BYTES:]
        *lines, self._line = (self._line + chunk).split(b"\n")
        if self._line and (self.ended or len(self._line) > KEPT_BYTES):
            lines, self._line = [*lines, self._line], b""
        self._show(lines)
        return not self.ended

    def drain(self) -> None:
        """Take all that is there to read."""
        while not self.stream.closed and self.pump():
            pass

    def close(self) -> None:
        """Take the rest, and close the stream."""
        self.drain()
        self.stream.close()

    def last_lines(self, limit: int) -> list[str]:
        """Return the last lines that the rank wrote."""
        return self._kept.decode(errors="replace").splitlines()[-limit:]

    def _show(self, lines: list[bytes]) -> None:
        if self._shown_on is None or not lines:
            return
        self._shown_on.write("".join(f"{self._prefix}{line.decode(errors='replace')}\n" for line in lines))
        self._shown_on.flush()
