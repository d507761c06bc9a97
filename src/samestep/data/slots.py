"""Memory that a rank shares with its loader workers, without a name, a socket or /dev/shm.

Note [a slot for each batch under way]: DataLoader asks for workers x prefetch batches at the start, and for
one more whenever it hands one over, in the order of the requests. So while batch r is handed over and not
yet opened, the last one asked for is r + workers x prefetch: at most workers x prefetch + 1 batches in a row
are asked for and not opened. Dealt out in turn, so many slots are enough: whoever writes batch n was asked
to after batch n - workers x prefetch was handed over, and so after the batch before that one, which had the
same slot, was opened. A thread that pins opens batches earlier still. No message has to say that a slot is
free. test_loader_slots.py holds this in place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol, final

_APART: Final = 1 << 40  # bytes from one slot to the next; what is not written takes no memory


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where contents lie: the number that the file has in the rank, and the first byte."""

    file: int
    begin: int

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes from `offset` on. In the rank only."""
        while len(memory):
            count = os.preadv(self.file, [memory], self.begin + offset)
            if not count:
                raise EOFError(f"a slot ends {len(memory)} bytes before its batch does")
            memory, offset = memory[count:], offset + count


@final
class Slots:
    """A file that lives in memory and has no name; each batch under way has a stretch of it to itself.

    It grows to the largest batch of each slot.
    """

    def __init__(self, file: int, file_in_rank: int) -> None:
        """Take over an empty file that has no name; a spawned worker knows it by a number of its own."""
        self._file = file
        self._file_in_rank = file_in_rank

    def write(self, slot: int, parts: Iterable[memoryview]) -> Place:
        """Write bytes one after the other. Raises OSError where memory is short.

        Writing says so, where touching a mapping would end the process by SIGBUS.
        """
        begin = end = slot * _APART
        for part in parts:
            while len(part):
                count = os.pwrite(self._file, part, end)
                part, end = part[count:], end + count
        return Place(self._file_in_rank, begin)

    def close(self) -> None:
        """Give the memory back, even where another process still holds the file."""
        os.ftruncate(self._file, 0)
        os.close(self._file)

    def __reduce__(self) -> tuple[object, ...]:
        """Go along with a worker that is spawned: its start hands on open files, perhaps by other numbers."""
        from multiprocessing.reduction import DupFd  # not there on Windows

        return _in_worker, (DupFd(self._file), self._file_in_rank)


@contextmanager
def make_slots() -> Iterator[Slots | None]:
    """Give slots until the block ends, or None where there are none: outside Linux, or with `ulimit -f`.

    Enter before the workers start, and leave when they have ended.
    """
    slots = _slots()
    try:
        yield slots
    finally:
        if slots is not None:
            slots.close()


def _slots() -> Slots | None:
    if sys.platform != "linux":
        return None
    import resource  # not there on Windows

    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return None  # it holds for files in memory too, and slots lie far apart
    with suppress(AttributeError, OSError):  # a Python built for old systems; a sandbox
        file = os.memfd_create("samestep-batches")
        return Slots(file, file)
    return None


class _Passed(Protocol):
    def detach(self) -> int: ...


def _in_worker(passed: _Passed, file_in_rank: int) -> Slots:
    return Slots(passed.detach(), file_in_rank)
