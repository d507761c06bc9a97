"""Start one rank of this machine as a new interpreter, in a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TextIO, final

from samestep.processes.guardian import Guardian, signal_group
from samestep.processes.streams import Capture
from samestep.topology.environment import Place


def local_place(rank: int, world_size: int, rendezvous: str) -> Place:
    """Return the place of a rank whose run is all on this machine."""
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        launcher="samestep",
        reason="started by samestep",
        rendezvous=rendezvous if world_size > 1 else None,
    )


@final
class RankProcess:
    """One running rank. The first rank has the user's terminal; the output of the others is captured.

    The rank leads a session of its own, so that its loader workers and grandchildren end with it, and so
    that a Ctrl-C reaches the supervisor alone.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        guardian: Guardian,
        show: bool,
    ) -> None:
        self.rank = rank
        self.code: int | None = None  # once ended; negative where a signal ended it
        self.ended_at = 0.0  # seconds since the epoch, as seen from here
        captured = rank > 0
        self._guardian = guardian
        with _held_back(signal.SIGINT):
            self._process = subprocess.Popen(
                list(command),
                env=dict(environ),
                stdin=subprocess.DEVNULL if captured else None,
                stdout=subprocess.PIPE if captured else None,
                stderr=subprocess.PIPE if captured else None,
                bufsize=0,
                start_new_session=True,
            )
        guardian.register(self._process.pid)
        self.exit_handle = _exit_handle(self._process.pid)
        self.output = self._capture(self._process.stdout, sys.stdout if show else None)
        self.errors = self._capture(self._process.stderr, sys.stderr if show else None)

    @property
    def captures(self) -> list[Capture]:
        """The streams that are read here: none for the first rank."""
        return [capture for capture in (self.output, self.errors) if capture is not None]

    def has_ended(self) -> bool:
        """Say whether the process has ended, for systems without exit handles."""
        return self._process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank itself, not to its workers, so that it can end in order."""
        os.kill(self._process.pid, number)  # not reaped before `collect`, so the number is still its own

    def send_to_all(self, number: signal.Signals) -> None:
        """Send a signal to the rank and to all it started."""
        signal_group(self._process.pid, number)

    def collect(self) -> None:
        """Take the exit code of a process that has ended, and end whatever it left running."""
        self.ended_at = time.time()
        signal_group(self._process.pid, signal.SIGKILL)
        self.code = self._process.wait()
        self._guardian.release(self._process.pid)
        for capture in self.captures:
            capture.close()
        if self.exit_handle is not None:
            os.close(self.exit_handle)

    def _capture(self, stream: IO[bytes] | None, shown_on: TextIO | None) -> Capture | None:
        if stream is None:
            return None
        return Capture(stream, prefix=f"[rank {self.rank}] ", shown_on=shown_on)


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Start a process inside the block with a signal blocked; it waits until the rank is ready to record it.

    Else a Ctrl-C during the first imports would print a traceback that nobody asked for.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_handle(pid: int) -> int | None:
    """Open a descriptor that becomes readable when the process ends; None where the system has no such."""
    return os.pidfd_open(pid) if sys.platform == "linux" else None
