"""A whole Slurm of two nodes on this machine, with its own keys, ports and folder; nothing of it stays."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
START_S = 60.0
# Names that need no name server: the nodes are called by addresses of the loopback interface.
NODES = ("127.0.0.1", "127.0.0.2")

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool/%n
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


@contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """Give the variables by which srun finds the cluster; skip the test where there is no Slurm."""
    missing = [program for program in PROGRAMS if _program(program) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: apt-get install munge slurm-wlm")
    if os.getuid() != 0:
        pytest.skip("a Slurm of one's own needs to be root")
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True))
        )
        for name in ("spool", "state"):
            (folder / name).mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        file = folder / "slurm.conf"
        file.write_text(CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=_ports()))
        variables = {**os.environ, "SLURM_CONF": str(file)}
        told = {"key-file": "key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        munge = [f"--{name}={folder / value}" for name, value in {**told, "seed-file": "seed"}.items()]
        stack.enter_context(_running(["munged", "--foreground", "--force", *munge], variables))
        _wait(lambda: (folder / "munge.socket").exists(), "munged made no socket")
        stack.enter_context(_running(["slurmctld", "-D"], variables))
        for node in NODES:
            stack.enter_context(_running(["slurmd", "-D", "-N", node], variables))
        _wait(lambda: _idle(variables) == len(NODES), "the nodes did not become idle")
        yield {"SLURM_CONF": str(file)}


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _ports() -> list[int]:
    """Find three free ports, the last two in a row."""
    for first in range(17000, 19000, 3):
        with ExitStack() as stack:
            try:
                for port in range(first, first + 3):
                    stack.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            return [first, first + 1, first + 2]
    raise RuntimeError("no three free ports in a row")


@contextmanager
def _running(command: list[str], variables: dict[str, str]) -> Iterator[None]:
    program = _program(command[0])
    assert program is not None
    process = subprocess.Popen(
        [program, *command[1:]], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle(variables: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    told = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30, check=False)
    return told.stdout.split().count("idle")


def _wait(there: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + START_S
    while not there():
        assert time.monotonic() < limit, what
        time.sleep(0.1)
