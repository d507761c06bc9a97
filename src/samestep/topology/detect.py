"""Which launcher made this process, by the table in `launchers.py`, and the place that it gave."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from samestep.errors import ConfigError
from samestep.topology.host_lists import slurm_counts
from samestep.topology.launchers import LAUNCHERS, OWN, REFUSED, Launcher, Refused
from samestep.topology.meeting_point import meeting_point
from samestep.topology.place import Place
from samestep.topology.variables import Variables

CHOICE = "SAMESTEP_LAUNCHER"
ALONE = "none"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A launcher some of whose variables are set, and what became of it."""

    launcher: str
    verdict: str  # "chosen", "passed over", "no"
    reason: str


def find_place(variables: Variables, starter: Callable[[str], str]) -> Place:
    """Find the launcher and this process's place in its run.

    `starter` names the process that started the ranks whose rank is in a variable. Raises ConfigError,
    naming variable and value, where variables are incomplete or contradict one another: a process that took
    the wrong rank would train something else in silence.
    """
    choice = variables.value(CHOICE)
    if choice is not None and choice.casefold() == ALONE:
        return Place(reason=f"{CHOICE} is {choice}")
    claimed = [launcher for launcher in LAUNCHERS if claims(variables, launcher)]
    if choice is not None:
        claimed = [_chosen_by_name(variables, choice)]
    if not claimed:
        _refuse(variables)
        return Place(reason="no launcher's variables are set")
    first = claimed[0]
    for second in claimed[1:]:
        if contradicts(variables, first, second):
            raise ConfigError(
                f"Both {_proof(first)} and {_proof(second)} are set, and they give this process unlike "
                f"ranks: {first.name} ({variables.told((first.rank, first.world_size))}) and {second.name} "
                f"({variables.told((second.rank, second.world_size))}). Start the ranks by one of the two, "
                f"unset what was left over, or set {CHOICE} to the name of the one that counts."
            )
    return _place_by(variables, first, starter)


def candidates(variables: Variables) -> list[Candidate]:
    """List every launcher some of whose variables are set, with the reason for what became of it."""
    choice = variables.value(CHOICE)
    found: list[Candidate] = []
    first: Launcher | None = None
    for launcher in LAUNCHERS:
        told = variables.told(launcher.variables())
        chosen_away = choice is not None and choice.casefold() != launcher.name.casefold()
        if not told:
            continue
        if chosen_away:
            verdict, reason = "no", f"{CHOICE} is {choice}"
        elif not claims(variables, launcher):
            verdict, reason = "no", _why_not(variables, launcher)
        elif first is None:
            first, verdict, reason = launcher, "chosen", told
        elif contradicts(variables, first, launcher):
            verdict, reason = "contradicts", f"{told}; not the ranks of {first.name}"
        else:
            verdict, reason = "passed over", f"{told}; {first.name} is asked before it"
        found.append(Candidate(launcher=launcher.name, verdict=verdict, reason=reason))
    return found + [
        Candidate(launcher=row.name, verdict="no", reason=f"{variables.told(row.proofs)}: no ranks")
        for row in REFUSED
        if len(variables.found(row.proofs)) == len(row.proofs)
    ]


def claims(variables: Variables, launcher: Launcher) -> bool:
    """Say whether a launcher's variables say that it made this process, be they complete or not."""
    if len(variables.found(launcher.proofs)) < len(launcher.proofs):
        return False
    if launcher.proofs and variables.value(launcher.proofs[0]) in launcher.no_ranks:
        return False
    if variables.found(launcher.machines) and not (
        variables.value(launcher.rank) and variables.value(launcher.local_rank)
    ):
        return False
    return bool(variables.found((launcher.rank, launcher.world_size, launcher.local_rank)))


def contradicts(variables: Variables, first: Launcher, second: Launcher) -> bool:
    """Say whether two launchers give this process unlike ranks, and the second did not start the first."""
    if second.own_proof is None or not variables.value(second.own_proof):
        return False
    # Only who tells a local rank surely tells of processes: a rank alone may be that of a machine.
    if second.name in first.around and variables.value(first.local_rank):
        return False
    pairs = ((first.rank, second.rank), (first.world_size, second.world_size))
    return any(variables.number(one) != variables.number(other) for one, other in pairs)


def _chosen_by_name(variables: Variables, choice: str) -> Launcher:
    for launcher in LAUNCHERS:
        if launcher.name.casefold() == choice.casefold():
            if claims(variables, launcher):
                return launcher
            raise ConfigError(f"{CHOICE} is {choice}, but {_why_not(variables, launcher)}.")
    names = ", ".join(launcher.name for launcher in LAUNCHERS)
    raise ConfigError(f"{CHOICE} is {choice!r}; it must be {ALONE} or one of: {names}.")


def _why_not(variables: Variables, launcher: Launcher) -> str:
    missing = [name for name in launcher.proofs if not variables.value(name)]
    if missing:
        return f"{missing[0]} is not set: {launcher.name} started no ranks here"
    if launcher.proofs and variables.value(launcher.proofs[0]) in launcher.no_ranks:
        return f"{variables.told(launcher.proofs[:1])} is the shell or script of a job, a single process"
    if hints := variables.found(launcher.machines):
        return f"{variables.told(hints[:1])} and no {launcher.local_rank}: {launcher.rank} counts machines"
    return f"{launcher.rank} is not set"


def _proof(launcher: Launcher) -> str:
    return launcher.own_proof or launcher.rank


def _place_by(variables: Variables, launcher: Launcher, starter: Callable[[str], str]) -> Place:
    rank = _needed(variables, launcher, launcher.rank)
    world_size = _needed(variables, launcher, launcher.world_size)
    _require_agreement(variables, launcher, world_size)
    if world_size == 1 and not launcher.rendezvous:
        # A step or mpirun of one process holds a machine for a program that starts the ranks by itself.
        return Place(reason=f"{launcher.name} started one process ({variables.told(launcher.variables())})")
    local_rank = variables.number(launcher.local_rank)
    local_world_size = _local_world_size(variables, launcher)
    known = world_size == 1 or None not in (local_rank, local_world_size)
    rendezvous, job = meeting_point(
        variables,
        launcher,
        world_size=world_size,
        on_one_machine=local_world_size == world_size,
        starter=starter,
    )
    counts = launcher.local_counts or ()
    told = (launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_world_size, *counts)
    place = Place(
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else local_rank,
        local_world_size=world_size if local_world_size is None else local_world_size,
        launcher=launcher.name,
        reason=variables.told(told)
        + ("" if known else "; who shares a machine is found when the ranks meet"),
        rendezvous=rendezvous,
        agent_store=variables.value(launcher.agent_store) == "True",
        attempt=variables.number(launcher.attempt) or 0,
        job=job,
        locality_known=known,
    )
    _check(place, launcher, local_world_size is not None)
    return place


def _needed(variables: Variables, launcher: Launcher, name: str) -> int:
    number = variables.number(name)
    if number is None:
        found = variables.found(launcher.variables())[0]
        raise ConfigError(
            f"{found} is {variables.value(found)}, but {name} is not set. Set {name} too, or unset {found} "
            "to train on one rank."
        )
    return number


def _require_agreement(variables: Variables, launcher: Launcher, world_size: int) -> None:
    again = variables.number(launcher.agrees)
    if again is not None and again != world_size:
        raise ConfigError(
            f"{launcher.world_size} is {world_size}, but {launcher.agrees} is {again}: one of them was "
            f"inherited from an outer job of {launcher.name}. Start the ranks by a step of this job (srun), "
            f"or set {CHOICE}={ALONE} to train on one rank."
        )


def _local_world_size(variables: Variables, launcher: Launcher) -> int | None:
    if launcher.local_counts is None:
        return variables.number(launcher.local_world_size)
    counts, node = launcher.local_counts
    text, index = variables.value(counts), variables.number(node)
    if text is None or index is None:
        return None
    sizes = slurm_counts(text)
    if index >= len(sizes):
        raise ConfigError(
            f"{node} is {index}, but {counts} ({text}) has {len(sizes)} nodes. Correct or unset them."
        )
    return sizes[index]


def _check(place: Place, launcher: Launcher, local_size_told: bool) -> None:
    local_size = launcher.local_world_size or (launcher.local_counts or ("the local world size",))[0]
    pairs = [(launcher.rank, place.rank, launcher.world_size, place.world_size)]
    if local_size_told:
        pairs.append((launcher.local_rank or "", place.local_rank, local_size, place.local_world_size))
        if place.local_world_size > place.world_size:
            raise ConfigError(
                f"{local_size} is {place.local_world_size}, but {launcher.world_size} is "
                f"{place.world_size}: one machine cannot hold more ranks than the run has. Correct one."
            )
    for name, rank, size_name, size in pairs:
        if rank >= size and (name != launcher.local_rank or place.locality_known):
            raise ConfigError(
                f"{name} is {rank}, but {size_name} is {size}: ranks count from 0, so it must be below "
                f"{size}. Correct the variables, or unset them to train on one rank."
            )


def _refuse(variables: Variables) -> None:
    """Raise ConfigError where processes were started that cannot be joined: each would train alone."""
    start = "torchrun"
    for row in REFUSED:
        if len(variables.found(row.proofs)) < len(row.proofs):
            continue
        start = row.start
        if row.machines is None:
            raise ConfigError(
                f"{row.name} started this process ({variables.told(row.proofs)}) and does not tell its rank "
                f"and the world size. Start the ranks with: {start}; or set {CHOICE}={ALONE} to train on one "
                "rank."
            )
        if (count := _count(variables, row)) != "1":
            raise ConfigError(
                f"{row.name} started one process on each of {count} machines "
                f"({variables.told(row.proofs)}), and no ranks: each would train alone. Start the ranks on "
                f"every machine with: {start}; or set {CHOICE}={ALONE} to train on this machine by itself."
            )
    for launcher in LAUNCHERS:
        hints = variables.found(launcher.machines)
        if launcher is not OWN and hints and variables.value(launcher.rank):
            if (variables.number(launcher.world_size) or 1) == 1:
                continue
            raise ConfigError(
                f"{launcher.rank} is {variables.value(launcher.rank)}, but {launcher.local_rank} is not set "
                f"and {hints[0]} is {variables.value(hints[0])}: {launcher.rank} may count machines, not "
                f"ranks. Start the ranks of each machine with: {start}; or set {launcher.local_rank}."
            )


def _count(variables: Variables, row: Refused) -> str:
    value = str(variables.value(row.machines))
    if not value.startswith("["):
        return value
    try:
        return str(len(json.loads(value)))
    except ValueError as error:
        raise ConfigError(
            f"{row.machines} is {value!r}, which is no JSON list. Correct or unset it."
        ) from error
