"""Distances between numbers count the numbers between them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from samestep.verify.distance import Level, compare_tensors, ulps

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_units_in_the_last_place_over_zero(dtype: torch.dtype) -> None:
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[number(0, dtype).element_size()]
    least = torch.tensor([1], dtype=integer).view(dtype)[0]  # the smallest number above zero
    assert ulps(number(0.0, dtype), number(-0.0, dtype)) == 0
    assert ulps(number(0.0, dtype), least) == 1
    assert ulps(-least, least) == 2
    largest = torch.finfo(dtype).max
    assert ulps(number(largest, dtype), number(math.inf, dtype)) == 1
    assert ulps(number(1.0, dtype), number(1.0 + torch.finfo(dtype).eps, dtype)) == 1
    assert ulps(number(-1.0, dtype), number(-1.0 - 2 * torch.finfo(dtype).eps, dtype)) == 2
    assert ulps(number(math.nan, dtype), number(1.0, dtype)) is None


@given(st.floats(allow_nan=False), st.integers(min_value=0, max_value=50))
def test_every_next_number_is_one_unit_away(start: float, count: int) -> None:
    value = start
    for _ in range(count):
        value = math.nextafter(value, math.inf)
    steps = ulps(number(start, torch.float64), number(value, torch.float64))
    assert steps == count or value == math.inf


@given(st.floats(allow_nan=False, width=32), st.floats(allow_nan=False, width=32))
def test_the_distance_is_the_same_both_ways(first: float, second: float) -> None:
    pair = number(first, torch.float32), number(second, torch.float32)
    assert ulps(*pair) == ulps(*reversed(pair))
    assert (ulps(*pair) == 0) == (first == second)


def test_equal_bits_are_no_difference() -> None:
    for tensor in (
        torch.tensor([math.nan, 1.0]),
        torch.empty(0, 2),
        torch.tensor(True),
        torch.tensor([1 + 2j]),
    ):
        assert compare_tensors("x", tensor, tensor.clone()) is None


def test_zeros_of_other_sign_differ_at_a_distance_of_zero() -> None:
    found = compare_tensors("x", torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))
    assert found is not None
    assert (found.index, found.ulps, found.num_different, found.level) == ((1,), 0, 1, Level.ROUNDING)
    assert math.copysign(1, found.second) == -1  # type: ignore[arg-type]


def test_the_first_different_element_is_found() -> None:
    first = torch.zeros(3, 4, 5)
    second = first.clone()
    second[1, 2, 3] = 1.0
    second[2, 0, 0] = 2.0
    found = compare_tensors("x", first, second)
    assert found is not None
    assert (found.index, found.num_different, found.num_elements) == ((1, 2, 3), 2, 60)
    assert (found.first, found.second) == (0.0, 1.0)
    assert found.level is Level.CHANGED


def test_views_are_compared_by_their_elements() -> None:
    base = torch.arange(6.0).view(2, 3)
    other = base.clone()
    other[0, 2] = 9.0
    found = compare_tensors("x", base.t(), other.t())
    assert found is not None
    assert (found.index, found.first, found.second) == ((2, 0), 2.0, 9.0)


@pytest.mark.parametrize(
    ("dtype", "relative", "level"),
    [
        (torch.float64, 1e-13, Level.ROUNDING),
        (torch.float64, 1e-11, Level.CHANGED),
        (torch.float32, 5e-7, Level.ROUNDING),
        (torch.float32, 3e-6, Level.CHANGED),
        (torch.bfloat16, 0.01, Level.CHANGED),
        (torch.complex64, 5e-7, Level.ROUNDING),
        (torch.complex128, 5e-7, Level.CHANGED),
    ],
)
def test_the_level_follows_the_relative_deviation(dtype: torch.dtype, relative: float, level: Level) -> None:
    first = torch.tensor([1.0, -4.0], dtype=dtype)
    second = torch.tensor([1.0, -4.0 * (1 + relative)], dtype=dtype)
    found = compare_tensors("x", first, second)
    assert found is not None
    assert found.level is level


@pytest.mark.parametrize(("other", "level"), [(math.nan, Level.CHANGED), (math.inf, Level.CHANGED)])
def test_a_number_against_none_is_no_rounding(other: float, level: Level) -> None:
    for pair in ((1.0, other), (other, 1.0)):
        found = compare_tensors("x", torch.tensor([pair[0]]), torch.tensor([pair[1]]))
        assert found is not None
        assert found.level is level


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.int16])
def test_integers_have_no_rounding(dtype: torch.dtype) -> None:
    found = compare_tensors("x", torch.tensor([1, 0]).to(dtype), torch.tensor([1, 1]).to(dtype))
    assert found is not None
    assert (found.ulps, found.deviation, found.level, found.index) == (None, None, Level.CHANGED, (1,))


def test_a_scalar_and_a_complex_number_have_a_place() -> None:
    found = compare_tensors("x", torch.tensor(1.0), torch.tensor(2.0))
    assert found is not None
    assert found.index == ()
    found = compare_tensors("x", torch.tensor([1 + 1j]), torch.tensor([1 + 1.0000001j]))
    assert found is not None
    assert (found.num_different, found.ulps) == (1, 1)
