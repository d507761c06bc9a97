"""A curve keeps its extremes and stays small, whatever comes, in whatever pieces."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.track import curve as curves
from samestep.track.curve import MOST_BUCKETS, Curve

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def drawn(values: list[float], first: int = 0) -> Curve:
    made = Curve()
    for step, value in enumerate(values, start=first):
        made.add(step, value)
    return made


@given(values=VALUES, most=st.integers(2, 20))
def test_no_extreme_is_lost(values: list[float], most: int) -> None:
    found = drawn(values).numbers(most)
    assert len(found["x"]) <= most
    low, high = found.get("lo", found["y"]), found.get("hi", found["y"])
    assert min(low) == curves.short(min(values))
    assert max(high) == curves.short(max(values))
    assert found["x"] == sorted(found["x"])
    assert all(bottom <= middle <= top for bottom, middle, top in zip(low, found["y"], high, strict=True))


def test_many_steps_stay_small() -> None:
    made = Curve()
    for step in range(100_000):
        made.add(step, 2.0 if step == 77_777 else 1.0)
    found = made.numbers()
    assert MOST_BUCKETS // 4 < len(found["x"]) <= MOST_BUCKETS
    assert max(found["hi"]) == 2.0
    assert min(found["lo"]) == 1.0


def test_few_values_stand_as_they_are() -> None:
    found = drawn([3.0, 1.0, 2.0], first=5).numbers()
    assert found == {"x": [5.0, 6.0, 7.0], "y": [3.0, 1.0, 2.0]}


def test_what_is_not_finite_leaves_a_gap_and_is_counted() -> None:
    made = drawn([1.0, math.nan, math.inf, 4.0])
    assert made.numbers()["x"] == [0.0, 3.0]
    assert made.summary() == {
        "first": 1.0,
        "last": 4.0,
        "low": 1.0,
        "high": 4.0,
        "not_finite": 2,
        "first_not_finite": 1,
    }


@pytest.mark.parametrize("back", [0, 1, 7])
def test_a_step_that_comes_again_takes_the_curve_back(back: int) -> None:
    made = drawn([float(step) for step in range(20)])
    for step in range(back, 10):
        made.add(step, 100.0 + step)
    assert made.numbers()["y"] == [float(step) if step < back else 100.0 + step for step in range(10)]


def test_an_empty_curve_says_so() -> None:
    assert not Curve()
    assert drawn([math.nan])
    assert Curve().summary()["low"] is None
