"""Where this process stands in a run: the only reader, and for child ranks the writer, of variables.

The launchers it knows, and the order in which they are asked, are the table in `launchers.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Self, final

import psutil

from samestep.topology.detect import CHOICE, Candidate, candidates, find_place
from samestep.topology.launchers import LAUNCHERS, OWN, OWN_LOCAL_RANK, OWN_LOCAL_WORLD_SIZE
from samestep.topology.meeting_point import FILE, HERE, host_and_port
from samestep.topology.network import interface_to, is_loopback, loopback_interface
from samestep.topology.place import Place as Place
from samestep.topology.variables import Variables

INTERFACE = "GLOO_SOCKET_IFNAME"
THREADS = "OMP_NUM_THREADS"
FAILURES = "SAMESTEP_FAILURES"
STACK_ON_CRASH = "PYTHONFAULTHANDLER"


@final
class Environment:
    """A frozen copy of the environment variables; empty ones count as not set."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = Variables(variables)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """Copy the variables of `environ`."""
        return cls(environ)

    @classmethod
    def current(cls) -> Self:
        """Copy the variables of this process."""
        return cls(os.environ)

    @property
    def failures(self) -> Path | None:
        """The folder where a child rank of samestep's own start leaves its failure record, else None."""
        folder = self._variables.value(FAILURES)
        return Path(folder) if folder and self._variables.value(OWN.rank) else None

    def values(self, names: Iterable[str]) -> dict[str, str]:
        """Return those of the named variables that are set."""
        found = {name: self._variables.value(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def cublas_workspace(self) -> str | None:
        """The value of CUBLAS_WORKSPACE_CONFIG, which decides whether cuBLAS repeats its bits."""
        return self._variables.value("CUBLAS_WORKSPACE_CONFIG")

    def place(self) -> Place:
        """Find the launcher and this process's place in its run; see `detect.find_place`."""
        return find_place(self._variables, starter_of)

    def candidates(self) -> list[Candidate]:
        """List the launchers some of whose variables are set, and why each was chosen or not."""
        return candidates(self._variables)

    def child(
        self, place: Place, *, failures: Path, threads: int, unbuffered: bool = False
    ) -> dict[str, str]:
        """Return the variables for a child rank at `place`, whose ranks are all on this machine.

        What the user set stands: OMP_NUM_THREADS, GLOO_SOCKET_IFNAME, PYTHONFAULTHANDLER,
        PYTHONUNBUFFERED. Variables of other launchers are taken out, see Note [one table].
        """
        foreign = {CHOICE, *(name for launcher in LAUNCHERS for name in launcher.variables())}
        variables = {name: value for name, value in self._variables.all.items() if name not in foreign}
        defaults = {THREADS: str(threads), STACK_ON_CRASH: "1"}
        if (loopback := loopback_interface()) is not None:
            defaults[INTERFACE] = loopback
        if unbuffered:
            defaults["PYTHONUNBUFFERED"] = "1"
        variables |= {name: value for name, value in defaults.items() if not self._variables.value(name)}
        variables |= {
            OWN.rank: str(place.rank),
            OWN.world_size: str(place.world_size),
            OWN_LOCAL_RANK: str(place.local_rank),
            OWN_LOCAL_WORLD_SIZE: str(place.local_world_size),
            FAILURES: str(failures),
        }
        if place.rendezvous is not None:
            variables[OWN.rendezvous[0]] = place.rendezvous
        return variables


def starter_of(variable: str) -> str:
    """Name the process that started the ranks: the nearest parent that was started without the variable.

    Between the launcher and a rank there may be shells and wrappers, which have the variable too.
    """
    for parent in psutil.Process().parents():
        try:
            inherited = variable in parent.environ()
        except psutil.Error:  # it belongs to another user, as a launcher's daemon may
            inherited = False
        if not inherited:
            return f"started by process {parent.pid}"
    return "started by process 0"


def settle_interface(place: Place, environ: MutableMapping[str, str] | None = None) -> str | None:
    """Tell gloo, by GLOO_SOCKET_IFNAME, which network interface reaches the other ranks; return its name.

    Call it before the process group is made. What the user set stands. Ranks of one machine meet on the
    loopback interface; otherwise the interface is the one on the route to the rendezvous. Left to itself,
    gloo asks for its own host name and falls back to loopback, where other machines never find it.
    None: nothing was set, because no interface could be told.
    """
    variables = os.environ if environ is None else environ
    if already := variables.get(INTERFACE):
        return already
    found = _interface(place)
    if found is not None:
        variables[INTERFACE] = found
    return found


def _interface(place: Place) -> str | None:
    if place.rendezvous is None:
        return None
    if place.rendezvous.startswith((FILE, HERE)):
        return loopback_interface()
    found = interface_to(host_and_port(place.rendezvous)[0])
    if place.local_world_size < place.world_size and (found is None or is_loopback(found)):
        # Some systems give their own host name the address 127.0.1.1, so the route from the master to itself
        # is loopback; a documentation address (nothing is sent) shows the way out of the machine instead.
        return interface_to("192.0.2.1")
    return found
