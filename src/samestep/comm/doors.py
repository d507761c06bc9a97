"""The first rank answers at a door, and the others learn there where the store is; see Note [doors]."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import final

from samestep.errors import ClusterError, ConfigError, TimedOut
from samestep.topology.machine import machine_id
from samestep.topology.meeting_point import HERE, NUM_DOORS, host_and_port
from samestep.topology.place import Place

WORD_S = 2.0  # for one rank to say who it is, and for the answer
RETRY_S = 0.02
LONGEST = 4096  # bytes of a question
OUR_OWN = b"samestep"


@final
class Door:
    """Where the first rank of a job listens until every other rank has come by."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        """Listen. Raises ConfigError where the first rank is not where the others look for it."""
        self._place = place
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        self._came: dict[int, str] = {}
        self._socket = _listen_here(place, self._until) if _is_here(place) else _listen_at_ports(place)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def answer(self, store_port: int) -> None:
        """Tell every other rank the port of the store; raises TimedOut with the ranks that did not come."""
        while len(self._came) < self._place.world_size - 1:
            left = self._until - time.monotonic()
            if left <= 0:
                absent = sorted(set(range(1, self._place.world_size)) - set(self._came))
                raise TimedOut(
                    f"rank 0 of {self._place.world_size} waited {self._timeout_s:g} s for the others at "
                    f"{_where(self._place)}; these ranks did not come: {', '.join(map(str, absent))}. They "
                    "may not have started, or not reach this machine. MASTER_ADDR and MASTER_PORT, where set "
                    "for all ranks, name another meeting point."
                )
            self._socket.settimeout(left)
            with contextlib.suppress(TimeoutError):
                guest, _ = self._socket.accept()
                with guest:
                    self._serve(guest, store_port)

    def _serve(self, guest: socket.socket, store_port: int) -> None:
        guest.settimeout(WORD_S)
        try:
            question = json.loads(_line(guest))
            rank, who = int(question["rank"]), str(question["who"])
            of_this_job = (question["job"], question["world_size"]) == (
                self._place.job,
                self._place.world_size,
            )
        except (OSError, ValueError, KeyError, TypeError):
            return  # no rank of samestep: whoever it was, the door stays open for the others
        if not of_this_job or not 0 < rank < self._place.world_size:
            return
        if self._came.setdefault(rank, who) != who:
            raise ClusterError(
                f"two processes say that they are rank {rank} of {self._place.job!r}: {self._came[rank]} and "
                f"{who}. Two runs were started in one job at once: give each a MASTER_PORT of its own."
            )
        try:
            guest.sendall(b"%s %d\n" % (OUR_OWN, store_port))
        except OSError:
            del self._came[rank]  # it will ring again


def ring(place: Place, timeout_s: float) -> int:
    """Ask the first rank for the port of the store, until it answers.

    Raises TimedOut when it did not within `timeout_s` seconds.
    """
    until = time.monotonic() + timeout_s
    question = {"job": place.job, "world_size": place.world_size, "rank": place.rank, "who": _who()}
    words = json.dumps(question).encode() + b"\n"
    while time.monotonic() < until:
        for address in _addresses(place):
            port = _ask(address, words)
            if port is not None:
                return port
        time.sleep(RETRY_S)
    raise TimedOut(
        f"rank {place.rank} of {place.world_size} found no rank 0 of {place.job!r} at {_where(place)} within "
        f"{timeout_s:g} s. It may not have started, or not be reached from this machine. MASTER_ADDR and "
        "MASTER_PORT, where set for all ranks, name another meeting point."
    )


def _is_here(place: Place) -> bool:
    return place.rendezvous == HERE


def _where(place: Place) -> str:
    if _is_here(place):
        return "a socket of this machine"
    host, port = host_and_port(str(place.rendezvous))
    return f"{host}, ports {port} to {port + NUM_DOORS - 1}"


def _who() -> str:
    return f"process {os.getpid()} on {machine_id().partition('/')[0]}"


def _name(place: Place) -> bytes:
    """Return the abstract name of the door: no file, so nothing is left however a run ends."""
    job = hashlib.sha256(f"{place.job}\n{place.world_size}".encode()).hexdigest()[:32]
    return f"\0samestep-{os.getuid()}-{job}".encode()


def _listen_here(place: Place, until: float) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    while True:
        try:
            door.bind(_name(place))
        except OSError as error:
            if time.monotonic() < until:
                time.sleep(RETRY_S)  # an earlier meeting of the same job has not quite ended
                continue
            door.close()
            raise ClusterError(
                f"another process listens for the ranks of {place.job!r} on this machine "
                f"({error.strerror}). Two runs were started in one job at once: give each a MASTER_PORT of "
                "its own."
            ) from error
        door.listen(socket.SOMAXCONN)
        return door


def _listen_at_ports(place: Place) -> socket.socket:
    host, first = host_and_port(str(place.rendezvous))
    _require_own(host, place)
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    for port in range(first, first + NUM_DOORS):
        with contextlib.suppress(OSError):  # taken: the others try every port
            return socket.create_server(
                ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=socket.SOMAXCONN
            )
    raise ClusterError(
        f"the ports {first} to {first + NUM_DOORS - 1} of {host} are all taken. Set MASTER_PORT to a free "
        "one, for all ranks."
    )


def _require_own(host: str, place: Place) -> None:
    """Raise ConfigError unless the first rank runs on the host where the others look for it."""
    for family, kind, protocol, _, address in _resolved(host, 0):
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return
    raise ConfigError(
        f"{place.launcher} lists {host} as the first host, but rank 0 runs on {socket.gethostname()}: the "
        f"others would not find it. Set MASTER_ADDR={socket.gethostname()} and MASTER_PORT to a free port "
        "there, for all ranks."
    )


def _addresses(place: Place) -> Iterator[tuple[socket.AddressFamily, bytes | tuple[object, ...]]]:
    if _is_here(place):
        yield socket.AF_UNIX, _name(place)
        return
    host, first = host_and_port(str(place.rendezvous))
    for port in range(first, first + NUM_DOORS):
        for family, _, _, _, address in _resolved(host, port):
            yield family, address


def _resolved(
    host: str, port: int
) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]]:
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"The host {host!r} of the first rank cannot be resolved on {socket.gethostname()} ({error}). "
            "Set MASTER_ADDR to an address of it that every machine reaches, and MASTER_PORT to a free port."
        ) from error


def _ask(address: tuple[socket.AddressFamily, bytes | tuple[object, ...]], words: bytes) -> int | None:
    """Return the port of the store, or None where nobody of this job answers."""
    family, where = address
    with socket.socket(family) as link:
        link.settimeout(WORD_S)
        try:
            link.connect(where)
            if family == socket.AF_UNIX and not _same_user(link):
                return None
            link.sendall(words)
            ours, _, port = _line(link).strip().partition(b" ")
            return int(port) if ours == OUR_OWN else None
        except (OSError, ValueError):
            return None  # no door yet, or another's: the next round may find it


def _same_user(link: socket.socket) -> bool:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())


def _line(link: socket.socket) -> bytes:
    words = b""
    while not words.endswith(b"\n"):
        more = link.recv(LONGEST)
        if not more or len(words) > LONGEST:
            raise ValueError("no whole line came")
        words += more
    return words
