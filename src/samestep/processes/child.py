"""What runs in a child rank: the user's script, and a failure record in place of a printed traceback."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from samestep.processes.failure import failure_of, write_record
from samestep.topology.environment import Environment

STOPPED = 3  # the exit code of a rank that stopped on request


@contextmanager
def recording_failures(environment: Environment | None = None) -> Iterator[None]:
    """Turn an exception that would end this process into a failure record and an exit code.

    In a child rank of `supervise.run_ranks` the record goes to the supervisor, which prints the first cause
    of all ranks once; this process prints nothing and raises SystemExit (2 for a ConfigError, the code of a
    SystemExit, else 1). In any other process the block is left alone. SystemExit with 0 or 3 (stopped on
    request) is an orderly end and passes. Raise SystemExit inside, not the command line library's own exit.
    """
    environment = environment or Environment.current()
    folder = environment.failures
    if folder is None:
        yield
        return
    process = os.getpid()
    try:
        # The supervisor starts a rank with SIGINT held back; from here on it is recorded like any error.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield
    except BaseException as error:
        orderly = isinstance(error, SystemExit) and error.code in (None, 0, STOPPED)
        if orderly or os.getpid() != process:  # a process forked inside the block is not the rank
            raise
        failure = failure_of(environment.place().rank, error)
        write_record(folder, failure)
        raise SystemExit(failure.code) from None


def script_command(script: str, args: Sequence[str]) -> list[str]:
    """Return the command that runs a script as a child rank.

    `-P` keeps the current folder off the import path: a file of the user's there must not shadow what the
    start-up imports. The script's own folder is put first afterwards, as Python itself does.
    """
    return [sys.executable, "-P", "-m", "samestep.processes.child", script, *args]


def run_script(script: str, args: Sequence[str]) -> None:
    """Run a script as `__main__` in this process, with `sys.argv` and `sys.path` as Python sets them.

    The module stays `__main__` afterwards, as pickling and loader workers expect it to.
    """
    path = os.path.abspath(script)  # so that it is still found after the script changed the folder
    with io.open_code(path) as source:
        code = compile(source.read(), path, "exec")
    sys.argv = [script, *args]
    folder = os.path.dirname(os.path.realpath(path))
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def main() -> None:
    """Run the script that the command line names, as a child rank."""
    with recording_failures():
        run_script(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
