"""The ordered sum: the same additions for every split and every order of arrival."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.numerics.fold import Fold, Node, climb, fold, is_root, merge, subtrees

LEAVES = st.integers(1, 70)


def whole_tree(values: list[float]) -> float:
    """Add level by level, as the law says it: leaf i joins i^1, one without a sibling is carried up."""
    while len(values) > 1:
        pairs = [values[i] + values[i + 1] for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) - len(values) % 2 :]
    return values[0]


@st.composite
def split_runs(draw: st.DrawFn) -> tuple[int, list[range]]:
    num_leaves = draw(LEAVES)
    cuts = sorted(draw(st.lists(st.integers(0, num_leaves), max_size=9)))
    edges = [0, *cuts, num_leaves]
    return num_leaves, [range(a, b) for a, b in itertools.pairwise(edges)]


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=70))
def test_fold_is_the_tree_of_the_law(values: list[float]) -> None:
    assert fold(values) == whole_tree(values)


@given(split_runs(), st.randoms(use_true_random=False))
def test_no_split_and_no_order_moves_the_sum(case: tuple[int, list[range]], rng: random.Random) -> None:
    num_leaves, runs = case
    values = [rng.uniform(-1, 1) * 10 ** rng.randint(-20, 20) for _ in range(num_leaves)]
    parts: list[tuple[Node, float]] = []
    for run in runs:
        local: Fold[float] = Fold(num_leaves)
        order = list(run)
        rng.shuffle(order)
        for leaf in order:
            local.add(Node(0, leaf), values[leaf])
        parts += local.partial()
    rng.shuffle(parts)
    meeting: Fold[float] = Fold(num_leaves)
    for node, value in parts:
        meeting.add(node, value)
    assert meeting.total() == whole_tree(values)


@given(split_runs())
def test_subtrees_fill_a_run_exactly_and_are_few(case: tuple[int, list[range]]) -> None:
    num_leaves, runs = case
    for run in runs:
        covered: list[int] = []
        nodes = subtrees(run, num_leaves)
        for level, index in nodes:
            covered += range(index << level, min((index + 1) << level, num_leaves))
        assert covered == list(run)
        assert len(nodes) <= 2 * max(1, len(run)).bit_length()


@given(split_runs(), st.randoms(use_true_random=False))
def test_the_planned_merge_makes_the_same_additions(
    case: tuple[int, list[range]], rng: random.Random
) -> None:
    num_leaves, runs = case
    values = [rng.uniform(-1, 1) * 10 ** rng.randint(-20, 20) for _ in range(num_leaves)]
    nodes: list[Node] = []
    sums: list[float] = []
    for run in runs:
        local: Fold[float] = Fold(num_leaves)
        for leaf in run:
            local.add(Node(0, leaf), values[leaf])
        nodes += [node for node, _ in local.partial()]
        sums += [value for _, value in local.partial()]
    plan = merge(nodes, num_leaves)
    for left, right in plan.steps:
        sums[left] = sums[left] + sums[right]
    assert [sums[at] for at in plan.kept] == [whole_tree(values)]
    assert is_root(plan.nodes[0], num_leaves)


@given(LEAVES)
def test_climbing_keeps_the_leaves_of_a_node(num_leaves: int) -> None:
    for leaf in range(num_leaves):
        node = climb(Node(0, leaf), num_leaves)
        first = node.index << node.level
        assert range(first, min(first + (1 << node.level), num_leaves)) == range(leaf, leaf + 1)


def test_a_missing_leaf_is_noticed() -> None:
    folding: Fold[float] = Fold(3)
    folding.add(Node(0, 0), 1.0)
    folding.add(Node(0, 2), 1.0)
    with pytest.raises(ValueError, match="unpack"):
        folding.total()
