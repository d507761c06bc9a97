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


def runs_of(world_size: int) -> list[tuple[str, str, str, str]]:
    """Return kinds with strategies: all of both, or in turn where two ranks share each of two cores.

    Ranks as threads take every combination at every size: see test_threads.py.
    """
    if world_size in (2, 3, 5):
        return [(*kind, strategy) for kind in KINDS for strategy in STRATEGIES]
    return [(*kind, STRATEGIES[number % 2]) for number, kind in enumerate(KINDS)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_processes_end_in_the_bits_of_one_rank(
    world_size: int, alone: dict[tuple[str, str, str], Ended]
) -> None:
    runs = runs_of(world_size)
    by_rank = run_processes(run_all, world_size, runs, timeout_s=280)
    for rank, ended in enumerate(by_rank):
        assert list(ended) == runs
        for (*kind, strategy), outcome in ended.items():
            assert outcome == alone[tuple(kind)], f"{kind} {strategy} on rank {rank} of {world_size}"
