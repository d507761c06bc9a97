"""How launchers tell a process its rank: one row each.

Note [one table]: the first row of `LAUNCHERS` whose variables are set wins. samestep's own row comes first,
because its child ranks are given an environment from which the variables of every other row were taken out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """One row of the table: the variables by which a launcher tells a process its place."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    rendezvous: tuple[str, ...]  # one variable with the whole of it, or an address and a port
    agent_store: str | None = None
    attempt: str | None = None
    proof: str | None = None  # set by this launcher and by nobody's hand
    machines: tuple[str, ...] = ()  # where one is set, rank and world size may count machines

    def variables(self) -> tuple[str, ...]:
        """Name every variable of the row that says something of one process."""
        single = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        others = (self.agent_store, self.attempt, self.proof)
        return (*single, *self.rendezvous, *(name for name in others if name is not None))


OWN = Launcher(
    name="samestep",
    rank="SAMESTEP_RANK",
    world_size="SAMESTEP_WORLD_SIZE",
    local_rank="SAMESTEP_LOCAL_RANK",
    local_world_size="SAMESTEP_LOCAL_WORLD_SIZE",
    rendezvous=("SAMESTEP_RENDEZVOUS",),
)
TORCHRUN = Launcher(
    name="torchrun",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    rendezvous=("MASTER_ADDR", "MASTER_PORT"),
    agent_store="TORCHELASTIC_USE_AGENT_STORE",
    attempt="TORCHELASTIC_RESTART_COUNT",
    proof="TORCHELASTIC_RUN_ID",
    machines=("NODE_RANK", "PET_NODE_RANK"),
)
LAUNCHERS = (OWN, TORCHRUN)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Stranger:
    """A launcher whose ranks cannot be joined yet: it is known only to be refused."""

    name: str
    rank: str
    world_size: str
    proof: str | None = None  # in a shell of a job, rank and world size may stand without it


STRANGERS = (
    Stranger(name="Open MPI", rank="OMPI_COMM_WORLD_RANK", world_size="OMPI_COMM_WORLD_SIZE"),
    Stranger(name="MPICH or Intel MPI", rank="PMI_RANK", world_size="PMI_SIZE"),
    Stranger(name="Slurm", rank="SLURM_PROCID", world_size="SLURM_NTASKS", proof="SLURM_STEP_ID"),
)
