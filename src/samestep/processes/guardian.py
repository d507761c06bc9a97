"""The last resort of a run: a small process that ends what a dead supervisor left behind.

The guardian reads a pipe whose other end the supervisor holds. However the supervisor ends, the pipe ends
with it; the guardian then kills the process groups that are still registered and removes the run's private
folder. An orderly end takes the same road. A thread in each rank that watched such a pipe would need that
rank's interpreter lock and would miss its grandchildren; the kernel's parent-death signal misses them too.

This file is also the guardian's program: it is run by its path with nothing of samestep imported, so it is
there within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self, final

END_S = 5.0  # for the guardian to end once its pipe is closed
GONE_S = 2.0  # for killed processes to be gone, so that none writes into the folder while it is removed


@final
class Guardian:
    """A private folder for a run, and the promise that its process groups end, both for one `with` block."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="samestep-"))
        reads, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(self.folder)],
                stdin=reads,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C of the terminal is not meant for it
            )
        except OSError:
            os.close(self._pipe)
            shutil.rmtree(self.folder)
            raise
        finally:
            os.close(reads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill what is still registered, remove the folder, and end the guardian."""
        os.close(self._pipe)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # still there only where the guardian was killed

    def register(self, group: int) -> None:
        """Have the process group killed when this process ends, however that comes about."""
        self._tell(f"+{group}\n")

    def release(self, group: int) -> None:
        """Forget a process group that has ended, for its number may be used again."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        # A broken pipe: someone killed the guardian, and the run goes on without its last resort.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, line.encode())


def signal_group(group: int, number: signal.Signals) -> bool:
    """Send a signal to every process of a group; return False where there is none that could take it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # some systems say "not permitted" of a group of zombies
        return False
    return True


def guard(folder: Path) -> None:
    """Read the pipe until it ends; then kill what is still registered and remove the folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.read().split():
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    limit = time.monotonic() + GONE_S
    while groups and time.monotonic() < limit:
        groups = {group for group in groups if signal_group(group, signal.SIGKILL)}
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
