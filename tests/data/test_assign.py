"""Sharing out micro-batches: covering, contiguous, in proportion, monotone, exact."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.assign import assign
from samestep.errors import ConfigError

SPEED = st.floats(min_value=0, max_value=1e300, allow_nan=False) | st.sampled_from([0.0, 5e-324, 1.0, 1e300])
SPEEDS = st.lists(SPEED, min_size=1, max_size=12).filter(any)
COUNT = st.integers(0, 500)


@settings(deadline=None)  # other work on the machine is no failure
@given(COUNT, SPEEDS)
def test_the_runs_cover_all_micro_batches_once(num_micro_batches, speeds):
    runs = assign(num_micro_batches, speeds)
    assert [index for run in runs for index in run] == list(range(num_micro_batches))
    assert len(runs) == len(speeds)
    assert all(before.stop == after.start for before, after in pairwise(runs))


@settings(deadline=None)
@given(COUNT, SPEEDS)
def test_each_run_is_within_one_of_its_share(num_micro_batches, speeds):
    total = sum(map(Fraction, speeds))
    for run, speed in zip(assign(num_micro_batches, speeds), speeds, strict=True):
        assert abs(len(run) - num_micro_batches * Fraction(speed) / total) <= 1
        assert speed > 0 or len(run) == 0


@settings(deadline=None)
@given(COUNT, SPEEDS, st.data())
def test_a_rank_that_grows_faster_never_gets_less(num_micro_batches, speeds, data):
    rank = data.draw(st.integers(0, len(speeds) - 1))
    faster = [*speeds]
    faster[rank] = data.draw(st.floats(speeds[rank], 1e301))
    before, after = (assign(num_micro_batches, some)[rank] for some in (speeds, faster))
    assert len(after) >= len(before)


@settings(deadline=None)
@given(COUNT, SPEEDS, st.integers(-8, 8))
def test_the_unit_of_speed_does_not_matter(num_micro_batches, speeds, power):
    scaled = [math.ldexp(speed, power) for speed in speeds]
    if all(math.ldexp(back, -power) == speed for back, speed in zip(scaled, speeds, strict=True)):
        assert assign(num_micro_batches, scaled) == assign(num_micro_batches, speeds)


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(1, 20))
def test_equal_ranks_differ_by_one_at_most(num_micro_batches, world_size):
    sizes = {len(run) for run in assign(num_micro_batches, [0.1] * world_size)}
    assert max(sizes) - min(sizes) <= 1


def test_whole_numbers_are_speeds_too():
    assert assign(7, [3, 0, 4]) == [range(3), range(3, 3), range(3, 7)]


@pytest.mark.parametrize("speeds", [[], [0.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_speeds_without_shares_are_refused(speeds):
    with pytest.raises(ConfigError, match="speeds of the ranks"):
        assign(4, speeds)


def test_a_negative_number_of_micro_batches_is_refused():
    with pytest.raises(ConfigError, match="-1 micro-batches"):
        assign(-1, [1.0])
