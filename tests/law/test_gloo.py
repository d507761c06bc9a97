"""The law, with ranks as processes over gloo: the bits of one rank without any process group."""

from __future__ import annotations

import pytest
from law_on_processes import run_all
from law_runs import KINDS, Ended, run

from samestep.testing.processes import run_processes


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str, str], Ended]:
    """How each kind ends on one rank."""
    return {kind: run(None, *kind, "replicate") for kind in KINDS}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_processes_end_in_the_bits_of_one_rank(
    world_size: int, alone: dict[tuple[str, str, str], Ended]
) -> None:
    by_rank = run_processes(run_all, world_size, KINDS, timeout_s=280)
    for rank, ended in enumerate(by_rank):
        assert len(ended) == 2 * len(KINDS)
        for (*kind, strategy), outcome in ended.items():
            assert outcome == alone[tuple(kind)], f"{kind} {strategy} on rank {rank} of {world_size}"
