"""The table of launchers: each row by the variables that it sets, what contradicts, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from samestep.errors import ConfigError
from samestep.topology import detect
from samestep.topology.environment import Environment, Place
from samestep.topology.launchers import LAUNCHERS
from samestep.topology.meeting_point import DOOR_RANGE, FIRST_DOOR, NUM_DOORS, door_of
from samestep.topology.variables import Variables

RANK = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
MASTER = {"MASTER_ADDR": "h0", "MASTER_PORT": "29500"}
TORCHRUN = {**RANK, **MASTER, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1"}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_NODELIST": "n[07,09]",
    "SLURM_JOB_NODELIST": "n[05-09]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-h0-99@1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.7",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4242",
}
DEEPSPEED = {**RANK, **MASTER, "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
RAY = {**RANK, **MASTER, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1", "RAY_RAYLET_PID": "7"}
DETERMINED = {**TORCHRUN, "DET_CHIEF_IP": "10.0.0.1", "DET_ALLOCATION_ID": "a", "DET_SLOT_IDS": "[0, 1]"}
LSF = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "LSB_JOBID": "5",
}


def place_of(*parts: dict[str, str]) -> Place:
    return Environment.read({name: value for part in parts for name, value in part.items()}).place()


def door(host: str, job: str) -> str:
    return f"door://{host}:{door_of(job)}"


@pytest.mark.parametrize(
    ("name", "variables", "rendezvous", "job"),
    [
        ("torchrun", TORCHRUN, "tcp://h0:29500", ""),
        ("torchrun", DETERMINED, "tcp://h0:29500", ""),
        ("DeepSpeed", DEEPSPEED, "tcp://h0:29500", ""),
        ("Ray Train", RAY, "tcp://h0:29500", ""),
        ("variables of torch", {**RANK, **MASTER, "LOCAL_WORLD_SIZE": "2"}, "tcp://h0:29500", ""),
        # Without a rendezvous: at a door of the host that the launcher or its batch system names.
        ("Horovod", HOROVOD, door("10.0.0.7", "Horovod 10.0.0.7.4242"), "Horovod 10.0.0.7.4242"),
        (
            "Open MPI",
            {**OPEN_MPI, "SLURM_JOB_NODELIST": "n[3-4]"},
            door("n3", "Open MPI prterun-h0-99@1"),
            "Open MPI prterun-h0-99@1",
        ),
        (
            "Open MPI",  # of SageMaker
            {**OPEN_MPI, "SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
            door("algo-1", "Open MPI prterun-h0-99@1"),
            "Open MPI prterun-h0-99@1",
        ),
        (
            "Open MPI",  # of Azure ML
            {**OPEN_MPI, "AZ_BATCH_MASTER_NODE": "10.1.0.4:6000", "AZUREML_EXPERIMENT_ID": "x"},
            door("10.1.0.4", "Open MPI prterun-h0-99@1"),
            "Open MPI prterun-h0-99@1",
        ),
        (
            "Open MPI",  # 4.x
            {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "7.0;tcp://10.2.0.4,172.17.0.1:40001"},
            door("10.2.0.4", "Open MPI prterun-h0-99@1"),
            "Open MPI prterun-h0-99@1",
        ),
        (
            "MPICH or Intel MPI",
            {**HYDRA, "SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "a,b"},
            door("a", "MPICH or Intel MPI 9"),
            "MPICH or Intel MPI 9",
        ),
        ("MPICH or Intel MPI", {**HYDRA, **MASTER}, "tcp://h0:29500", ""),
        ("MVAPICH2", {**MVAPICH2, "MASTER_ADDR": "fd00::1", "MASTER_PORT": "1"}, "tcp://[fd00::1]:1", ""),
        (
            "Slurm",
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"},
            door("n07", "Slurm 17.0"),
            "Slurm 17.0",
        ),
    ],
)  # fmt: skip
def test_each_row(name: str, variables: dict[str, str], rendezvous: str, job: str) -> None:
    place = place_of(variables)
    assert (place.launcher, place.rank, place.world_size) == (name, 3, 4)
    assert (place.local_rank, place.local_world_size, place.locality_known) == (1, 2, True)
    assert (place.rendezvous, place.job) == (rendezvous, job)


def test_lsf_tells_no_local_world_size_and_meets_past_the_launch_host(tmp_path: Path) -> None:
    """Each node of the file but the first, which only started the job, holds ranks."""
    (tmp_path / "ranks").write_text("batch1\nbatch1\nc5\nc5\nc7\n")
    place = place_of(LSF, {"LSB_DJOB_RANKFILE": str(tmp_path / "ranks")})
    assert (place.launcher, place.rank, place.local_rank, place.locality_known) == ("LSF", 3, 1, False)
    assert place.rendezvous == door("c5", "LSF 5")
    with pytest.raises(ConfigError, match=r"LSB_DJOB_RANKFILE names .* cannot be read"):
        place_of(LSF, {"LSB_DJOB_RANKFILE": str(tmp_path / "none")})


def test_uneven_nodes_of_slurm() -> None:
    """The local world size is that of the rank's own node; it is never an average."""
    counts = {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NTASKS": "7", "SLURM_STEP_NUM_TASKS": "7"}
    for node, expected in enumerate([2, 2, 2, 1]):
        place = place_of(SLURM, counts, {"SLURM_NODEID": str(node)})
        assert place.local_world_size == expected
    with pytest.raises(ConfigError, match=r"SLURM_NODEID is 4, but SLURM_STEP_TASKS_PER_NODE .* has 4 nodes"):
        place_of(SLURM, counts, {"SLURM_NODEID": "4"})
    with pytest.raises(ConfigError, match="not a list such as"):
        place_of(SLURM, {"SLURM_STEP_TASKS_PER_NODE": "two"})


ON_ONE = [
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}, "Slurm 17.0"),
    (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "Open MPI prterun-h0-99@1"),
    (HYDRA | {"MPI_LOCALNRANKS": "4", "SLURM_JOB_ID": "9"}, "MPICH or Intel MPI the starter of PMI_RANK"),
]


@pytest.mark.parametrize(("variables", "job"), ON_ONE)
def test_ranks_of_one_machine_meet_there(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], job: str
) -> None:
    """Two mpiexec in one job of a batch system differ by the process that started them."""
    monkeypatch.setattr("sys.platform", "linux")
    place = detect.find_place(Variables(variables), lambda variable: f"the starter of {variable}")
    assert (place.rendezvous, place.job) == ("here://", job)
    monkeypatch.setattr("sys.platform", "darwin")  # no sockets without files there
    place = detect.find_place(Variables(variables), lambda variable: f"the starter of {variable}")
    assert place.rendezvous == door("127.0.0.1", job)


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        (MASTER, "tcp://h0:29500"),
        ({"MASTER_ADDR": "h0"}, door("h0", "Slurm 17.0")),
        ({"MASTER_PORT": "29500"}, "tcp://n07:29500"),
    ],
)
def test_what_the_user_set_is_the_meeting_point(master: dict[str, str], expected: str) -> None:
    assert place_of(SLURM, master).rendezvous == expected


def test_a_door_follows_from_the_job_and_lies_below_the_ports_of_the_system() -> None:
    """A requeued job does not meet ranks of its first start."""
    first, again = place_of(SLURM).job, place_of(SLURM, {"SLURM_RESTART_COUNT": "1"}).job
    assert first != again
    doors = [door_of(f"Slurm {number}.0") for number in range(500)]
    assert min(doors) >= FIRST_DOOR
    assert max(doors) + NUM_DOORS < FIRST_DOOR + DOOR_RANGE + NUM_DOORS <= 32768
    assert len(set(doors)) > 450


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA, MVAPICH2, LSF])
def test_without_a_host_the_remedy_is_told(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"does not tell where .* Set MASTER_ADDR .* and MASTER_PORT"):
        place_of(variables)


def test_without_a_job_a_port_is_needed() -> None:
    with pytest.raises(ConfigError, match="Set MASTER_PORT to a port that is free there"):
        place_of(HYDRA, {"MASTER_ADDR": "h0"})


ONE_PROCESS = [
    {**SLURM, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun -n1
    {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"},  # the shell of salloc
    {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # a batch script
    {**SLURM, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # an interactive step
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"},
    {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
    {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
    {"NUM_NODES": "1", "NODE_RANK": "0", "PRIMARY_ADDR": "10.0.0.1"},
    {"SAMESTEP_LAUNCHER": "none", **OPEN_MPI},
]


@pytest.mark.parametrize("variables", ONE_PROCESS)
def test_a_single_process_starts_the_ranks_by_itself(variables: dict[str, str]) -> None:
    place = place_of(variables)
    assert (place.launcher, place.world_size, place.rendezvous) == ("none", 1, None)


REFUSED = [
    ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "j-0"}, "Kubeflow", "torchrun SCRIPT"),
    ({"PET_NNODES": "1:3", "RANK": "1", "WORLD_SIZE": "8", **MASTER}, "Kubeflow", "torchrun SCRIPT"),
    ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"}, "SkyPilot", "--nnodes=\\$SKYPILOT_NUM_NODES"),
    ({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "b"}, "SageMaker", "--nproc-per-node=\\$SM_NUM_GPUS"),
    ({"NUM_NODES": "2", "NODE_RANK": "0", "PRIMARY_ADDR": "10.0.0.1"}, "RunPod", "--node-rank=\\$NODE_RANK"),
    ({"LOCAL_RANK": "1", "NODE_RANK": "0", **MASTER}, "Lightning", "samestep run"),
    ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-h0-9@1"}, "PMIx", "--personality ompi"),
]  # fmt: skip


@pytest.mark.parametrize(("variables", "who", "how"), REFUSED)
def test_what_counts_machines_is_refused_with_the_command(
    variables: dict[str, str], who: str, how: str
) -> None:
    with pytest.raises(ConfigError, match=f"{who}.*{how}.*SAMESTEP_LAUNCHER=none"):
        place_of(variables)


def test_a_rank_of_machines_is_no_rank() -> None:
    """PyTorchJob v1 counts machines in RANK and processes in WORLD_SIZE."""
    with pytest.raises(ConfigError, match=r"RANK is 1, .* may count machines"):
        place_of({"RANK": "1", "WORLD_SIZE": "8", "NODE_RANK": "1"}, MASTER)
    # ... but mpirun or torchrun inside such a machine tell ranks.
    assert place_of(OPEN_MPI, MASTER, {"RANK": "1", "PET_NODE_RANK": "1"}).launcher == "Open MPI"
    assert place_of(TORCHRUN, {"PET_NNODES": "2", "PET_NODE_RANK": "1"}).launcher == "torchrun"


ROWS: dict[str, dict[str, str]] = {
    "Horovod": HOROVOD,
    "Open MPI": OPEN_MPI,
    "MVAPICH2": MVAPICH2,
    "MPICH or Intel MPI": HYDRA,
    "LSF": LSF,
    "Slurm": SLURM,
}


@pytest.mark.parametrize("outer", ["Open MPI", "MVAPICH2", "MPICH or Intel MPI", "LSF", "Slurm"])
def test_torchrun_inside_another_wins(outer: str) -> None:
    assert place_of(ROWS[outer], TORCHRUN, {"RANK": "2"}).launcher == "torchrun"


@pytest.mark.parametrize("inner", ["Open MPI", "MVAPICH2", "MPICH or Intel MPI", "Horovod"])
@pytest.mark.parametrize("outer", ["LSF", "Slurm"])
def test_mpi_inside_a_batch_system_wins(inner: str, outer: str) -> None:
    outside = {
        name: "0" if "RANK" in name or "PROCID" in name else value for name, value in ROWS[outer].items()
    }
    assert place_of(outside, ROWS[inner], MASTER).launcher == inner


def test_two_that_give_the_same_ranks_are_no_contradiction() -> None:
    """A wrapper that sets RANK from the launcher's variables, PMIx under Open MPI, PMI under srun."""
    assert place_of(SLURM, RANK, MASTER).launcher == "variables of torch"
    assert place_of(SLURM, {"PMI_RANK": "3", "PMI_SIZE": "4"}, MASTER).rank == 3


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ([RANK, MASTER, OPEN_MPI, {"RANK": "0"}], ("RANK", "OMPI_COMM_WORLD_RANK")),
        ([RANK, MASTER, SLURM, {"WORLD_SIZE": "1", "RANK": "0"}], ("RANK", "SLURM_STEP_ID")),
        ([OPEN_MPI, HYDRA, {"PMI_RANK": "1"}], ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")),
        (
            [OPEN_MPI, {"SAMESTEP_RANK": "0", "SAMESTEP_WORLD_SIZE": "2"}],
            ("SAMESTEP_RANK", "OMPI_COMM_WORLD_RANK"),
        ),
    ],
)  # fmt: skip
def test_a_contradiction_names_both(variables: list[dict[str, str]], names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"Both {names[0]} and {names[1]} are set.*SAMESTEP_LAUNCHER"):
        place_of(*variables)
    assert "contradicts" in {row.verdict for row in _candidates(*variables)}


def _candidates(*parts: dict[str, str]) -> list[detect.Candidate]:
    return Environment.read({name: value for part in parts for name, value in part.items()}).candidates()


def test_the_user_may_choose() -> None:
    both = [RANK, MASTER, OPEN_MPI, {"RANK": "0"}]
    assert place_of(*both, {"SAMESTEP_LAUNCHER": "open mpi"}).rank == 3
    assert place_of(*both, {"SAMESTEP_LAUNCHER": "variables of torch"}).rank == 0
    with pytest.raises(ConfigError, match="SAMESTEP_LAUNCHER is Slurm, but SLURM_STEP_ID is not set"):
        place_of(*both, {"SAMESTEP_LAUNCHER": "Slurm"})
    with pytest.raises(
        ConfigError, match="SAMESTEP_LAUNCHER is 'mpi'; it must be none or one of: samestep, "
    ):
        place_of(*both, {"SAMESTEP_LAUNCHER": "mpi"})


def test_what_an_outer_job_left_is_found() -> None:
    """sbatch inside a step hands the step's variables to the script, beside those of the new job."""
    with pytest.raises(ConfigError, match=r"SLURM_NTASKS is 2, but SLURM_STEP_NUM_TASKS is 4.* outer job"):
        place_of(SLURM, {"SLURM_NTASKS": "2"})


def test_candidates_tell_why() -> None:
    rows = {row.launcher: row for row in _candidates(TORCHRUN, SLURM)}
    assert rows["torchrun"].verdict == "chosen"
    assert rows["Slurm"].verdict == "passed over"
    assert "CROSS_RANK is not set" in rows["DeepSpeed"].reason
    (shell,) = _candidates({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"})
    assert (shell.launcher, shell.verdict) == ("Slurm", "no")
    assert "SLURM_STEP_ID is not set" in shell.reason
    assert _candidates({"HOME": "/h"}) == []


def test_names_of_rows_are_told_apart() -> None:
    names = [launcher.name.casefold() for launcher in LAUNCHERS]
    assert len(set(names)) == len(names)
    known = set(names)
    for launcher in LAUNCHERS:
        assert {name.casefold() for name in launcher.around} <= known
    for first, second in itertools.combinations(LAUNCHERS, 2):
        assert first.name not in second.around, "rows stand from the innermost to the outermost"
