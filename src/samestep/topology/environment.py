"""Where this process stands in a run: the only reader, and for child ranks the writer, of variables.

The launchers it knows, and the order in which they are asked, are the table in `launchers.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from samestep.errors import ConfigError
from samestep.topology.launchers import LAUNCHERS, OWN, STRANGERS, Launcher
from samestep.topology.network import interface_to, is_loopback, loopback_interface

INTERFACE = "GLOO_SOCKET_IFNAME"
THREADS = "OMP_NUM_THREADS"
FAILURES = "SAMESTEP_FAILURES"
STACK_ON_CRASH = "PYTHONFAULTHANDLER"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where this process stands among the ranks of a run, and who said so."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"  # the row of the table that was chosen
    reason: str  # why, for people
    rendezvous: str | None = None  # "file://" and a path as it is, or "tcp://host:port"; None: a world of one
    agent_store: bool = False  # the launcher already serves the TCP store
    attempt: int = 0  # restarts by the launcher; keys of an agent store must carry it


@final
class Environment:
    """A frozen copy of the environment variables; empty ones count as not set."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)

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
        folder = self._value(FAILURES)
        return Path(folder) if folder and self._value(OWN.rank) else None

    def values(self, names: Iterable[str]) -> dict[str, str]:
        """Return those of the named variables that are set."""
        found = {name: self._value(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def cublas_workspace(self) -> str | None:
        """The value of CUBLAS_WORKSPACE_CONFIG, which decides whether cuBLAS repeats its bits."""
        return self._value("CUBLAS_WORKSPACE_CONFIG")

    def place(self) -> Place:
        """Find the launcher and this process's place in its run.

        Raises ConfigError, naming variable and value, where a launcher's variables are incomplete or
        contradict one another: a process that took the wrong rank would train something else in silence.
        """
        claimed = [launcher for launcher in LAUNCHERS if self._claims(launcher)]
        if not claimed:
            self._refuse_strangers()
            return Place(reason="no launcher's variables are set")
        for second in claimed[1:]:
            if second.proof and self._value(second.proof):
                raise ConfigError(
                    f"Both {claimed[0].rank} and {second.proof} are set: {second.name} was started inside a "
                    f"rank of {claimed[0].name}. Start the ranks by one of the two."
                )
        return self._place_by(claimed[0])

    def child(
        self, place: Place, *, failures: Path, threads: int, unbuffered: bool = False
    ) -> dict[str, str]:
        """Return the variables for a child rank at `place`, whose ranks are all on this machine.

        What the user set stands: OMP_NUM_THREADS, GLOO_SOCKET_IFNAME, PYTHONFAULTHANDLER,
        PYTHONUNBUFFERED. Variables of other launchers are taken out, see Note [one table].
        """
        foreign = {name for launcher in LAUNCHERS for name in launcher.variables()}
        variables = {name: value for name, value in self._variables.items() if name not in foreign}
        defaults = {THREADS: str(threads), STACK_ON_CRASH: "1"}
        if (loopback := loopback_interface()) is not None:
            defaults[INTERFACE] = loopback
        if unbuffered:
            defaults["PYTHONUNBUFFERED"] = "1"
        variables |= {name: value for name, value in defaults.items() if not self._value(name)}
        variables |= {
            OWN.rank: str(place.rank),
            OWN.world_size: str(place.world_size),
            OWN.local_rank: str(place.local_rank),
            OWN.local_world_size: str(place.local_world_size),
            FAILURES: str(failures),
        }
        if place.rendezvous is not None:
            variables[OWN.rendezvous[0]] = place.rendezvous
        return variables

    def _refuse_strangers(self) -> None:
        """Raise ConfigError where a launcher that is not known here started several ranks of this program."""
        for stranger in STRANGERS:
            if stranger.proof and not self._value(stranger.proof):
                continue
            size = self._number(stranger.world_size) or 1
            if self._value(stranger.rank) and size > 1:
                raise ConfigError(
                    f"{stranger.name} started {size} ranks of this program ({stranger.world_size} is "
                    f"{size}), and samestep cannot join them yet: each would train alone. Let it start one "
                    "process on each machine, and that one start the ranks: samestep run, or torchrun."
                )

    def _value(self, name: str) -> str | None:
        return self._variables.get(name, "").strip() or None

    def _claims(self, launcher: Launcher) -> bool:
        if self._value(launcher.rank) or self._value(launcher.local_rank):
            return True
        counts_machines = any(self._value(name) for name in launcher.machines)
        return self._value(launcher.world_size) is not None and not counts_machines

    def _place_by(self, launcher: Launcher) -> Place:
        rank = self._needed(launcher, launcher.rank)
        world_size = self._needed(launcher, launcher.world_size)
        local_rank = self._number(launcher.local_rank)
        local_world_size = self._number(launcher.local_world_size)
        self._refuse_machines(launcher, local_rank)
        told = [launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_world_size]
        told = [name for name in told if self._value(name)]
        place = Place(
            rank=rank,
            world_size=world_size,
            local_rank=rank if local_rank is None else local_rank,
            local_world_size=world_size if local_world_size is None else local_world_size,
            launcher=launcher.name,
            reason=f"{', '.join(f'{name}={self._value(name)}' for name in told)}"
            + ("" if len(told) == 4 else "; what is not set is taken as for ranks of one machine"),
            rendezvous=self._rendezvous(launcher, world_size),
            agent_store=launcher.agent_store is not None and self._value(launcher.agent_store) == "True",
            attempt=(self._number(launcher.attempt) or 0) if launcher.attempt else 0,
        )
        _check(place, launcher)
        return place

    def _rendezvous(self, launcher: Launcher, world_size: int) -> str | None:
        values = [self._value(name) for name in launcher.rendezvous]
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
        port = self._needed(launcher, launcher.rendezvous[1])
        if not 0 < port < 65536:
            raise ConfigError(f"{launcher.rendezvous[1]} is {port}; a port is between 1 and 65535.")
        address = str(values[0])
        return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"

    def _refuse_machines(self, launcher: Launcher, local_rank: int | None) -> None:
        hints = [name for name in launcher.machines if self._value(name)]
        if hints and local_rank is None:
            raise ConfigError(
                f"{launcher.rank} is {self._value(launcher.rank)}, but {launcher.local_rank} is not set and "
                f"{hints[0]} is {self._value(hints[0])}: {launcher.rank} may count machines, not ranks. "
                f"Start the ranks of each machine with torchrun, or set {launcher.local_rank}."
            )

    def _needed(self, launcher: Launcher, name: str) -> int:
        number = self._number(name)
        if number is None:
            found = next(other for other in launcher.variables() if self._value(other))
            raise ConfigError(
                f"{found} is {self._value(found)}, but {name} is not set. Set {name} too, or unset {found} "
                "to train on one rank."
            )
        return number

    def _number(self, name: str) -> int | None:
        value = self._value(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdecimal()):
            raise ConfigError(
                f"{name} is {value!r}; it must be a whole number, 0 or more. Correct or unset it."
            )
        return int(value)


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
    if place.rendezvous.startswith("file://"):
        return loopback_interface()
    address = place.rendezvous.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    found = interface_to(address)
    if place.local_world_size < place.world_size and (found is None or is_loopback(found)):
        # Some systems give their own host name the address 127.0.1.1, so the route from the master to itself
        # is loopback; a documentation address (nothing is sent) shows the way out of the machine instead.
        return interface_to("192.0.2.1")
    return found


def _check(place: Place, launcher: Launcher) -> None:
    pairs = [
        (launcher.rank, place.rank, launcher.world_size, place.world_size),
        (launcher.local_rank, place.local_rank, launcher.local_world_size, place.local_world_size),
    ]
    for name, rank, size_name, size in pairs:
        if rank >= size:
            raise ConfigError(
                f"{name} is {rank}, but {size_name} is {size}: ranks count from 0, so it must be below "
                f"{size}. Correct the variables, or unset them to train on one rank."
            )
    if place.local_world_size > place.world_size:
        raise ConfigError(
            f"{launcher.local_world_size} is {place.local_world_size}, but {launcher.world_size} is "
            f"{place.world_size}: one machine cannot hold more ranks than the run has. Correct one of them."
        )
