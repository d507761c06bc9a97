"""A straggler stays well above the others; a short hiccup and an uneven share are none."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.track.stragglers import MOST_SLICES, Slices, find_stragglers


def ranks(
    slow: dict[int, float], *, steps: int = 400, count: int = 3, phase: str = "backward"
) -> dict[int, Slices]:
    """Return ranks that take 10 ms a step in every phase, but for those that are so many times as slow."""
    chance = random.Random(0)
    found = {rank: Slices() for rank in range(count)}
    for rank, slices in found.items():
        for first in range(0, steps, 10):
            seconds = {name: 0.1 * (0.95 + chance.random() / 10) for name in ("data", "forward", "backward")}
            seconds[phase] *= slow.get(rank, 1.0)
            slices.add(first, first + 9, 10, seconds)
    return found


def test_a_slow_rank_is_named_with_its_numbers() -> None:
    (found,) = find_stragglers(ranks({1: 3.0}))
    assert (found.rank, found.phase) == (1, "computing")
    assert found.seconds == pytest.approx(0.04, rel=0.1)
    assert found.others == pytest.approx(0.02, rel=0.1)
    assert found.share == 1.0


def test_slow_data_is_told_apart() -> None:
    (found,) = find_stragglers(ranks({2: 2.0}, phase="data"))
    assert (found.rank, found.phase) == (2, "data")


@pytest.mark.parametrize("slow", [{}, {0: 1.05}, {0: 1.2, 1: 1.2, 2: 1.2}])
def test_like_ranks_are_no_stragglers(slow: dict[int, float]) -> None:
    assert find_stragglers(ranks(slow)) == []


def test_an_uneven_share_of_micro_batches_explains_as_much() -> None:
    slow = ranks({0: 1.8})  # 1.4 in all of computing
    assert [found.rank for found in find_stragglers(slow)] == [0]
    assert find_stragglers(slow, uneven=1.5) == []


def test_a_hiccup_is_no_straggler() -> None:
    found = ranks({})
    found[0].add(0, 9, 10, {"backward": 60.0})
    assert find_stragglers(found) == []


def test_one_rank_alone_has_nobody_to_be_compared_with() -> None:
    assert find_stragglers(ranks({0: 5.0}, count=1)) == []


@given(windows=st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_slices_keep_all_seconds_whatever_the_windows(windows: list[int]) -> None:
    slices, first = Slices(), 0
    for steps in windows:
        slices.add(first, first + steps - 1, steps, {"data": 0.5 * steps})
        first += steps
    assert len(slices.steps) <= MOST_SLICES
    assert sum(slices.steps.values()) == pytest.approx(first)
    assert sum(sums["data"] for sums in slices.phases.values()) == pytest.approx(0.5 * first)
    assert all(value == pytest.approx(0.5) for value in slices.per_step(["data"]).values())
