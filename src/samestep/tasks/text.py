"""Text as bytes: the files it is read from and the windows it is cut into."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from samestep.errors import DataError

FORMATS: Final = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")


def format_of(path: Path) -> str | None:
    """Return which of the known formats a file name stands for, or None."""
    return next((ending for ending in FORMATS if path.name.lower().endswith(ending)), None)


def read_text(path: Path) -> bytes:
    """Return the UTF-8 bytes of a text file; of JSON lines, the values of `text` with a newline between.

    Raises DataError, which names the file and the line, where it holds something else.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}.") from error
    if ".jsonl" not in path.suffixes:
        return content
    lines = (line for line in enumerate(content.splitlines(), start=1) if line[1].strip())
    return b"\n".join(_text_of(line, f"{path}, line {number}") for number, line in lines)


def _text_of(line: bytes, place: str) -> bytes:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: this is not JSON: {error}.") from None
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise DataError(f"{place}: expected an object with a string under the key text, found {line[:60]!r}.")
    text: str = value["text"]
    return text.encode()


@final
class ByteWindows:
    """Windows of `length` bytes, one after the other; each byte is in one window, a short end is left out.

    Samples: uint8, (length,). The bytes are held once, or read from a file through a memory map, which ranks
    on one host share; a sample is a view of them.
    """

    def __init__(self, content: bytes | Path, length: int) -> None:
        self._path = content if isinstance(content, Path) else None
        self._length = length
        self._windows: NDArray[np.uint8] | None = None
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        self._count = size // length
        if self._count == 0:
            raise DataError(
                f"the text has {size} bytes, but one sample takes {length}: model.context and one "
                "more. Give a longer text or a smaller context."
            )
        if isinstance(content, bytes):
            # A copy, since the memory of `bytes` is read-only and PyTorch warns when it wraps such memory.
            self._windows = self._cut(np.frombuffer(content, dtype=np.uint8)).copy()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        if self._windows is None:
            assert self._path is not None
            # Copy on write, so that PyTorch finds memory that may be written to.
            self._windows = self._cut(np.memmap(self._path, dtype=np.uint8, mode="c"))
        window: NDArray[np.uint8] = self._windows[index]
        return window

    def __getstate__(self) -> dict[str, Any]:
        """Leave a map behind: each process makes its own."""
        return {**self.__dict__, "_windows": self._windows if self._path is None else None}

    def _cut(self, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return content[: self._count * self._length].reshape(self._count, self._length)
