"""Ranks of a launcher that cannot be joined yet are refused: each would train alone, with the same seed."""

from __future__ import annotations

import pytest

from samestep.errors import ConfigError
from samestep.topology.environment import Environment

STARTED = [
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    {"PMI_RANK": "0", "PMI_SIZE": "2"},
    {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"},
]
HARMLESS = [
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # the shell of a job: one process, no step
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"},
]
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize("variables", STARTED)
def test_several_ranks_of_a_stranger_are_refused(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"started \d ranks of this program .* would train alone"):
        Environment.read(variables).place()


@pytest.mark.parametrize("variables", HARMLESS)
def test_a_single_process_trains_alone(variables: dict[str, str]) -> None:
    assert Environment.read(variables).place().world_size == 1


@pytest.mark.parametrize("variables", STARTED)
def test_torchrun_inside_a_stranger_is_joined(variables: dict[str, str]) -> None:
    assert Environment.read({**variables, **TORCHRUN}).place().world_size == 2
