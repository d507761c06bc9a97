"""Schedules as functions of the update."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep import schedules
from samestep.errors import ConfigError


@given(updates=st.integers(1, 500), warmup=st.integers(0, 600), floor=st.floats(0, 1))
def test_rise_fall_and_stay(updates: int, warmup: int, floor: float) -> None:
    for schedule in (
        schedules.linear(updates=updates, warmup=warmup, floor=floor),
        schedules.warmup_cosine(updates=updates, warmup=warmup, floor=floor),
    ):
        curve = [schedule(update) for update in range(updates + 3)]
        assert all(0 <= value <= 1 for value in curve)
        assert curve[:warmup] == sorted(curve[:warmup])
        falling = curve[warmup:]
        assert all(a >= b - 1e-12 for a, b in pairwise(falling))
        if warmup <= updates:
            assert curve[-1] == pytest.approx(floor)


def test_known_values() -> None:
    assert [schedules.linear(updates=4)(u) for u in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert schedules.warmup_cosine(updates=4)(2) == pytest.approx(0.5)
    assert schedules.inverse_sqrt(warmup=4)(15) == pytest.approx(0.5)
    assert schedules.inverse_sqrt(warmup=4)(3) == 1.0
    stable = schedules.wsd(updates=10, warmup=2, decay=4)
    assert [stable(u) for u in (0, 1, 5, 6, 8, 10)] == [0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    assert schedules.constant()(10**9) == 1.0
    assert math.isclose(schedules.inverse_sqrt(warmup=1)(99), 0.1)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: schedules.linear(updates=0), "updates is 0"),
        (lambda: schedules.warmup_cosine(updates=5, warmup=-1), "warmup is -1"),
        (lambda: schedules.inverse_sqrt(warmup=0), "warmup is 0"),
        (lambda: schedules.wsd(updates=5, warmup=3, decay=3), "do not fit into 5 updates"),
        (lambda: schedules.constant(warmup=-2), "warmup is -2"),
    ],
)
def test_wrong_counts_are_refused(make: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()  # type: ignore[operator]
