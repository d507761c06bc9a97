"""What a rank holds, counted in copies of the model."""

from __future__ import annotations

import math

import pytest
from memory_on_processes import hold

from samestep.testing.processes import run_processes

# Inputs, losses and small tensors, as a share of the 8 MB model.
SMALL = 0.05


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("world_size", "leaves"), [(1, 1), (2, 2), (2, 8), (3, 4)])
def test_replicate_holds_one_gradient_and_log2_of_the_leaves_more(world_size: int, leaves: int) -> None:
    for held in run_processes(hold, world_size, "replicate", leaves, timeout_s=110):
        assert held["state"] == pytest.approx(2.0, abs=SMALL)  # Adam's two moments
        assert held["rest"] <= 2 + math.log2(leaves) + SMALL  # parameters, one gradient, partial sums


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_zero1_shards_the_optimizer_state(world_size: int) -> None:
    for held in run_processes(hold, world_size, "zero1", 1, timeout_s=110):
        assert held["state"] == pytest.approx(2.0 / world_size, abs=SMALL)
        assert held["rest"] <= 2 + SMALL
