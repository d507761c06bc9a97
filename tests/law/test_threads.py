"""The law, with ranks as threads: one fingerprint and one ledger on any number of ranks."""

from __future__ import annotations

import pytest
from law_runs import KINDS, STRATEGIES, is_trained, run

from samestep.testing.threads import run_threads


@pytest.mark.parametrize(("workload", "precision", "optimizer"), KINDS)
def test_ranks_and_strategy_never_move_the_bits(workload: str, precision: str, optimizer: str) -> None:
    (alone,) = run_threads(lambda t: run(t, workload, precision, optimizer, "replicate"), 1)
    assert is_trained(alone)
    for strategy in STRATEGIES:
        for world_size in (2, 3, 4, 5, 8) if strategy == "replicate" else (1, 2, 3, 4, 5, 8):
            ended = run_threads(lambda t, s=strategy: run(t, workload, precision, optimizer, s), world_size)
            for rank, other in enumerate(ended):
                assert other == alone, f"{strategy}, rank {rank} of {world_size}"
