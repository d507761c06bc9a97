"""Start a supervisor in a process of its own, as the command line does, and look at what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
from samestep.processes.child import script_command
from samestep.processes import spawn
from samestep.processes.supervise import run_ranks
{before}
if __name__ == "__main__":
    sys.exit(run_ranks(script_command({script!r}, sys.argv[1:]), {workers}, **{options}))
"""

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from samestep.errors import ConfigError, PeerLost, TimedOut
from samestep.topology.environment import Environment
place = Environment.current().place()
marks = Path({marks!r})
def mark(name, text="x"):
    part = marks / f"{{name}}-{{place.rank}}.part"
    part.write_text(str(text))
    part.rename(marks / f"{{name}}-{{place.rank}}")
def wait_for(path):
    while not path.exists():
        time.sleep(0.005)
"""


class Launched:
    """A running supervisor."""

    def __init__(self, process: subprocess.Popen[str], marks: Path, temporary: Path) -> None:
        self.process = process
        self.marks = marks
        self.temporary = temporary
        self.out = self.err = ""

    def wait(self, timeout_s: float = 60) -> int:
        self.out, self.err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode

    def wait_for_marks(self, name: str, count: int, timeout_s: float = 60) -> list[str]:
        limit = time.monotonic() + timeout_s
        while len(found := sorted(self.marks.glob(f"{name}-?"))) < count:
            assert time.monotonic() < limit, f"only {found} after {timeout_s} s"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        return [path.read_text() for path in found]

    def leftovers(self) -> list[str]:
        """Return the processes that carry this test's folder in their arguments, and the folders left."""
        lines = []
        for process in psutil.process_iter(["cmdline", "status", "pid"]):
            line = " ".join(process.info["cmdline"] or [])
            if str(self.marks) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
                lines.append(line)
        return [*lines, *map(str, self.temporary.glob("samestep-*"))]

    def leftovers_after(self, seconds: float) -> list[str]:
        """Return what is still there after at most so many seconds."""
        limit = time.monotonic() + seconds
        while (left := self.leftovers()) and time.monotonic() < limit:
            time.sleep(0.02)
        return left


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Give `launch(body, workers)`: run a script on ranks; its last argument marks its processes."""
    started: list[Launched] = []
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def start(
        body: str, workers: int = 3, *, before: str = "", env: dict[str, str] | None = None, **options: Any
    ) -> Launched:
        marks = tmp_path / f"marks{len(started)}"
        marks.mkdir()
        script = marks / "script.py"
        script.write_text(HEAD.format(marks=str(marks)) + body)
        driver = marks / "driver.py"
        driver.write_text(DRIVER.format(script=str(script), workers=workers, options=options, before=before))
        process = subprocess.Popen(
            [sys.executable, str(driver), str(marks)],
            env={**os.environ, "TMPDIR": str(temporary), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(Launched(process, marks, temporary))
        return started[-1]

    yield start
    for launched in started:
        if launched.process.poll() is None:
            os.killpg(launched.process.pid, signal.SIGKILL)
        launched.process.stdout.close()
        launched.process.stderr.close()
        launched.process.wait()
        assert launched.leftovers_after(5) == []
