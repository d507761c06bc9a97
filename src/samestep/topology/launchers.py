"""How launchers tell a process its rank: one row each.

Note [one table]: the first row of `LAUNCHERS` that claims the process wins. Rows stand from the innermost
to the outermost: torchrun is started by srun and not the other way round. samestep's own row comes first,
because its child ranks are given an environment from which the variables of every other row were taken out.
Two rows that claim the process with unlike ranks are an error, unless the outer one is in the `around` of the
inner.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import final


class Form(enum.Enum):
    """How a variable tells the host of the first rank."""

    NAME = enum.auto()  # a name or an address, perhaps with a port after a colon
    SLURM = enum.auto()  # Slurm's compressed list: its first host
    JSON = enum.auto()  # a JSON list: its first entry
    URI = enum.auto()  # "...;tcp://ADDRESS:..." or "tcp://ADDRESS,ADDRESS:..."
    FILE = enum.auto()  # the path of a file with one host a line: the first
    FILE_PAST_FIRST = enum.auto()  # such a file, whose first host only started the job


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A variable that tells where the first rank runs."""

    variable: str
    form: Form


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """One row of the table: the variables by which a launcher tells a process its place."""

    name: str
    rank: str
    world_size: str
    local_rank: str | None = None
    local_world_size: str | None = None
    local_counts: tuple[str, str] | None = (
        None  # ranks on each node, as Slurm writes it, and the node's index
    )
    proofs: tuple[str, ...] = ()  # without all of them the row makes no claim
    own_proof: str | None = None  # set by this launcher and by nobody's hand
    no_ranks: frozenset[str] = frozenset()  # values of the first proof that stand for a single process
    agrees: str | None = None  # a second variable of the world size: another value is left from another job
    rendezvous: tuple[str, ...] = ()  # one variable with the whole of it, or an address and a port
    hosts: tuple[Host, ...] = ()  # where there is no rendezvous, and several machines
    job: tuple[str, ...] = ()  # what tells this run from every other of the same launcher
    batch_job: tuple[str, ...] = ()  # what it shares with other runs in the same job of a batch system
    agent_store: str | None = None
    attempt: str | None = None
    machines: tuple[str, ...] = ()  # where one is set and no local rank, rank and world size count machines
    around: tuple[str, ...] = ()  # launchers that may have started this one
    note: str = ""

    def variables(self) -> tuple[str, ...]:
        """Name every variable of the row that says something of one process."""
        single = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        others = (self.agent_store, self.attempt, self.own_proof, *self.proofs, *self.rendezvous)
        return tuple(dict.fromkeys(name for name in (*single, *others) if name is not None))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A launcher or cloud whose variables do not suffice to join its processes as ranks."""

    name: str
    proofs: tuple[str, ...]  # all set, the most telling one first
    machines: str | None = (
        None  # how many machines, one process on each: a number or a JSON list; None: no count
    )
    start: str  # what starts ranks there


BATCH = ("Slurm", "LSF")
MPI = ("Open MPI", "MVAPICH2", "MPICH or Intel MPI")
MASTER = ("MASTER_ADDR", "MASTER_PORT")
# Where batch systems list the hosts of a job; mpirun takes them in this order.
BATCH_HOSTS = (
    Host(variable="SLURM_JOB_NODELIST", form=Form.SLURM),
    Host(variable="PBS_NODEFILE", form=Form.FILE),
    Host(variable="LSB_DJOB_RANKFILE", form=Form.FILE_PAST_FIRST),
)
BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
# Steps that Slurm starts by itself, among them the shell of salloc and the script of sbatch.
SLURM_OWN_STEPS = frozenset(str(2**32 - below) for below in (3, 4, 5, 6)) | {"batch", "interactive", "extern"}
NODE_HINTS = ("NODE_RANK", "PET_NODE_RANK", "PET_NNODES", "NUM_NODES", "SKYPILOT_NODE_RANK")

OWN_LOCAL_RANK = "SAMESTEP_LOCAL_RANK"
OWN_LOCAL_WORLD_SIZE = "SAMESTEP_LOCAL_WORLD_SIZE"
OWN = Launcher(
    name="samestep",
    rank="SAMESTEP_RANK",
    world_size="SAMESTEP_WORLD_SIZE",
    local_rank=OWN_LOCAL_RANK,
    local_world_size=OWN_LOCAL_WORLD_SIZE,
    rendezvous=("SAMESTEP_RENDEZVOUS",),
)
TORCHRUN = Launcher(
    name="torchrun",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    proofs=("TORCHELASTIC_RUN_ID",),
    own_proof="TORCHELASTIC_RUN_ID",
    rendezvous=MASTER,
    agent_store="TORCHELASTIC_USE_AGENT_STORE",
    attempt="TORCHELASTIC_RESTART_COUNT",
    around=(*MPI, *BATCH),
    note="also where a cloud starts it on each machine: Kubeflow, SageMaker, Determined, SkyPilot, RunPod",
)
DEEPSPEED = Launcher(
    name="DeepSpeed",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_SIZE",
    proofs=("CROSS_RANK", "LOCAL_SIZE", "RANK"),
    rendezvous=MASTER,
    around=(*MPI, *BATCH),
    note="its launch.py; CROSS_RANK tells it from ranks set by hand",
)
RAY = Launcher(
    name="Ray Train",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    proofs=("RAY_RAYLET_PID", "RANK", "LOCAL_RANK"),
    rendezvous=MASTER,
    around=(*MPI, *BATCH),
    note="a worker of TorchTrainer",
)
HOROVOD = Launcher(
    name="Horovod",
    rank="HOROVOD_RANK",
    world_size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_world_size="HOROVOD_LOCAL_SIZE",
    own_proof="HOROVOD_RANK",
    hosts=(Host(variable="HOROVOD_GLOO_RENDEZVOUS_ADDR", form=Form.NAME), *BATCH_HOSTS),
    job=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    around=(*MPI, *BATCH),
    note="horovodrun, by gloo or by MPI",
)
BY_HAND = Launcher(
    name="variables of torch",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    rendezvous=MASTER,
    machines=NODE_HINTS,
    note="set by hand or by a launcher of one's own",
)
OPEN_MPI = Launcher(
    name="Open MPI",
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    own_proof="OMPI_COMM_WORLD_RANK",
    hosts=(
        Host(variable="AZ_BATCH_MASTER_NODE", form=Form.NAME),  # Azure ML
        Host(variable="AZ_BATCHAI_MPI_MASTER_NODE", form=Form.NAME),
        Host(variable="SM_HOSTS", form=Form.JSON),  # SageMaker
        *BATCH_HOSTS,
        Host(variable="OMPI_MCA_orte_hnp_uri", form=Form.URI),
    ),
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    around=BATCH,
    note="mpirun, also of Azure ML and of SageMaker's MPI mode; the node rank that it sets counts no nodes",
)
MVAPICH2 = Launcher(
    name="MVAPICH2",
    rank="MV2_COMM_WORLD_RANK",
    world_size="MV2_COMM_WORLD_SIZE",
    local_rank="MV2_COMM_WORLD_LOCAL_RANK",
    local_world_size="MV2_COMM_WORLD_LOCAL_SIZE",
    own_proof="MV2_COMM_WORLD_RANK",
    hosts=BATCH_HOSTS,
    batch_job=BATCH_JOBS,
    around=BATCH,
    note="mpirun_rsh and its mpiexec",
)
HYDRA = Launcher(
    name="MPICH or Intel MPI",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
    own_proof="MPI_LOCALRANKID",  # Slurm sets PMI_RANK too
    hosts=BATCH_HOSTS,
    batch_job=BATCH_JOBS,
    around=BATCH,
    note="mpiexec.hydra",
)
LSF = Launcher(
    name="LSF",
    rank="JSM_NAMESPACE_RANK",
    world_size="JSM_NAMESPACE_SIZE",
    local_rank="JSM_NAMESPACE_LOCAL_RANK",
    own_proof="JSM_NAMESPACE_RANK",
    hosts=(Host(variable="LSB_DJOB_RANKFILE", form=Form.FILE_PAST_FIRST),),
    batch_job=("LSB_JOBID",),
    note="jsrun",
)
SLURM = Launcher(
    name="Slurm",
    rank="SLURM_PROCID",
    world_size="SLURM_NTASKS",
    local_rank="SLURM_LOCALID",
    local_counts=("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
    # The shell of salloc and the script of sbatch have rank and world size too, but there is one of them.
    proofs=("SLURM_STEP_ID", "SLURM_PROCID"),
    own_proof="SLURM_STEP_ID",
    no_ranks=SLURM_OWN_STEPS,
    agrees="SLURM_STEP_NUM_TASKS",
    hosts=(
        Host(variable="SLURM_STEP_NODELIST", form=Form.SLURM),
        Host(variable="SLURM_JOB_NODELIST", form=Form.SLURM),
        Host(variable="SLURM_NODELIST", form=Form.SLURM),
    ),
    job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    note="srun",
)
LAUNCHERS = (
    OWN, TORCHRUN, DEEPSPEED, RAY, BY_HAND, HOROVOD, OPEN_MPI, MVAPICH2, HYDRA, LSF, SLURM,
)  # fmt: skip

REFUSED = (
    Refused(
        name="Kubeflow",
        proofs=("PET_NNODES",),
        machines="PET_NNODES",
        start="torchrun SCRIPT  (it reads the PET_ variables)",
    ),
    Refused(
        name="SkyPilot",
        proofs=("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
        machines="SKYPILOT_NUM_NODES",
        start="torchrun --nnodes=$SKYPILOT_NUM_NODES --node-rank=$SKYPILOT_NODE_RANK "
        '--nproc-per-node=$SKYPILOT_NUM_GPUS_PER_NODE --master-addr=$(echo "$SKYPILOT_NODE_IPS" | head -n1) '
        "--master-port=29500 SCRIPT",
    ),
    Refused(
        name="SageMaker",
        proofs=("SM_CURRENT_HOST", "SM_HOSTS"),
        machines="SM_HOSTS",
        start="torchrun --nnodes=N --node-rank=I --nproc-per-node=$SM_NUM_GPUS --master-addr=FIRST "
        "--master-port=7777 SCRIPT  (N is the length of $SM_HOSTS, FIRST its first host, I the index of "
        '$SM_CURRENT_HOST in it; distribution={"torch_distributed": {"enabled": True}} does the same)',
    ),
    Refused(
        name="RunPod",
        proofs=("PRIMARY_ADDR", "NUM_NODES", "NODE_RANK"),
        machines="NUM_NODES",
        start="torchrun --nnodes=$NUM_NODES --node-rank=$NODE_RANK --nproc-per-node=$NUM_TRAINERS "
        "--master-addr=$MASTER_ADDR --master-port=$MASTER_PORT SCRIPT",
    ),
    Refused(
        name="Lightning's own launcher",
        proofs=("LOCAL_RANK", "NODE_RANK"),
        start="samestep run SCRIPT  (on one machine), or torchrun",
    ),
    Refused(
        name="PMIx",
        proofs=("PMIX_RANK",),
        start="prterun --personality ompi -n N python SCRIPT, mpirun or srun",
    ),
)
