"""The global batches of runs whose sizes change and whose samples go into quarantine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.config import Batching
from samestep.data.global_batch import Batches, GlobalBatch
from samestep.data.planner import Planner, Standing, planned_steps
from samestep.errors import ConfigError, DataError

SIZES = st.integers(1, 40)
LAST = st.sampled_from(["keep", "drop", "wrap"])


@st.composite
def plans(draw: st.DrawFn, *, with_growth: bool = True) -> Planner:
    growth = draw(st.dictionaries(st.integers(1, 8), SIZES, max_size=3)) if with_growth else {}
    batching = Batching(global_batch=draw(SIZES), last=draw(LAST), shuffle=draw(st.booleans()), growth=growth)
    num_samples = draw(st.integers(1, 60))
    if batching.last == "drop":
        num_samples += batching.sizes.largest
    batches = Batches(
        num_samples=num_samples,
        batching=batching,
        seed=draw(st.integers(0, 9)),
        epochs=draw(st.integers(0, 3)),
    )
    least = batching.sizes.largest if batching.last == "drop" else 1
    bad = draw(st.sets(st.integers(0, num_samples - 1), max_size=num_samples - least))
    return Planner(batches=batches, quarantine=tuple(sorted(bad)))


def content(batch: GlobalBatch) -> tuple[object, ...]:
    return (batch.step, batch.epoch, batch.start, batch.cursor, batch.ids.tolist(), batch.epochs.tolist())


def stream_of(planner: Planner) -> list[tuple[int, int]]:
    """Return all visits that the run is to make, in their order: what is in quarantine left out."""
    batches = planner.batches
    ids, epochs = batches.visits(np.arange(batches.end or 0))
    return [(e, i) for e, i in zip(epochs.tolist(), ids.tolist(), strict=True) if i not in planner.quarantine]


def visits(batches: list[GlobalBatch]) -> list[tuple[int, int]]:
    return [pair for b in batches for pair in zip(b.epochs.tolist(), b.ids.tolist(), strict=True)]


@settings(deadline=None, max_examples=150)
@given(plans())
def test_every_other_sample_is_used_once_and_in_its_order(planner):
    walked = list(planner.ahead(Standing()))
    expected = stream_of(planner)
    if not planner.quarantine:
        assert planned_steps(planner.batches) == len(walked)
    batching = planner.batches.batching
    if batching.last != "drop":
        assert visits(walked) == expected
        return
    assert all(batch.num_samples == batching.sizes(batch.step) for batch in walked)
    assert max(Counter(visits(walked)).values(), default=0) <= 1
    for epoch in range(planner.batches.epochs or 0):  # of each epoch its beginning
        taken = [pair for pair in visits(walked) if pair[0] == epoch]
        assert taken == [pair for pair in expected if pair[0] == epoch][: len(taken)]


@settings(deadline=None, max_examples=100)
@given(plans())
def test_sizes_follow_the_updates_and_the_cursor_counts_every_place(planner):
    batching, cursor = planner.batches.batching, 0
    walked = list(planner.ahead(Standing()))
    for update, batch in enumerate(walked):
        full = batch.num_samples == batching.sizes(update)
        ends = batch.cursor % planner.batches.num_samples == 0 or batch.cursor == planner.batches.end
        assert full or ends
        assert batch.start == cursor
        assert planner.is_last(batch, update + 1) == (batch is walked[-1])
        cursor = batch.cursor
    if walked and batching.last != "drop":
        assert cursor == planner.batches.end


@settings(deadline=None, max_examples=100)
@given(plans(), st.data())
def test_any_step_is_found_from_its_standing_alone(planner, data):
    walked = list(planner.ahead(Standing()))
    first = data.draw(st.integers(0, len(walked)))
    cursor = walked[first - 1].cursor if first else 0
    standing = Standing(step=first, cursor=cursor, update=first)
    assert [content(b) for b in planner.ahead(standing)] == [content(b) for b in walked[first:]]
    found = planner.at(standing)
    assert (found is None) == (first == len(walked))
    assert found is None or content(found) == content(walked[first])


@settings(deadline=None, max_examples=100)
@given(plans(with_growth=False))
def test_steps_of_one_size_are_those_of_the_arithmetic(planner):
    batches = planner.batches
    regular = Planner(batches=batches)
    grown = Batching(
        **{**batches.batching.model_dump(), "growth": {10**6: batches.batching.global_batch + 1}}
    )
    slow = Planner(batches=replace(batches, batching=grown))
    assert not slow.is_regular(Standing())
    assert regular.is_regular(Standing())
    expected = [content(b) for b in batches.starting_at(0)]
    assert [content(b) for b in regular.ahead(Standing())] == expected
    assert [content(b) for b in slow.ahead(Standing())] == expected


@settings(deadline=None, max_examples=60)
@given(plans(with_growth=False), st.data())
def test_samples_that_go_into_quarantine_later_are_the_only_ones_that_miss(planner, data):
    batches = planner.batches
    before = Planner(batches=batches)
    steps = data.draw(st.integers(0, len(batches)))
    walked = list(takewhile(lambda b: b.step < steps, before.ahead(Standing())))
    cursor = walked[-1].cursor if walked else 0
    walked += planner.ahead(Standing(step=len(walked), cursor=cursor, update=len(walked)))
    if batches.batching.last != "drop":
        ids, epochs = batches.visits(np.arange(batches.end or 0))
        expected = [
            (e, i)
            for place, (e, i) in enumerate(zip(epochs.tolist(), ids.tolist(), strict=True))
            if place < cursor or i not in planner.quarantine
        ]
        assert visits(walked) == expected


def test_a_skipped_step_has_the_same_size_again():
    batching = Batching(global_batch=2, growth={1: 4}, shuffle=False)
    planner = Planner(batches=Batches(num_samples=20, batching=batching, seed=0, steps=9))
    for update, size in [(0, 2), (1, 4), (5, 4)]:
        batch = planner.at(Standing(step=3, cursor=6, update=update))
        assert batch is not None
        assert batch.ids.tolist() == list(range(6, 6 + size))


def test_the_number_of_steps_is_told_where_it_is_known():
    fixed = Batches(num_samples=20, batching=Batching(global_batch=4), seed=0, epochs=2)
    assert Planner(batches=fixed).num_steps(Standing()) == 10
    assert Planner(batches=fixed, quarantine=(3,)).num_steps(Standing()) is None
    assert Planner(batches=replace(fixed, epochs=None, steps=7), quarantine=(3,)).num_steps(Standing()) == 7


def test_a_run_without_samples_ends_with_a_message():
    batches = Batches(num_samples=3, batching=Batching(global_batch=2), seed=0, steps=4)
    with pytest.raises(DataError, match="3 of 3 samples are in quarantine: 0 are left"):
        Planner(batches=batches, quarantine=(0, 1, 2))
    full = Batches(num_samples=3, batching=Batching(global_batch=2, last="drop"), seed=0, steps=4)
    with pytest.raises(DataError, match="a step takes 2 or more"):
        Planner(batches=full, quarantine=(0, 1))


@pytest.mark.parametrize(
    ("growth", "message"),
    [({0: 5}, "from update 0 on"), ({-1: 5}, "growth is {-1: 5}"), ({3: 0}, "growth is {3: 0}")],
)
def test_sizes_that_cannot_be_are_refused(growth, message):
    with pytest.raises(ConfigError, match=message):
        Batching(global_batch=4, growth=growth)


def test_a_larger_batch_is_cut_into_micro_batches_of_the_same_size():
    batching = Batching(global_batch=8, growth={1: 16}).resolved()
    assert batching.micro_batch == 1
    planner = Planner(batches=Batches(num_samples=40, batching=batching, seed=0, steps=3))
    assert [batch.num_micro_batches for batch in planner.ahead(Standing())] == [8, 16, 16]
