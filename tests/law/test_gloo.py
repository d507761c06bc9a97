"""The law, with ranks as processes over gloo: the bits of one rank without any process group."""

from __future__ import annotations

import pytest
from law_on_processes import run_all
from law_runs import KINDS, STRATEGIES, Ended, run

from samestep.testing.processes import run_processes


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str, str], Ended]:
    """How each kind ends on one rank."""
    return {kind: run(None, *kind, "replicate") for kind in KINDS}


SIZES = [2, 4, 5, 8]  # they share the kinds; three ranks take all of them


def runs_of(world_size: int, *, every_kind: bool) -> list[tuple[str, str, str, str]]:
    """Return kinds with strategies: all of them on three ranks, a fourth on each other number.

    With --every-kind all numbers take all of them. Ranks as threads always do: see test_threads.py.
    """
    takes_all = every_kind or world_size == 3
    kinds = KINDS if takes_all else KINDS[SIZES.index(world_size) :: len(SIZES)]
    return [(*kind, strategy) for kind in kinds for strategy in STRATEGIES]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [3, *SIZES])
def test_processes_end_in_the_bits_of_one_rank(
    world_size: int, alone: dict[tuple[str, str, str], Ended], request: pytest.FixtureRequest
) -> None:
    runs = runs_of(world_size, every_kind=request.config.getoption("--every-kind"))
    by_rank = run_processes(run_all, world_size, runs, timeout_s=280)
    for rank, ended in enumerate(by_rank):
        assert list(ended) == runs
        for (*kind, strategy), outcome in ended.items():
            assert outcome == alone[tuple(kind)], f"{kind} {strategy} on rank {rank} of {world_size}"
