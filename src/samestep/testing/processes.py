"""Ranks as real processes, for tests: real links, real deaths, no port and no launcher.

Importing torch costs seconds for each new interpreter, so ranks are forked from one server process that has
imported it and has made no thread yet. That server stays until the calling process ends; everything else is
gone when a call returns.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar, final

import torch

from samestep.errors import ClusterError, ConfigError, PeerLost, TimedOut
from samestep.processes.failure import Failure, Kind, death_of, describe, failure_of, first_cause
from samestep.processes.guardian import Guardian, signal_group
from samestep.processes.spawn import local_place
from samestep.processes.supervise import HEAR_CAUSE_S, HEAR_S
from samestep.topology.environment import Place, settle_interface

# The first optimizer that is made imports torch._dynamo, which takes longer than torch itself.
PRELOADED = ("torch", "torch.distributed", "torch._dynamo", __name__)
# What each rank would otherwise import again along with the function's module, where the caller has it.
ALSO_PRELOADED = ("samestep", "pytest", "hypothesis")
START_S = 120.0  # for the server to import what it preloads, on a busy machine, and fork the ranks
STACK_S = 1.0  # for the ranks that hang to write down where

Result = TypeVar("Result")


def run_processes(
    function: Callable[..., Result], world_size: int, *args: object, timeout_s: float = 60.0
) -> list[Result]:
    """Call `function(place, *args)` as every rank of a world of processes; return the results by rank.

    The function must be importable, its arguments and results must pickle. Each rank has a place with a file
    rendezvous of its own, one thread for torch, and a process group that ends with the call. If ranks fail,
    the others are ended after a moment and the exception of the first cause is raised, with its rank and
    traceback as a note; PeerLost for a rank whose process died, ClusterError for an exception that cannot
    travel. TimedOut, with the stacks of the ranks that still run, after `timeout_s` seconds.
    """
    if world_size < 1:
        raise ConfigError(f"world_size is {world_size}; a world needs at least 1 rank.")
    try:
        call = pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"run_processes cannot send {function!r} with its arguments to another process ({error}). Use a "
            "function at the top of a module, and arguments that pickle."
        ) from error
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *_imported_here()])
    with Guardian() as guardian:
        world = _World(context, guardian, world_size, call)
        try:
            world.wait(time.monotonic() + timeout_s)
            if late := world.running():
                raise TimedOut(
                    f"{function.__qualname__} as {world_size} ranks did not end within {timeout_s:g} s; "
                    f"still running: {', '.join(f'rank {rank.place.rank}' for rank in late)}.\n"
                    + _stacks(late)
                )
        finally:
            world.end()
        return [rank.result for rank in world.ranks]


@final
class _Rank:
    """One rank as its parent sees it."""

    def __init__(self, context: ForkServerContext, guardian: Guardian, place: Place, call: bytes) -> None:
        self.place = place
        self.result: Any = None
        self.failure: Failure | None = None
        self.error: Exception | None = None
        self.heard_end = False
        self.stacks = guardian.folder / f"stacks-{place.rank}"
        self.connection, theirs = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, place, str(self.stacks), call)
        )
        self.process.start()
        theirs.close()
        self.group = self.process.pid or 0
        guardian.register(self.group)

    def handles(self) -> list[Connection | int]:
        """Return what becomes readable when the rank has something to say or ends."""
        # What `hear` knows, not what is true by now: an end that it has not seen must still wake the caller.
        if self.heard_end:
            return []
        return [self.process.sentinel] if self.connection.closed else [self.connection, self.process.sentinel]

    def await_start(self) -> None:
        """Wait for the rank's first, empty message: starting up is not part of the caller's time limit."""
        if not self.connection.poll(START_S):
            raise TimedOut(f"rank {self.place.rank} did not start within {START_S:g} s.")
        with contextlib.suppress(EOFError):  # it died already, and its exit code will tell
            self.connection.recv_bytes()

    def hear(self) -> None:
        """Take the rank's message, once it is there, and its end."""
        self.heard_end = ended = self.process.exitcode is not None
        if not self.connection.closed and self.connection.poll():
            with contextlib.suppress(EOFError):  # it died without a word, and its exit code will tell
                self.failure, self.error, self.result = pickle.loads(self.connection.recv_bytes())
            self.connection.close()
        if ended and self.process.exitcode != 0 and self.failure is None:
            self.failure = death_of(self.place.rank, self.process.exitcode or 0, time.time())

    def end(self) -> None:
        """Kill the process, if it still runs, and all it started."""
        self.process.kill()
        signal_group(self.group, signal.SIGKILL)
        self.process.join()
        self.process.close()
        self.connection.close()


@final
class _World:
    """All ranks of one call."""

    def __init__(self, context: ForkServerContext, guardian: Guardian, world_size: int, call: bytes) -> None:
        rendezvous = f"file://{guardian.folder / 'rendezvous'}"
        self._guardian = guardian
        self.ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                place = local_place(rank, world_size, rendezvous)
                self.ranks.append(_Rank(context, guardian, place, call))
            for started in self.ranks:
                started.await_start()
        except BaseException:
            self.end()
            raise

    def running(self) -> list[_Rank]:
        """Return the ranks whose processes have not ended."""
        return [rank for rank in self.ranks if rank.process.exitcode is None]

    def wait(self, limit: float) -> None:
        """Wait until all ranks have ended; raise the first cause a moment after a rank has failed."""
        failed_at: float | None = None
        while True:
            failures = [rank.failure for rank in self.ranks if rank.failure is not None]
            now = time.monotonic()
            if failures and failed_at is None:
                failed_at = now
            until = limit
            if failed_at is not None:
                alone = all(failure.kind is Kind.CONSEQUENCE for failure in failures)
                until = min(limit, failed_at + (HEAR_CAUSE_S if alone else HEAR_S))
            handles = [handle for rank in self.ranks for handle in rank.handles()]
            if not handles or now >= until:
                break
            wait(handles, until - now)
            for rank in self.ranks:
                rank.hear()
        if failures:
            self._raise(failures)

    def end(self) -> None:
        """Kill what still runs."""
        for rank in self.ranks:
            rank.end()
            self._guardian.release(rank.group)

    def _raise(self, failures: Sequence[Failure]) -> None:
        cause = first_cause(failures)
        text = describe(cause, len(self.ranks))
        error = self.ranks[cause.rank].error
        if error is None:
            raise PeerLost(text) if cause.kind is Kind.DEATH else ClusterError(text)
        error.add_note(text)
        raise error


def _serve(connection: Connection, place: Place, stacks: str, call: bytes) -> None:
    """Be one rank: call the function, and send what came of it."""
    os.setsid()
    # Never closed: it serves until the process is gone, for a rank may hang while it ends.
    faulthandler.register(signal.SIGUSR1, file=os.open(stacks, os.O_CREAT | os.O_WRONLY), all_threads=True)
    connection.send_bytes(b"")
    torch.set_num_threads(1)
    settle_interface(place)
    try:
        function, args = pickle.loads(call)
        message = pickle.dumps((None, None, function(place, *args)))
    except BaseException as error:
        message = pickle.dumps((failure_of(place.rank, error), _portable(error), None))
    connection.send_bytes(message)


def _imported_here() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in ALSO_PRELOADED]


def _portable(error: BaseException) -> Exception | None:
    """Return the error if it comes out of pickling as it went in, else None."""
    if not isinstance(error, Exception):
        return None
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # an exception class may do anything in its constructor
        return None
    return error if type(copy) is type(error) and str(copy) == str(error) else None


def _stacks(late: Sequence[_Rank]) -> str:
    """Ask the ranks that hang where they are."""
    for rank in late:
        os.kill(rank.group, signal.SIGUSR1)
    limit = time.monotonic() + STACK_S
    while time.monotonic() < limit and not all(_text(rank.stacks) for rank in late):
        time.sleep(0.02)
    return "\n".join(f"rank {rank.place.rank}:\n{_text(rank.stacks)}" for rank in late)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
