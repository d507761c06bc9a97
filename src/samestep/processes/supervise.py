"""Run one command on N ranks of this machine, and end them all together.

Note [phases]: the moments are short, so that everyone is gone within 5 s of the first failure.

| phase | begins | ends |
|---|---|---|
| RUNNING | at the start | when all ranks ended, a rank failed, or a signal asked for a stop |
| HEARING | at the first failure | after `HEAR_S`; `HEAR_CAUSE_S` while only consequences are known |
| STOPPING | at a signal, passed on to the ranks | after `stop_grace_s`, or `TERM_S` once one failed |
| ENDING | SIGTERM to every rank's process group, after the report | after `TERM_S` |
| KILLING | SIGKILL to the same; also at the same signal or a Ctrl-C again | when all are gone |
"""

from __future__ import annotations

import enum
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from samestep.errors import ConfigError
from samestep.processes.child import STOPPED
from samestep.processes.findings import Findings, say
from samestep.processes.guardian import Guardian
from samestep.processes.signals import StopRequests
from samestep.processes.spawn import RankProcess, local_place
from samestep.processes.streams import Capture
from samestep.topology.environment import Environment

HEAR_S = 0.5
HEAR_CAUSE_S = 2.0
TERM_S = 2.0
POLL_S = 0.05  # only where the system has no exit handles


def run_ranks(
    command: Sequence[str],
    workers: int,
    *,
    threads: int = 1,
    all_ranks: bool = False,
    stop_grace_s: float = 2.0,
) -> int:
    """Run `command`, a whole argument list, as each of `workers` ranks on this machine; return an exit code.

    The ranks find their places by `Environment.current().place()` and meet at a file in a private folder, so
    runs started at once cannot clash, and no port or variable has to be chosen. A command wraps its work in
    `child.recording_failures()`; one that does not is only reported with its exit code.

    0: all ranks ended with 0. 3: all ended with 3, stopped on request. Else the first cause among all ranks
    was printed, once, on standard error: 2 for wrong settings, 1 for anything else and after a SIGINT or
    SIGTERM. A rank that ends with 0 or 3 before the others is no failure, but with 3 the others must follow
    within `stop_grace_s`; so must all after a signal. When the call returns, or this process dies, no process
    and no file is left.
    """
    if workers < 1:
        raise ConfigError(f"workers is {workers}; a run needs at least 1 rank.")
    sys.stdout.flush()
    environment = Environment.current()
    with StopRequests() as requests, Guardian() as guardian:
        failures = guardian.folder / "failures"
        rendezvous = f"file://{guardian.folder / 'rendezvous'}"
        supervisor = Supervisor(Findings(failures), requests, stop_grace_s)
        try:
            for rank in range(workers):
                place = local_place(rank, workers, rendezvous)
                environ = environment.child(place, failures=failures, threads=threads, unbuffered=all_ranks)
                supervisor.add(RankProcess(rank, command, environ, guardian=guardian, show=all_ranks))
            return supervisor.watch()
        finally:
            supervisor.close()


class Phase(enum.Enum):
    """What the supervisor is about, see Note [phases]."""

    RUNNING = enum.auto()
    HEARING = enum.auto()
    STOPPING = enum.auto()
    ENDING = enum.auto()
    KILLING = enum.auto()


@final
class Supervisor:
    """Wait for ranks, signals and failure records; decide when the ranks must end, and what is said."""

    def __init__(self, findings: Findings, requests: StopRequests, stop_grace_s: float) -> None:
        self._findings = findings
        self._requests = requests
        self._stop_grace_s = stop_grace_s
        self._ranks: list[RankProcess] = []
        self._phase = Phase.RUNNING
        self._since: float | None = None  # on the monotonic clock: what the limit of this phase counts from
        self._asked_by: signal.Signals | None = None
        self._stops_in_order = True
        self._selector = selectors.DefaultSelector()
        self._on(findings.bell, self._rung)
        self._on(requests.stream, self._requested)

    def add(self, rank: RankProcess) -> None:
        """Take over a rank that was just started."""
        self._ranks.append(rank)
        if rank.exit_handle is not None:
            self._on(rank.exit_handle, partial(self._ended, rank))
        for capture in rank.captures:
            self._on(capture.stream.fileno(), partial(self._pump, capture))

    def watch(self) -> int:
        """Return the exit code of the whole run, once all ranks have ended."""
        while running := self._running():
            for key, _ in self._selector.select(self._patience()):
                react: Callable[[], None] = key.data
                react()
            for rank in running:
                if rank.exit_handle is None and rank.has_ended():
                    self._ended(rank)
            self._advance()
        return self._verdict()

    def close(self) -> None:
        """Kill and collect whatever runs."""
        for rank in self._running():
            rank.send_to_all(signal.SIGKILL)
            rank.collect()
        self._selector.close()
        self._findings.close()

    def _on(self, descriptor: int, react: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, react)

    def _running(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.code is None]

    def _limit(self) -> float | None:
        """Return when this phase must end, on the monotonic clock; None: it may last."""
        if self._since is None:
            return None
        seconds = {
            Phase.RUNNING: self._stop_grace_s,
            Phase.HEARING: HEAR_CAUSE_S if self._findings.only_consequences else HEAR_S,
            Phase.STOPPING: self._stop_grace_s if self._stops_in_order else min(TERM_S, self._stop_grace_s),
            Phase.ENDING: TERM_S,
        }
        return self._since + seconds[self._phase] if self._phase in seconds else None

    def _patience(self) -> float | None:
        limit = self._limit()
        waits = [] if limit is None else [max(0.0, limit - time.monotonic())]
        if any(rank.exit_handle is None for rank in self._running()):
            waits.append(POLL_S)
        return min(waits, default=None)

    def _advance(self) -> None:
        limit = self._limit()
        if limit is None or time.monotonic() < limit:
            return
        if self._phase in (Phase.RUNNING, Phase.HEARING):
            self._findings.report(self._ranks)
            self._enter(Phase.ENDING)
        else:
            self._enter(Phase.KILLING)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._since = time.monotonic()
        if phase in (Phase.ENDING, Phase.KILLING):
            for rank in self._running():
                rank.send_to_all(signal.SIGTERM if phase is Phase.ENDING else signal.SIGKILL)

    def _rung(self) -> None:
        self._findings.hear()
        self._look()

    def _pump(self, capture: Capture) -> None:
        capture.pump()
        if capture.ended:
            self._selector.unregister(capture.stream)

    def _ended(self, rank: RankProcess) -> None:
        if rank.exit_handle is not None:
            self._selector.unregister(rank.exit_handle)
        for capture in rank.captures:
            if not capture.ended:
                self._selector.unregister(capture.stream)
        rank.collect()
        if rank.code == STOPPED and self._phase is Phase.RUNNING and self._since is None:
            self._since = time.monotonic()
        self._look()

    def _requested(self) -> None:
        for number in self._requests.take():
            if self._asked_by is not None or self._phase is not Phase.RUNNING:
                # A scheduler sends one signal as a warning and another before it kills: no reason to hurry.
                if number in (signal.SIGINT, self._asked_by):
                    self._enter(Phase.KILLING)
                continue
            self._asked_by = number
            say(f"samestep: {number.name}: ending all ranks; once more kills them at once.")
            self._enter(Phase.STOPPING)
            for rank in self._running():
                rank.send(signal.SIGTERM if number is signal.SIGHUP else number)

    def _look(self) -> None:
        """Learn which ranks failed by themselves; once they are being ended, they only obey."""
        if self._phase in (Phase.ENDING, Phase.KILLING):
            return
        self._findings.look(self._ranks)
        failed = {failure.rank for failure in self._findings.failures}
        if self._phase is Phase.RUNNING and failed:
            self._enter(Phase.HEARING)
        elif self._phase is Phase.STOPPING and failed >= {rank.rank for rank in self._running()}:
            self._enter(Phase.ENDING)  # their programs are over; only workers of theirs can hold them
        elif self._phase is Phase.STOPPING and failed and self._stops_in_order:
            self._stops_in_order = False  # so no state will be stored that were worth a long wait
            self._since = time.monotonic()

    def _verdict(self) -> int:
        codes = {rank.code for rank in self._ranks}
        if codes == {STOPPED}:
            return STOPPED
        if self._asked_by is not None:
            return 1
        return 0 if codes == {0} else self._findings.report(self._ranks)
