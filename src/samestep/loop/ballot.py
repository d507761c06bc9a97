"""The ballot: the one small vector per step by which all ranks come to the same numbers and decisions.

It carries the loss sums and weights of this rank's subtrees, which parameters and buffers were used or
changed, the norms of the tiles owned here, the first micro-batch whose loss is not finite, words that must
be the same on all ranks, and marks: whether this rank asks for something, how far its checkpoint is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from samestep.comm.transport import Transport
from samestep.numerics.fold import Fold, Node
from samestep.sync.layout import Layout
from samestep.sync.partial_sums import plan_ordered

Sums: TypeAlias = NDArray[np.float64]  # (num_terms, NUM_COLUMNS): of each term
NUM_COLUMNS = 3  # loss sum, weight, loss sum times coefficient

_NO_LEAF = -1
_BITS = 63  # bits used of an int64, so that no sign is in the way


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """What one rank brings."""

    sums: Fold[Sums]
    used: Sequence[int]  # by parameter: 1 where this rank made a gradient
    changed: Sequence[bool]  # by buffer
    tile_norms: Sequence[tuple[int, float]]
    bad_leaf: int | None  # the first micro-batch here whose loss is not finite
    words: Sequence[int] = ()  # what must be alike on all ranks, as many in every vote
    marks: Sequence[int] = ()  # what each rank tells the others, as many in every vote


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """What all ranks know afterwards."""

    sums: Sums
    used: list[bool]
    changed_by_rank: list[list[bool]]
    tile_norms: list[float]  # in tile order
    bad_leaf: int | None
    words_by_rank: list[list[int]]
    marks_by_rank: list[list[int]]


@final
class Ballot:
    """Packs votes of a fixed size and counts them in an order that no rank depends on."""

    def __init__(self, layout: Layout, transport: Transport, *, num_buffers: int) -> None:
        self._transport = transport
        self._num_parameters = len(layout.slots)
        self._num_buffers = num_buffers
        first = layout.first_tiles()
        self._num_tiles = first[-1]
        self._tiles: list[list[int]] = []  # by rank, in the order in which a rank measures them
        for rank in range(transport.world_size):
            tiles: list[int] = []
            for number, start, stop in layout.owned(rank):
                tile = layout.flats[number].tile
                tiles += range(first[number] + start // tile, first[number] + stop // tile)
            self._tiles.append(tiles)

    def cast(self, vote: Vote, runs: Sequence[range], num_leaves: int, num_terms: int) -> Count:
        """Collective. Bring this rank's vote and return what all ranks' votes come to."""
        nodes = [plan_ordered(run, num_leaves).nodes for run in runs]
        shape = (max(len(held) for held in nodes), num_terms, NUM_COLUMNS)
        row = self._pack(vote, shape)
        rows = self._transport.ballot(torch.from_numpy(row)).numpy()
        return self._count(rows, nodes, shape, num_leaves, num_told=(len(vote.words), len(vote.marks)))

    def _pack(self, vote: Vote, shape: tuple[int, int, int]) -> NDArray[np.int64]:
        sums = np.zeros(shape, dtype=np.float64)
        for position, (_, value) in enumerate(vote.sums.partial()):
            sums[position] = value
        norms = np.zeros(max(len(tiles) for tiles in self._tiles), dtype=np.float64)
        own = self._tiles[self._transport.rank]
        by_tile = dict(vote.tile_norms)
        norms[: len(own)] = [by_tile[tile] for tile in own]
        bad_leaf = _NO_LEAF if vote.bad_leaf is None else vote.bad_leaf
        return np.concatenate(
            [
                np.array([bad_leaf, *vote.words, *vote.marks], dtype=np.int64),
                sums.ravel().view(np.int64),
                norms.view(np.int64),
                _to_words(vote.used),
                _to_words(vote.changed),
            ]
        )

    def _count(
        self,
        rows: NDArray[np.int64],
        nodes: Sequence[Sequence[Node]],
        shape: tuple[int, int, int],
        num_leaves: int,
        *,
        num_told: tuple[int, int],
    ) -> Count:
        widths = [
            1,
            *num_told,
            int(np.prod(shape)),
            max(len(tiles) for tiles in self._tiles),
            _num_words(self._num_parameters),
            _num_words(self._num_buffers),
        ]
        bad, words, marks, sums, norms, used, changed = np.split(rows, np.cumsum(widths)[:-1], axis=1)
        folding: Fold[Sums] = Fold(num_leaves)
        for held, packed in zip(nodes, sums, strict=True):
            values = np.ascontiguousarray(packed).view(np.float64).reshape(shape)
            for node, value in zip(held, values, strict=False):
                folding.add(node, value)
        tile_norms = [0.0] * self._num_tiles
        for tiles, packed in zip(self._tiles, norms, strict=True):
            measured = np.ascontiguousarray(packed).view(np.float64).tolist()
            for tile, norm in zip(tiles, measured, strict=False):
                tile_norms[tile] = norm
        bad_leaves = [leaf for leaf in bad.ravel().tolist() if leaf != _NO_LEAF]
        return Count(
            sums=folding.total(),
            used=_to_flags(np.bitwise_or.reduce(used, axis=0), self._num_parameters),
            changed_by_rank=[_to_flags(row, self._num_buffers) for row in changed],
            tile_norms=tile_norms,
            bad_leaf=min(bad_leaves, default=None),
            words_by_rank=words.tolist(),
            marks_by_rank=marks.tolist(),
        )


def _num_words(num_flags: int) -> int:
    return -(-num_flags // _BITS)


def _to_words(flags: Sequence[int] | Sequence[bool]) -> NDArray[np.int64]:
    bits = np.zeros((_num_words(len(flags)), _BITS), dtype=np.int64)
    bits.ravel()[: len(flags)] = np.asarray(flags, dtype=np.int64)
    words: NDArray[np.int64] = (bits << np.arange(_BITS, dtype=np.int64)).sum(axis=1, dtype=np.int64)
    return words


def _to_flags(words: NDArray[np.int64], num_flags: int) -> list[bool]:
    bits = (words[:, None] >> np.arange(_BITS, dtype=np.int64)) & 1
    flags: list[bool] = bits.ravel()[:num_flags].astype(bool).tolist()
    return flags
