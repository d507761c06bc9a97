"""What went wrong on a rank: the record it leaves, which of several was the first cause, and how it reads.

Note [first cause]: one broken rank breaks the others. Records that only say that another rank is gone or
silent come last; of the rest the earliest is the cause. A rank that dies without a record closes its
connections before the supervisor can see it, so its death is dated back by `DEATH_S`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import signal
import socket
import sysconfig
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import final

from samestep.errors import (
    ConfigError,
    DataError,
    Disagreement,
    LossError,
    NonFinite,
    NotReproducible,
    PeerLost,
    TimedOut,
)

DEATH_S = 0.5
DOORBELL = "doorbell"  # a named pipe in the failures folder: the supervisor hears of a record at once
PACKAGE = Path(__file__).parents[1]
INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
STARTUP = (contextlib.__file__, *(f"{PACKAGE / part}/" for part in ("cli", "processes", "testing")))


class Kind(enum.StrEnum):
    """What sort of failure a record tells of; it decides the exit code and what is printed."""

    SETTINGS = "settings"  # a ConfigError: the message is all there is to say
    CONSEQUENCE = "consequence"  # another rank is gone or silent
    EXIT = "exit"  # the program ended itself with a code other than 0
    DEATH = "death"  # the process ended without leaving a record
    ERROR = "error"  # any other exception


@final
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank failed."""

    rank: int
    host: str
    time: float  # seconds since the epoch
    kind: Kind
    message: str
    traceback: str = ""
    code: int = 1  # that the rank's process ends with

    @property
    def exit_code(self) -> int:
        """The exit code of the whole run: 2 for wrong settings, 1 for anything else."""
        return 2 if self.code == 2 and self.kind in (Kind.SETTINGS, Kind.EXIT) else 1


def failure_of(rank: int, error: BaseException) -> Failure:
    """Describe an exception that ended the program of `rank`."""
    now, host = time.time(), socket.gethostname()
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        message = f"exit code {code}" if isinstance(error.code, int) else str(error.code)
        return Failure(rank=rank, host=host, time=now, kind=Kind.EXIT, message=message, code=code)
    if isinstance(error, ConfigError):
        return Failure(rank=rank, host=host, time=now, kind=Kind.SETTINGS, message=str(error), code=2)
    if _says_all(error):
        message = f"{type(error).__name__}: {error}{_place_of(error)}"
        return Failure(rank=rank, host=host, time=now, kind=Kind.ERROR, message=message)
    return Failure(
        rank=rank,
        host=host,
        time=now,
        kind=Kind.CONSEQUENCE if _is_consequence(error) else Kind.ERROR,
        message="".join(traceback.format_exception_only(error)).strip(),
        traceback=_traceback_of(error),
    )


def death_of(rank: int, code: int, seen: float) -> Failure:
    """Describe the end of a process that left no record; `code` is negative where a signal ended it."""
    if code >= 0:
        message = f"its process ended with exit code {code} and no word of why"
    else:
        message = f"its process was ended by {signal.Signals(-code).name}"
        message += ", perhaps by the system for lack of memory" if -code == signal.SIGKILL else ""
    # An abort is how native code gives up when it meets a lost peer: it is not dated back.
    when = seen if code == -signal.SIGABRT else seen - DEATH_S
    return Failure(
        rank=rank, host=socket.gethostname(), time=when, kind=Kind.DEATH, message=message, code=code
    )


def left_alone(rank: int, code: int, seen: float) -> Failure:
    """Describe a rank that stopped on request, as it should, while others did not."""
    message = f"it stopped on request (exit code {code}), but not all others did"
    return Failure(
        rank=rank, host=socket.gethostname(), time=seen, kind=Kind.EXIT, message=message, code=code
    )


def write_record(folder: Path, failure: Failure) -> None:
    """Leave a record in the failures folder, whole or not at all, and ring the supervisor."""
    path = folder / f"rank-{failure.rank}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(dataclasses.asdict(failure)))
    part.replace(path)
    # Without a supervisor there is nobody to hear it, and nobody to miss it.
    with contextlib.suppress(OSError):
        bell = os.open(folder / DOORBELL, os.O_WRONLY | os.O_NONBLOCK)
        os.write(bell, b"!")
        os.close(bell)


def read_records(folder: Path) -> list[Failure]:
    """Read every record that ranks left in the failures folder."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    return [Failure(**{**record, "kind": Kind(record["kind"])}) for record in records]


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Choose the failure that led to the others, see Note [first cause].

    Where several ranks failed alike, as with a wrong setting that all of them read, the lowest speaks.
    """
    earliest = min(failures, key=lambda failure: (failure.kind is Kind.CONSEQUENCE, failure.time))
    alike = [failure for failure in failures if (failure.kind, failure.message) == _likeness(earliest)]
    return min(alike, key=lambda failure: failure.rank)


def describe(failure: Failure, world_size: int, output: Sequence[str] = ()) -> str:
    """Say what failed, for people; `output` is the end of what the rank wrote and nobody saw."""
    if failure.kind is Kind.SETTINGS:
        return failure.message
    rank = f"rank {failure.rank} of {world_size} on host {failure.host} failed:"
    if failure.traceback:
        return f"{rank}\n{failure.traceback.rstrip()}"
    if not output or failure.kind is Kind.ERROR:  # the latter's message says all
        return f"{rank} {failure.message}"
    lines = "\n".join(f"  {line}" for line in output)
    return f"{rank} {failure.message}\nthe last lines of its standard error:\n{lines}"


def _likeness(failure: Failure) -> tuple[Kind, str]:
    return failure.kind, failure.message


def _says_all(error: BaseException) -> bool:
    """Say whether an error is a mistake of the user's that needs no traceback to be understood.

    Where another exception is behind it, the user's own code failed, and its traceback is what helps.
    """
    told = isinstance(error, (DataError, Disagreement, LossError, NonFinite, NotReproducible))
    return told and error.__cause__ is None


def _place_of(error: BaseException) -> str:
    """Return the innermost line of the user's own code, if there is one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((str(PACKAGE), *INSTALLED, "<")):
            return f"\n  at {frame.filename}:{frame.lineno}, in {frame.name}"
    return ""


def _is_consequence(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, (PeerLost, TimedOut)):
            return True
        error = error.__cause__
    return False


def _traceback_of(error: BaseException) -> str:
    trace: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    whole = trace
    while trace is not None:
        while trace.stack and trace.stack[0].filename.startswith(STARTUP):
            if len(trace.stack) == 1 and not isinstance(error, SyntaxError):
                break  # our own mistake: its place is worth showing
            del trace.stack[0]
        trace = trace.__cause__ or trace.__context__
    return "".join(whole.format()) if whole else ""
