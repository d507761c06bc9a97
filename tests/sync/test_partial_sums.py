"""The plan of a rank's own additions: the tree's, with few buffers."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from samestep.numerics.fold import Fold, Node, subtrees
from samestep.sync.partial_sums import plan_fast, plan_ordered


@st.composite
def run_of_leaves(draw: st.DrawFn) -> tuple[range, int]:
    num_leaves = draw(st.integers(1, 140))
    start = draw(st.integers(0, num_leaves))
    return range(start, draw(st.integers(start, num_leaves))), num_leaves


@given(run_of_leaves(), st.randoms(use_true_random=False))
def test_the_plan_makes_the_additions_of_the_tree(case: tuple[range, int], rng: random.Random) -> None:
    run, num_leaves = case
    plan = plan_ordered(run, num_leaves)
    values = {leaf: rng.uniform(-1, 1) * 10 ** rng.randint(-20, 20) for leaf in run}
    buffers = [math.nan] * plan.num_buffers
    folding: Fold[float] = Fold(num_leaves)
    for leaf, step in plan.leaves.items():
        buffers[step.target] = values[leaf] if step.fresh else buffers[step.target] + values[leaf]
        for left, right in step.merges:
            buffers[left] = buffers[left] + buffers[right]
            buffers[right] = math.nan  # free: nobody may read it again
        folding.add(Node(0, leaf), values[leaf])
    assert list(plan.leaves) == list(run)
    assert list(plan.nodes) == subtrees(run, num_leaves)
    assert [buffers[number] for number in plan.kept] == [value for _, value in folding.partial()]


@given(run_of_leaves())
def test_a_run_needs_few_buffers(case: tuple[range, int]) -> None:
    run, num_leaves = case
    plan = plan_ordered(run, num_leaves)
    ragged = 2 * max(1, len(run)).bit_length()
    assert plan.num_buffers <= ragged
    if run and run.start % (1 << max(0, len(run) - 1).bit_length()) == 0:  # aligned: the usual case
        assert plan.num_buffers <= 1 + math.ceil(math.log2(len(run)))
    if len(run) == 1 or (len(run) == 2 and run.start % 2 == 0):
        assert plan.num_buffers == 1


def test_the_fast_plan_is_a_running_sum() -> None:
    plan = plan_fast(range(3, 6))
    assert [(leaf.target, leaf.fresh) for leaf in plan.leaves.values()] == [(0, True), (0, False), (0, False)]
