"""In which buffer each leaf's gradient goes, and which buffers are added when: planned before the step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from samestep.numerics.fold import Node, climb


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafPlan:
    """What happens to the gradient of one leaf."""

    target: int  # the number of a gradient buffer
    fresh: bool  # the gradient is written there; else it is added to what is there
    merges: tuple[tuple[int, int], ...]  # buffers: the left one takes up the right one, in this order


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """What a rank does with its run of leaves."""

    leaves: dict[int, LeafPlan]
    kept: tuple[int, ...]  # the buffers that hold the run's subtrees at the end, in leaf order
    nodes: tuple[Node, ...]  # those subtrees
    num_buffers: int

    @property
    def last(self) -> int | None:
        """The last leaf of the run."""
        return next(reversed(self.leaves), None)

    @property
    def result(self) -> int:
        """The buffer that takes up the global sum."""
        return self.kept[0] if self.kept else 0


@lru_cache(maxsize=64)
def plan_ordered(run: range, num_leaves: int) -> RunPlan:
    """Plan the ordered sum within a contiguous run of leaves.

    A leaf whose sibling subtree is complete here is added to it in place: that is the same addition. So a
    run of L leaves needs at most 1 + log2(L) buffers, and one for one or two leaves.
    """
    leaves: dict[int, LeafPlan] = {}
    holders: dict[Node, int] = {}
    free: list[int] = []
    num_buffers = 1
    for leaf in run:
        node = climb(Node(0, leaf), num_leaves)
        fresh = _left_sibling(node) not in holders
        if fresh:
            holder = free.pop() if free else len(holders)
            num_buffers = max(num_buffers, holder + 1)
        else:
            holder = holders.pop(_left_sibling(node))
            node = _parent(node, num_leaves)
        target = holder
        merges: list[tuple[int, int]] = []
        while _left_sibling(node) in holders:
            left = holders.pop(_left_sibling(node))
            merges.append((left, holder))
            free.append(holder)
            holder, node = left, _parent(node, num_leaves)
        leaves[leaf] = LeafPlan(target=target, fresh=fresh, merges=tuple(merges))
        holders[node] = holder
    ordered = sorted(holders, key=lambda node: node.index << node.level)
    kept = tuple(holders[node] for node in ordered)
    return RunPlan(leaves=leaves, kept=kept, nodes=tuple(ordered), num_buffers=num_buffers)


@lru_cache(maxsize=64)
def plan_fast(run: range) -> RunPlan:
    """Plan a running sum in one buffer: the order of additions then depends on the split."""
    leaves = {leaf: LeafPlan(target=0, fresh=position == 0, merges=()) for position, leaf in enumerate(run)}
    return RunPlan(leaves=leaves, kept=(0,), nodes=(), num_buffers=1)


def _parent(node: Node, num_leaves: int) -> Node:
    return climb(Node(node.level + 1, node.index >> 1), num_leaves)


def _left_sibling(node: Node) -> Node:
    """Return the subtree that stands before this one; a left subtree gets a node that nobody holds."""
    return Node(node.level, node.index - 1) if node.index % 2 else Node(-1, -1)
