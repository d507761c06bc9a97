"""The ballot: all ranks come to the same count, that of one rank which holds everything."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from samestep.comm.transport import Transport
from samestep.loop.ballot import NUM_COLUMNS, Ballot, Count, Sums, Vote
from samestep.numerics.fold import Fold, Node, fold
from samestep.sync.layout import lay_out
from samestep.testing.threads import run_threads


@st.composite
def splits(draw: Any) -> list[range]:
    num_leaves, world_size = draw(st.integers(1, 13)), draw(st.integers(1, 5))
    cuts = sorted(
        draw(st.lists(st.integers(0, num_leaves), min_size=world_size - 1, max_size=world_size - 1))
    )
    return [range(start, stop) for start, stop in pairwise([0, *cuts, num_leaves])]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    runs=splits(),
    num_terms=st.integers(1, 3),
    num_parameters=st.sampled_from([1, 62, 63, 64, 130]),
    num_buffers=st.sampled_from([0, 1, 63, 64]),
    seed=st.integers(0, 2**32),
)
def test_the_count_is_that_of_one_rank(
    runs: list[range], num_terms: int, num_parameters: int, num_buffers: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    num_leaves, world_size = runs[-1].stop, len(runs)
    leaves = [
        np.ldexp(draw.standard_normal((num_terms, NUM_COLUMNS)), draw.integers(-300, 300))
        for _ in range(num_leaves)
    ]
    if seed % 3 == 0:
        leaves[seed % num_leaves][0, 0] = np.inf
    used = draw.integers(0, 2, (world_size, num_parameters))
    changed = draw.integers(0, 2, (world_size, num_buffers)).astype(bool)
    bad = [int(run[0]) if run and draw.integers(0, 2) else None for run in runs]
    named = [(f"p{n}", Parameter(torch.zeros(65))) for n in range(num_parameters)]
    layout = lay_out(named, world_size=world_size, whole=False)
    first = [0]
    for flat in layout.flats:
        first.append(first[-1] + flat.numel // flat.tile)
    norms = draw.standard_normal(first[-1])

    def work(transport: Transport) -> Count:
        rank = transport.rank
        sums: Fold[Sums] = Fold(num_leaves)
        for leaf in runs[rank]:
            sums.add(Node(0, leaf), leaves[leaf])
        owned = [
            tile
            for flat, start, stop in layout.owned(rank)
            for tile in range(
                first[flat] + start // layout.flats[flat].tile, first[flat] + stop // layout.flats[flat].tile
            )
        ]
        vote = Vote(
            sums=sums,
            used=used[rank].tolist(),
            changed=changed[rank].tolist(),
            tile_norms=[(tile, float(norms[tile])) for tile in reversed(owned)],
            bad_leaf=bad[rank],
        )
        ballot = Ballot(layout, transport, num_buffers=num_buffers)
        return ballot.cast(vote, runs, num_leaves, num_terms)

    wanted = fold(leaves)
    for count in run_threads(work, world_size):
        assert count.sums.tobytes() == wanted.tobytes()
        assert count.used == used.any(axis=0).tolist()
        assert count.changed_by_rank == changed.tolist()
        assert count.tile_norms == norms.tolist()
        assert count.bad_leaf == min((leaf for leaf in bad if leaf is not None), default=None)
