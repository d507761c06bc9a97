"""What the supervisor knows of failures: the records of ranks, and the ends of those that left none."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import final

from samestep.processes.child import STOPPED
from samestep.processes.failure import (
    DOORBELL,
    Failure,
    Kind,
    death_of,
    describe,
    first_cause,
    left_alone,
    read_records,
)
from samestep.processes.spawn import RankProcess

REPORT_LINES = 20
ORDERLY = (None, 0, STOPPED)  # still running, done, or stopped on request


@final
class Findings:
    """Collect the failures of a run, and report the first cause of all, once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        os.mkfifo(folder / DOORBELL)
        # Open for both, so that the pipe does not end each time a rank has rung and closed it.
        self.bell = os.open(folder / DOORBELL, os.O_RDWR | os.O_NONBLOCK)
        self.failures: list[Failure] = []
        self._folder = folder
        self._reported: Failure | None = None

    @property
    def only_consequences(self) -> bool:
        """Whether no rank has said more yet than that another one is gone or silent."""
        return all(failure.kind is Kind.CONSEQUENCE for failure in self.failures)

    def look(self, ranks: Sequence[RankProcess]) -> None:
        """Learn which ranks have failed by themselves so far."""
        records = read_records(self._folder)
        known = {record.rank for record in records}
        silent = [rank for rank in ranks if rank.rank not in known and rank.code not in ORDERLY]
        self.failures = [*records, *(death_of(rank.rank, rank.code or 0, rank.ended_at) for rank in silent)]

    def report(self, ranks: Sequence[RankProcess]) -> int:
        """Print the first cause, unless it was printed before; return the exit code of the run."""
        if self._reported is None:
            # No failure at all: some ranks stopped on request, and the others did not follow.
            stopped = [rank for rank in ranks if rank.code == STOPPED]
            alone = [left_alone(rank.rank, STOPPED, rank.ended_at) for rank in stopped]
            self._reported = first_cause(self.failures or alone)
            say(describe(self._reported, len(ranks), _unseen(ranks[self._reported.rank])))
        return self._reported.exit_code

    def hear(self) -> None:
        """Take the ring of the doorbell."""
        os.read(self.bell, 4096)

    def close(self) -> None:
        """Close the doorbell."""
        os.close(self.bell)


def say(message: str) -> None:
    """Print a line of the supervisor's own on standard error."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def _unseen(rank: RankProcess) -> list[str]:
    """Return the end of the rank's standard error where it was not shown."""
    if rank.errors is None or rank.errors.shown:
        return []
    rank.errors.drain()
    return rank.errors.last_lines(REPORT_LINES)
