"""The ordered sum: one binary tree over the leaves 0 .. M-1, whoever holds which leaf.

Leaf i joins leaf i^1, and so on upward; a subtree without a sibling is carried up unchanged. Whoever adds,
and in whatever order the parts arrive, the same additions are made, so the total has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, Self, TypeVar, final


class Node(NamedTuple):
    """A subtree: the leaves from index * 2**level up to, not including, (index + 1) * 2**level."""

    level: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


class Addable(Protocol):
    """What can be folded."""

    def __add__(self, other: Self, /) -> Self:
        """Add two values."""


Value = TypeVar("Value", bound=Addable)


def climb(node: Node, num_leaves: int) -> Node:
    """Carry a node up while it has no sibling: the two subtrees hold the same leaves."""
    level, index = node
    while (1 << level) < num_leaves and ((index ^ 1) << level) >= num_leaves:
        level, index = level + 1, index >> 1
    return Node(level, index)


def is_root(node: Node, num_leaves: int) -> bool:
    """Say whether a node holds all leaves."""
    return (1 << node.level) >= num_leaves


def subtrees(run: range, num_leaves: int) -> list[Node]:
    """Return the largest subtrees that a contiguous run of leaves fills, in leaf order.

    A rank adds up within these and sends them: at most about 2 * log2(len(run)) of them.

    >>> subtrees(range(1, 6), 6)
    [Node(level=0, index=1), Node(level=1, index=1), Node(level=2, index=1)]
    """
    return merge([Node(0, leaf) for leaf in run], num_leaves).nodes


@dataclass(frozen=True, slots=True)
class Merge:
    """The additions that fold a list of subtrees, by position in that list."""

    steps: list[tuple[int, int]]  # values[left] = values[left] + values[right], in this order
    kept: list[int]  # the positions that are left at the end, in leaf order
    nodes: list[Node]  # what stands at those positions


def merge(nodes: Sequence[Node], num_leaves: int) -> Merge:
    """Plan the fold of subtrees that are given in leaf order.

    >>> merge([Node(0, 0), Node(0, 1), Node(0, 2)], 3).steps
    [(0, 1), (0, 2)]
    """
    steps: list[tuple[int, int]] = []
    partial: dict[Node, int] = {}
    for position, start in enumerate(nodes):
        node, at = climb(start, num_leaves), position
        while not is_root(node, num_leaves) and (sibling := Node(node.level, node.index ^ 1)) in partial:
            other = partial.pop(sibling)
            left, right = (other, at) if sibling.index < node.index else (at, other)
            steps.append((left, right))
            at, node = left, climb(Node(node.level + 1, node.index >> 1), num_leaves)
        partial[node] = at
    by_leaf = sorted(partial, key=lambda node: node.index << node.level)
    return Merge(steps=steps, kept=[partial[node] for node in by_leaf], nodes=by_leaf)


@final
class Fold(Generic[Value]):
    """Sum values keyed by subtree in the one fixed tree, in whatever order they arrive.

    Two subtrees merge as soon as both are known, so a contiguous run of leaves in order keeps at most
    about log2(num_leaves) partial sums.
    """

    def __init__(self, num_leaves: int) -> None:
        self.num_leaves = num_leaves
        self._partial: dict[Node, Value] = {}

    def add(self, node: Node, value: Value) -> None:
        """Take over the sum of one subtree."""
        node = climb(node, self.num_leaves)
        while not is_root(node, self.num_leaves):
            sibling = Node(node.level, node.index ^ 1)
            if sibling not in self._partial:
                break
            other = self._partial.pop(sibling)
            value = other + value if sibling.index < node.index else value + other
            node = climb(Node(node.level + 1, node.index >> 1), self.num_leaves)
        self._partial[node] = value

    def partial(self) -> list[tuple[Node, Value]]:
        """Return the sums that wait for their siblings, in leaf order."""
        return sorted(self._partial.items(), key=lambda item: item[0].index << item[0].level)

    def total(self) -> Value:
        """Return the sum over all leaves; every leaf must have arrived."""
        (value,) = self._partial.values()
        return value


def fold(values: Iterable[Value]) -> Value:
    """Sum a whole sequence in the fixed tree.

    >>> fold([1.0, 2.0, 3.0])
    6.0
    """
    leaves = list(values)
    folding: Fold[Value] = Fold(len(leaves))
    for index, value in enumerate(leaves):
        folding.add(Node(0, index), value)
    return folding.total()
