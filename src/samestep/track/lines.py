"""Files of JSON lines: written so that a dying process tears at most the last one, read in spite of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Final, final

BLOCK: Final = 1 << 20  # bytes read at once


@final
class LineWriter:
    """Append objects, each as one line and one write; a torn rest of a killed writer is cut off first."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        self._file = FileIO(path, "a")

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def write(self, values: Mapping[str, object]) -> None:
        """Write one line."""
        self._file.write(f"{json.dumps(values, ensure_ascii=False, default=str)}\n".encode())

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        self._file.close()


def cut_torn_line(path: Path) -> None:
    """Cut off what stands behind the last whole line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - BLOCK)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n") + 1
            if found:
                end = start + found
                break
            end = start
        if end < size:
            file.truncate(end)


@final
class LineReader:
    """Read a growing file of JSON lines, each line once.

    A last line without an end is left for later: its writer may be at work. Lines that hold no object are
    counted in `damaged` and passed over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.damaged = 0

    def begun_anew(self) -> bool:
        """Say whether the file is shorter than what was read of it; then reading begins anew."""
        if not self._path.is_file() or self._path.stat().st_size >= self._offset:
            return False
        self._offset = self.damaged = 0
        return True

    def read(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yield the lines that have come since the last call, as they stand and as objects."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            rest = b""
            while block := file.read(BLOCK):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    self._offset += len(line) + 1
                    values = _parsed(line)
                    if values is None:
                        self.damaged += 1
                    else:
                        yield line, values


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
