"""Mixtures: each source's samples once in each of its own epochs, in proportion to the weights."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.config import Batching
from samestep.data.global_batch import Batches
from samestep.data.mixture import Mixture, StreamMixture, shares
from samestep.errors import ConfigError


class Numbers:
    def __init__(self, first: int, num_samples: int) -> None:
        self._first, self._num_samples = first, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> int:
        return self._first + index


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[int], list[float], int, bool]:
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    weights = draw(
        st.lists(st.sampled_from([0.1, 0.5, 1, 2, 3, 7.25]), min_size=len(lengths), max_size=len(lengths))
    )
    return lengths, weights, draw(st.integers(0, 5)), draw(st.booleans())


@settings(deadline=None, max_examples=100)
@given(mixtures())
def test_each_source_is_walked_once_in_each_of_its_epochs(drawn):
    lengths, weights, seed, shuffle = drawn
    mixture = Mixture([Numbers(1000 * n, length) for n, length in enumerate(lengths)], weights)
    placing = mixture.placing(seed=seed, shuffle=shuffle)
    period = sum(mixture.shares)
    places = np.arange(-(-7 * len(mixture) // period) * period)  # whole blocks
    epochs, inside = np.divmod(places, len(mixture))
    ids, visits = placing.visits(epochs, inside)
    pairs = Counter(zip(ids.tolist(), visits.tolist(), strict=True))
    assert max(pairs.values()) == 1
    blocks = len(places) // period
    for number, length in enumerate(lengths):
        first = sum(lengths[:number])
        own = [(i - first, e) for i, e in pairs if first <= i < first + length]
        walked = blocks * mixture.shares[number]
        assert len(own) == walked
        complete = [pair for pair in own if pair[1] < walked // length]
        assert len(complete) == walked // length * length


@settings(deadline=None, max_examples=50)
@given(mixtures(), st.integers(1, 9), st.data())
def test_any_step_of_a_mixture_is_found_at_random_access(drawn, size, data):
    lengths, weights, seed, shuffle = drawn
    mixture = Mixture([Numbers(1000 * n, length) for n, length in enumerate(lengths)], weights)
    batches = Batches(
        num_samples=len(mixture),
        batching=Batching(global_batch=size, shuffle=shuffle),
        seed=seed,
        epochs=3,
        placing=mixture.placing(seed=seed, shuffle=shuffle),
    )
    walked = list(batches.starting_at(0))
    step = data.draw(st.integers(0, len(walked) - 1))
    assert batches.batch(step).ids.tolist() == walked[step].ids.tolist()
    assert batches.batch(step).epochs.tolist() == walked[step].epochs.tolist()


def test_sample_i_is_that_of_the_sources_joined():
    mixture = Mixture([Numbers(0, 3), Numbers(100, 2)], [1, 1])
    assert [mixture[i] for i in range(5)] == [0, 1, 2, 100, 101]
    with pytest.raises(IndexError):
        mixture[5]


def test_shares_are_exact_or_nearest():
    assert shares([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert shares([5]) == [1]
    assert shares([1e-9, 1]) == [1, 4096]
    for weights in ([0], [-1.0, 2], [float("nan")], ["a"]):
        with pytest.raises(ConfigError, match="the weight of source 0"):
            shares(weights)


def test_mixtures_of_the_wrong_kind_are_refused():
    with pytest.raises(ConfigError, match="2 sources was given 1 weights"):
        Mixture([[1], [2]], [1])
    with pytest.raises(ConfigError, match="source 1 of the mixture has no samples"):
        Mixture([[1], []], [1, 1])
    with pytest.raises(ConfigError, match="source 0 of the mixture is a list, and no stream"):
        StreamMixture([[1]], [1])


class Counting:
    def __init__(self, first: int, num_samples: int) -> None:
        self.first, self.num_samples = first, num_samples

    def __iter__(self):
        return iter(range(self.first, self.first + self.num_samples))


def test_a_mixture_of_streams_goes_on_from_its_state():
    def make() -> StreamMixture:
        return StreamMixture([Counting(0, 7), Counting(100, 50)], [3, 1], seed=5)

    whole = iter(make())
    given = [next(whole) for _ in range(100)]
    assert Counter(sample < 100 for sample in given) == {True: 75, False: 25}
    assert [sample for sample in given if sample < 100] == [i % 7 for i in range(75)]
    for place in (0, 1, 33, 99):
        before = iter(make())
        for _ in range(place):
            next(before)
        after = make()
        after.load_state(before.state())
        rest = iter(after)
        assert [next(rest) for _ in range(100 - place)] == given[place:]
    with pytest.raises(ConfigError, match="source 1 of the mixture has no samples"):
        list(StreamMixture([Counting(0, 1), Counting(0, 0)], [1, 1]))
