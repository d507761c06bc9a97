"""The global batch by update: a table, however it is given."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.config.batch_sizes import BatchSizes, batch_size
from samestep.errors import ConfigError


@given(st.dictionaries(st.integers(1, 200), st.integers(1, 64), max_size=8), st.integers(1, 64))
def test_each_update_has_the_size_of_the_stretch_it_lies_in(later: dict[int, int], first: int) -> None:
    sizes = {**later, 0: first}
    schedule = batch_size(sizes)
    size = first
    for update in range(220):
        size = sizes.get(update, size)
        assert schedule(update) == size
    assert schedule.largest == max(sizes.values())
    assert schedule.smallest == min(sizes.values())


@given(st.lists(st.integers(1, 3), min_size=1, max_size=30))
def test_a_function_becomes_the_table_of_its_values(sizes: list[int]) -> None:
    schedule = batch_size(lambda update: sizes[update], updates=len(sizes))
    assert [schedule(update) for update in range(len(sizes))] == sizes
    assert schedule(10_000) == sizes[-1]
    assert all(a[1] != b[1] for a, b in zip(schedule.table, schedule.table[1:], strict=False))
    assert batch_size(dict(schedule.table)) == schedule


BAD: list[tuple[Any, str]] = [
    (lambda: batch_size({}), "the table is empty"),
    (lambda: batch_size({5: 32}), "begins at update 5"),
    (lambda: batch_size({0: 32, 10: 0}), "the global batch from update 10 on is 0"),
    (lambda: batch_size({0: 32, 10: 1.5}), "from update 10 on is 1.5"),
    (lambda: batch_size({0: 32, -1: 8}), "the update is -1"),
    (lambda: batch_size({0: 32, "ten": 8}), "'ten' is no update"),
    (lambda: batch_size(32), "got a int"),
    (lambda: batch_size(lambda update: 32), "say with updates="),
    (lambda: batch_size(lambda update: None, updates=3), "from update 0 on is None"),
    (lambda: BatchSizes(((0, 8), (0, 16))), "do not rise"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_tables_that_leave_an_update_without_a_size_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
