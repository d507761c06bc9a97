"""Text as bytes: the files it is read from and the windows it is cut into."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Final, final

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

    Samples: uint8, (length,). The bytes are held once; a sample is a view of them.
    """

    def __init__(self, content: bytes, length: int) -> None:
        count = len(content) // length
        if count == 0:
            raise DataError(
                f"the text has {len(content)} bytes, but one sample takes {length}: model.context and one "
                "more. Give a longer text or a smaller context."
            )
        # A copy, since the memory of `bytes` is read-only and PyTorch warns when it wraps such memory.
        self._windows: NDArray[np.uint8] = np.frombuffer(content, dtype=np.uint8)[: count * length].copy()
        self._windows = self._windows.reshape(count, length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        window: NDArray[np.uint8] = self._windows[index]
        return window
