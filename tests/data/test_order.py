"""The order of an epoch: a permutation for every size, another one in every epoch, without bias."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.order import MAX_SAMPLES, SORTED_UP_TO, Order
from samestep.errors import ConfigError

# Chi-square over k cells has mean k-1 and variance 2(k-1). With pinned seeds the tests below are not left to
# chance; six standard deviations is what a fair order passes and a biased one does not.
FAIR_WITHIN = 6.0


def whole(order: Order, epoch: int) -> list[int]:
    places = np.arange(order.num_samples)
    return order.ids(np.full_like(places, epoch), places).tolist()


def deviations(counts: Counter[object], cells: int) -> float:
    """Return by how many standard deviations the counts are less even than chance makes them."""
    expected = counts.total() / cells
    square = sum((count - expected) ** 2 for count in counts.values()) / expected
    square += (cells - len(counts)) * expected
    return (square - (cells - 1)) / math.sqrt(2 * (cells - 1))


def test_every_small_size_is_permuted():
    for num_samples in range(1, 301):
        assert sorted(whole(Order(num_samples=num_samples, seed=3), 5)) == list(range(num_samples))


@pytest.mark.parametrize(
    "num_samples", [SORTED_UP_TO - 1, SORTED_UP_TO, SORTED_UP_TO + 1, 1089, 4096, 4097, 9973]
)
def test_every_size_around_a_grid_is_permuted(num_samples):
    assert sorted(whole(Order(num_samples=num_samples, seed=0), 1)) == list(range(num_samples))


@settings(deadline=None)  # other work on the machine is no failure
@given(
    num_samples=st.integers(SORTED_UP_TO + 1, MAX_SAMPLES) | st.integers(1, 40).map(lambda power: 2**power),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**31),
    data=st.data(),
)
def test_no_sample_stands_at_two_places_of_a_large_set(num_samples, seed, epoch, data):
    some = data.draw(st.sets(st.integers(0, num_samples - 1), min_size=1, max_size=200))
    places = np.array(sorted(some | {0, num_samples - 1}))
    ids = Order(num_samples=num_samples, seed=seed).ids(np.full_like(places, epoch), places)
    assert ids.dtype == np.int64
    assert len(set(ids.tolist())) == len(places)
    assert 0 <= ids.min() <= ids.max() < num_samples


@settings(deadline=None)
@given(
    num_samples=st.integers(1, 3 * SORTED_UP_TO),
    epochs=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    data=st.data(),
)
def test_a_place_has_its_sample_whatever_is_asked_beside_it(num_samples, epochs, data):
    places = [data.draw(st.integers(0, num_samples - 1)) for _ in epochs]
    order = Order(num_samples=num_samples, seed=9)
    together = order.ids(np.array(epochs), np.array(places)).tolist()
    alone = [
        order.ids(np.array([epoch]), np.array([place])).item()
        for epoch, place in zip(epochs, places, strict=True)
    ]
    assert together == alone


@pytest.mark.parametrize("num_samples", [50, 5000])
def test_epochs_and_seeds_have_their_own_orders(num_samples):
    orders = [
        tuple(whole(Order(num_samples=num_samples, seed=seed), epoch))
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    ]
    assert len(set(orders)) == 6
    # Two fair orders agree at one place on average, whatever their size.
    assert all(sum(a == b for a, b in zip(orders[0], other, strict=True)) < 8 for other in orders[1:])


def test_without_shuffling_a_place_is_an_id():
    order = Order(num_samples=7, seed=3, shuffle=False)
    assert whole(order, 0) == whole(order, 9) == list(range(7))


def test_no_places_give_no_ids():
    nothing = np.array([], dtype=np.int64)
    assert Order(num_samples=5, seed=0).ids(nothing, nothing).tolist() == []


@pytest.mark.parametrize("num_samples", [2, 3, 4])
def test_every_permutation_of_a_tiny_set_is_as_likely(num_samples):
    counts = Counter(tuple(whole(Order(num_samples=num_samples, seed=1), epoch)) for epoch in range(3000))
    assert set(counts) == set(permutations(range(num_samples)))
    assert deviations(counts, math.factorial(num_samples)) < FAIR_WITHIN


@pytest.mark.parametrize("num_samples", [17, 64, 1000, 1025, 1089, 4096])
def test_a_sample_lands_anywhere_with_the_same_chance(num_samples):
    order, epochs = Order(num_samples=num_samples, seed=1), np.arange(40_000)
    if num_samples <= SORTED_UP_TO:
        epochs = epochs[: 4_000_000 // num_samples]
    for place in (0, 1, num_samples - 1):
        ids = order.ids(epochs, np.full_like(epochs, place))
        assert deviations(Counter(ids.tolist()), num_samples) < FAIR_WITHIN


@pytest.mark.parametrize("num_samples", [64, 1025, 4096])
@pytest.mark.parametrize("apart", [1, 32, 33, 63])
def test_two_places_know_nothing_of_each_other(num_samples, apart):
    order, epochs = Order(num_samples=num_samples, seed=1), np.arange(40_000)
    one, other = (order.ids(epochs, np.full_like(epochs, place)) for place in (0, apart))
    differences = Counter(((other - one) % num_samples).tolist())
    assert 0 not in differences
    assert deviations(differences, num_samples - 1) < FAIR_WITHIN


@pytest.mark.parametrize("num_samples", [0, -1, MAX_SAMPLES + 1])
def test_sizes_without_an_order_are_refused(num_samples):
    with pytest.raises(ConfigError, match=str(num_samples)):
        Order(num_samples=num_samples, seed=0)


def test_the_order_is_pinned():
    # Changing these changes the bits of every run: say so in the changelog.
    assert whole(Order(num_samples=8, seed=0), 0) == [7, 3, 4, 1, 2, 6, 5, 0]
    places = np.arange(4)
    assert Order(num_samples=10**6, seed=0).ids(np.zeros_like(places), places).tolist() == [
        614401,
        518364,
        981024,
        794829,
    ]
