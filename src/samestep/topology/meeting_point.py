"""Where the ranks of a launcher meet: what it tells, or what follows from its job.

Note [doors]: a launcher that tells no port leaves two questions, which port is free and whose it is. The
first rank listens at a door: a socket named after the job where all ranks are on one machine, else the first
free of `NUM_DOORS` ports that follow from the job's name. It answers ranks of its own job with the port of
the store, which the system chose. So a taken port is passed over, and two jobs at the same ports do not mix.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

from samestep.errors import ConfigError
from samestep.topology.host_lists import slurm_hosts
from samestep.topology.launchers import MASTER, Form, Host, Launcher
from samestep.topology.variables import Variables

NUM_DOORS = 8
FIRST_DOOR = 20000  # below the ports that Linux hands out by itself, from 32768 on
DOOR_RANGE = 12000
HERE = "here://"
DOOR = "door://"
TCP = "tcp://"
FILE = "file://"


def meeting_point(
    variables: Variables,
    launcher: Launcher,
    *,
    world_size: int,
    on_one_machine: bool,
    starter: Callable[[str], str],
) -> tuple[str | None, str]:
    """Return the rendezvous, see Note [rendezvous], and the name of the job.

    MASTER_ADDR and MASTER_PORT, where set, win over what follows from the job. Raises ConfigError where the
    ranks cannot know where to meet; it says what to set.
    """
    if launcher.rendezvous:
        return _told(variables, launcher, world_size), ""
    if world_size == 1:
        return None, ""
    address, port = variables.value(MASTER[0]), variables.port(MASTER[1])
    if on_one_machine and address is None:
        if port is not None:
            return f"{TCP}127.0.0.1:{port}", ""
        name = _job(variables, launcher, launcher.job) or _named(launcher, starter(launcher.rank))
        return (HERE if sys.platform == "linux" else f"{DOOR}127.0.0.1:{door_of(name)}"), name
    host = address or _first_host(variables, launcher.hosts)
    if host is None:
        raise ConfigError(
            f"{launcher.name} started {world_size} ranks, not all on one machine as far as is known "
            f"({launcher.world_size} is {world_size}), and does not tell where the first of them runs. Set "
            "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, for all ranks."
        )
    host = f"[{host}]" if ":" in host else host
    if port is not None:
        return f"{TCP}{host}:{port}", ""
    shared = _job(variables, launcher, (*launcher.job, *launcher.batch_job))
    if shared is None:
        raise ConfigError(
            f"{launcher.name} tells nothing by which its {world_size} ranks could agree on a port of {host}. "
            "Set MASTER_PORT to a port that is free there, for all ranks."
        )
    return f"{DOOR}{host}:{door_of(shared)}", shared


def door_of(job: str) -> int:
    """Return the first of the ports at which the first rank of a job may answer."""
    return FIRST_DOOR + zlib.crc32(job.encode()) % DOOR_RANGE


def host_and_port(rendezvous: str) -> tuple[str, int]:
    """Split "tcp://host:port" or "door://host:port"; an IPv6 address loses its brackets."""
    host, _, port = rendezvous.partition("://")[2].rpartition(":")
    return host.strip("[]"), int(port)


def _told(variables: Variables, launcher: Launcher, world_size: int) -> str | None:
    values = [variables.value(name) for name in launcher.rendezvous]
    if world_size == 1 and None in values:
        return None
    for name, value in zip(launcher.rendezvous, values, strict=True):
        if value is None:
            raise ConfigError(
                f"{launcher.world_size} is {world_size}, but {name} is not set: the ranks cannot meet. "
                f"Set {name}, or start the ranks with `samestep run` or torchrun."
            )
    if len(values) == 1:
        return values[0]
    port = variables.port(launcher.rendezvous[1])
    address = str(values[0])
    return f"{TCP}[{address}]:{port}" if ":" in address else f"{TCP}{address}:{port}"


def _job(variables: Variables, launcher: Launcher, names: tuple[str, ...]) -> str | None:
    found = variables.found(names)
    return _named(launcher, ".".join(str(variables.value(name)) for name in found)) if found else None


def _named(launcher: Launcher, job: str) -> str:
    return f"{launcher.name} {job}"


def _first_host(variables: Variables, hosts: tuple[Host, ...]) -> str | None:
    for host in hosts:
        value = variables.value(host.variable)
        if value is not None and (found := _read(host, value)):
            return found
    return None


def _read(host: Host, value: str) -> str | None:
    match host.form:
        case Form.NAME:
            return value.rpartition(":")[0] if value.count(":") == 1 else value
        case Form.SLURM:
            return next(slurm_hosts(value), None)
        case Form.JSON:
            return _first_of_json(host.variable, value)
        case Form.URI:
            found = re.search(r"tcp[46]?://\[?([^,\]]+?)[,\]]?(?::\d+)?$|tcp[46]?://([^,:]+)", value)
            return (found[1] or found[2]).split(",")[0] if found else None
        case Form.FILE | Form.FILE_PAST_FIRST:
            return _first_of_file(host, Path(value))


def _first_of_json(name: str, value: str) -> str | None:
    try:
        hosts = json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{name} is {value!r}, which is no JSON list of hosts. Set MASTER_ADDR.") from error
    return str(hosts[0]) if isinstance(hosts, list) and hosts else None


def _first_of_file(host: Host, path: Path) -> str | None:
    try:
        lines = [line.split()[0] for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(
            f"{host.variable} names {path}, which cannot be read ({error.strerror}). Set MASTER_ADDR."
        ) from error
    if host.form is Form.FILE_PAST_FIRST:
        lines = [line for line in lines if line != lines[0]]
    return lines[0] if lines else None
