"""Which samples a step owns: each once an epoch, whatever the sizes, and found again from a cursor."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.config import Batching
from samestep.data.global_batch import Batches, GlobalBatch
from samestep.errors import ConfigError

# One, primes, and sizes above and below each other: none divides the other but by accident.
SIZES = st.sampled_from([1, 2, 3, 5, 7, 8, 13, 31, 64, 97]) | st.integers(1, 120)


@st.composite
def runs(draw: st.DrawFn, last: list[str], *, ends_by: str = "epochs") -> Batches:
    global_batch = draw(SIZES)
    num_samples = draw(SIZES)
    kind = draw(st.sampled_from(last))
    if kind == "drop":
        num_samples += global_batch
    micro_batch = draw(st.none() | st.integers(1, global_batch))
    batching = Batching(
        global_batch=global_batch, micro_batch=micro_batch, last=kind, shuffle=draw(st.booleans())
    )
    end = {ends_by: draw(st.integers(0, 4))}
    return Batches(num_samples=num_samples, batching=batching, seed=draw(st.integers(0, 9)), **end)


def all_of(batches: Batches) -> list[GlobalBatch]:
    return [batches.batch(step) for step in range(len(batches))]


def visits(batches: Batches) -> Counter[tuple[int, int]]:
    """Count how often each sample is used in each epoch."""
    pairs: Counter[tuple[int, int]] = Counter()
    for batch in all_of(batches):
        pairs.update(zip(batch.epochs.tolist(), batch.ids.tolist(), strict=True))
    return pairs


def content(batch: GlobalBatch) -> tuple[object, ...]:
    return (batch.step, batch.epoch, batch.start, batch.cursor, batch.ids.tolist(), batch.epochs.tolist())


@settings(deadline=None)  # other work on the machine is no failure
@given(runs(["keep", "wrap"]))
def test_every_sample_is_used_once_in_every_epoch(batches):
    expected = {(epoch, i): 1 for epoch in range(batches.epochs) for i in range(batches.num_samples)}
    assert visits(batches) == expected


@settings(deadline=None)
@given(runs(["drop"]))
def test_drop_takes_full_batches_and_no_sample_twice(batches):
    size = batches.batching.global_batch
    assert all(batch.num_samples == size for batch in all_of(batches))
    assert set(visits(batches).values()) <= {1}
    assert len(batches) == batches.epochs * (batches.num_samples // size)


@settings(deadline=None)
@given(runs(["keep", "drop", "wrap"]) | runs(["keep", "drop", "wrap"], ends_by="steps"))
def test_the_micro_batches_joined_are_the_global_batch(batches):
    for batch in all_of(batches):
        micros = [batch.micro(index) for index in range(batch.num_micro_batches)]
        assert np.array_equal(np.concatenate([micro.ids for micro in micros]), batch.ids)
        assert np.array_equal(np.concatenate([micro.epochs for micro in micros]), batch.epochs)
        assert all(len(micro.ids) == batches.micro_batch for micro in micros[:-1])
        assert 1 <= len(micros[-1].ids) <= batches.micro_batch
        assert [(micro.step, micro.index) for micro in micros] == [
            (batch.step, i) for i in range(len(micros))
        ]


@settings(deadline=None)
@given(runs(["keep", "drop", "wrap"]) | runs(["keep", "drop", "wrap"], ends_by="steps"))
def test_the_cursor_goes_from_step_to_step_and_back(batches):
    cursor = 0
    for batch in all_of(batches):
        assert batch.start == cursor
        assert batches.step_at(cursor) == batch.step
        assert batch.epoch == batch.epochs[0]
        cursor = batch.cursor
    assert batches.step_at(cursor) == len(batches)
    if batches.epochs is not None:
        assert cursor == batches.epochs * batches.num_samples


@settings(deadline=None)
@given(runs(["keep", "drop", "wrap"]), st.data())
def test_a_place_where_no_step_starts_is_refused(batches, data):
    starts = {batch.start for batch in all_of(batches)} | {batches.epochs * batches.num_samples}
    cursor = data.draw(st.integers(-1, batches.epochs * batches.num_samples))
    if cursor in starts:
        return
    with pytest.raises(ConfigError, match=f"no step starts at sample {cursor} "):
        batches.step_at(cursor)


@settings(deadline=None)
@given(runs(["keep", "drop", "wrap"]), st.data())
def test_walking_gives_what_random_access_gives(batches, data):
    first = data.draw(st.integers(0, len(batches)))
    walked = [content(batch) for batch in batches.starting_at(first)]
    assert walked == [content(batch) for batch in all_of(batches)[first:]]


def test_walking_never_ends_before_the_run_does():
    batches = Batches(num_samples=10, batching=Batching(global_batch=3, last="wrap"), seed=0, steps=10**12)
    walk = batches.starting_at(10**12 - 2)
    assert [batch.step for batch in walk] == [10**12 - 2, 10**12 - 1]


@pytest.mark.parametrize("global_batch", [1, 4, 5, 40])
def test_steps_go_on_as_epochs_do(global_batch):
    for last in ("keep", "wrap"):
        batching = Batching(global_batch=global_batch, last=last)
        by_epochs = Batches(num_samples=40, batching=batching, seed=2, epochs=3)
        by_steps = Batches(num_samples=40, batching=batching, seed=2, steps=len(by_epochs))
        assert [content(batch) for batch in all_of(by_steps)] == [
            content(batch) for batch in all_of(by_epochs)
        ]


def test_the_micro_batch_does_not_move_a_sample():
    cuts = [Batching(global_batch=13, micro_batch=size) for size in (1, 5, 13)]
    orders = [
        [content(b) for b in all_of(Batches(num_samples=30, batching=cut, seed=1, epochs=2))] for cut in cuts
    ]
    assert orders[0] == orders[1] == orders[2]


def test_a_wrapped_batch_may_hold_several_epochs():
    batches = Batches(num_samples=3, batching=Batching(global_batch=8, last="wrap"), seed=0, epochs=5)
    assert [batch.num_samples for batch in all_of(batches)] == [8, 7]
    assert batches.batch(0).epochs.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert batches.batch(1).epoch == 2
    assert batches.batch(1).cursor == 15


def test_the_dropped_end_of_an_epoch_counts_as_passed_over():
    batches = Batches(num_samples=10, batching=Batching(global_batch=4, last="drop"), seed=0, steps=4)
    assert [(batch.start, batch.cursor, batch.epoch) for batch in all_of(batches)] == [
        (0, 4, 0),
        (4, 10, 0),
        (10, 14, 1),
        (14, 20, 1),
    ]


def test_the_short_end_of_an_epoch_is_a_step_of_its_own():
    batches = Batches(num_samples=10, batching=Batching(global_batch=4, micro_batch=3), seed=0, epochs=2)
    assert batches.steps_per_epoch == 3
    assert [batch.num_samples for batch in all_of(batches)] == [4, 4, 2, 4, 4, 2]
    assert [batch.num_micro_batches for batch in all_of(batches)] == [2, 2, 1, 2, 2, 1]


def test_steps_per_epoch():
    counts = {}
    for last in ("keep", "drop", "wrap"):
        batching = Batching(global_batch=4, last=last)
        counts[last] = Batches(num_samples=10, batching=batching, seed=0, steps=1).steps_per_epoch
    assert counts == {"keep": 3, "drop": 2, "wrap": 3}


def test_the_sample_hash_covers_the_ids_in_their_order():
    batching = Batching(global_batch=3, shuffle=False)
    batch = Batches(num_samples=3, batching=batching, seed=0, steps=1).batch(0)
    assert batch.sample_hash == hashlib.blake2b(struct.pack("<3q", 0, 1, 2), digest_size=8).hexdigest()
    assert len(batch.sample_hash) == 16


def test_the_micro_batch_left_out_is_chosen_once():
    batches = Batches(num_samples=100, batching=Batching(global_batch=20), seed=0, steps=1)
    assert batches.micro_batch == batches.batching.micro_batch == batches.batch(0).micro_batch == 3


def test_nobody_changes_the_ids_of_a_step():
    batch = Batches(num_samples=9, batching=Batching(global_batch=4), seed=0, steps=1).batch(0)
    for ids in (batch.ids, batch.epochs, batch.micro(0).ids):
        with pytest.raises(ValueError, match="read-only"):
            ids[0] = 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 0}, "the data set has no samples"),
        ({"steps": None}, "neither is given. Choose one"),
        ({"epochs": 1}, "both are given. Choose one"),
        ({"steps": -1}, "steps is -1"),
        ({"steps": None, "epochs": -2}, "epochs is -2"),
        (
            {"batching": Batching(global_batch=9, last="drop")},
            "no step would ever be taken. Lower global_batch to 8",
        ),
    ],
)
def test_runs_without_samples_steps_or_end_are_refused(change, message):
    settings = {"num_samples": 8, "batching": Batching(global_batch=4), "seed": 0, "steps": 5, **change}
    with pytest.raises(ConfigError, match=message):
        Batches(**settings)


@pytest.mark.parametrize("step", [-1, 5])
def test_a_step_beyond_the_run_is_refused(step):
    batches = Batches(num_samples=8, batching=Batching(global_batch=4), seed=0, steps=5)
    with pytest.raises(ConfigError, match=f"step {step} was asked for, but the run has 5 steps"):
        batches.batch(step)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_micro_batch_beyond_the_step_is_refused(index):
    batch = Batches(num_samples=8, batching=Batching(global_batch=4, micro_batch=2), seed=0, steps=5).batch(3)
    with pytest.raises(ConfigError, match=f"micro-batch {index} of step 3"):
        batch.micro(index)
