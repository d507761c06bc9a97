"""`samestep run` of a script on real ranks, watched from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil


class StartedRun:
    """A run under way: its script gets the folder for its marks, and a folder for temporary files."""

    def __init__(self, folder: Path, workers: int, *, marks: Path) -> None:
        """Start `script.py` of `folder`."""
        self.marks, self.temporary = marks, folder / "temporary"
        for made in (self.marks, self.temporary):
            made.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "samestep", "run", "--workers", str(workers), "script.py", str(marks)],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A test run in the background has it ignored, and children would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.out = self.err = ""
        self.ended_at = 0.0

    def wait(self) -> int:
        """Return the exit code; nothing may be left, of processes or of files."""
        self.out, self.err = self.process.communicate(timeout=250)
        self.ended_at = time.time()
        assert self.processes() == []
        # PyTorch makes this folder when it is first used, and keeps it for the next program.
        left = [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        assert left == [], left
        return self.process.returncode

    def processes(self) -> list[str]:
        """Return the command lines of all processes of this run."""
        lines = [
            " ".join(process.info["cmdline"] or [])
            for process in psutil.process_iter(["cmdline", "status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE
        ]
        return [line for line in lines if str(self.marks) in line]

    def await_marks(self, *names: str) -> None:
        """Wait until the ranks have left these marks."""
        limit = time.monotonic() + 200
        while not all((self.marks / name).exists() for name in names):
            assert time.monotonic() < limit, f"no {names}"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def end(self) -> None:
        """End what a failed test left running."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.communicate(timeout=60)
