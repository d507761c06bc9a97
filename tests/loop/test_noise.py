"""The noise of the gradient: unbiased for unequal micro-batches, with the same bits on any ranks."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import Parameter

from samestep.data.assign import assign
from samestep.loop.ballot import NUM_COLUMNS, Sums
from samestep.loop.noise import GradientNoise, noise_of, with_noise
from samestep.numerics.fold import Fold, Node
from samestep.sync.collector import Collector
from samestep.sync.layout import lay_out
from samestep.sync.partial_sums import plan_ordered


def estimate(sums: np.ndarray, weights: np.ndarray, *, unit: float = 1.0) -> GradientNoise | None:
    """Estimate from the sums of all micro-batches, `unit` times what was added up, as one rank does."""
    weight = float(weights.sum())
    row = np.array([[0.0] * NUM_COLUMNS, [(sums**2).sum() / unit**2, (weights**2).sum(), 0.0]])
    norm = float(np.linalg.norm(sums.sum(0))) / weight
    return noise_of(row, weight=weight, grad_norm=norm, unit=unit, samples=int(weight))


def test_equal_micro_batches_give_the_estimate_of_the_paper() -> None:
    draw = np.random.default_rng(0)
    means = draw.normal(1.0, 1.0, size=(4, 3))  # of 4 micro-batches with 8 samples each
    small, big = 8, 32
    found = estimate(means * small, np.full(4, 8.0))
    assert found is not None
    square_small, square_big = (means**2).sum(1).mean(), (means.mean(0) ** 2).sum()
    signal = (big * square_big - small * square_small) / (big - small)
    trace = (square_small - square_big) / (1 / small - 1 / big)
    assert found.signal == pytest.approx(signal, rel=1e-12)
    assert found.trace == pytest.approx(trace, rel=1e-12)


def test_unequal_micro_batches_are_not_biased() -> None:
    draw = np.random.default_rng(1)
    true_mean, deviation = np.array([0.6, -0.8, 0.0]), np.array([1.0, 2.0, 0.5])
    weights = np.array([1.0, 13.0, 2.0, 5.0, 40.0])
    rounds = 20_000
    noise = draw.normal(size=(rounds, len(weights), 3)) * deviation * np.sqrt(weights)[:, None]
    found = [estimate(sums, weights) for sums in weights[:, None] * true_mean + noise]
    signals = np.array([one.signal for one in found if one])
    traces = np.array([one.trace for one in found if one])
    for values, wanted in ((signals, 1.0), (traces, (deviation**2).sum())):
        error = values.std() / math.sqrt(rounds)
        assert abs(values.mean() - wanted) < 4 * error  # four standard errors of a fixed draw


def test_the_loss_scale_and_division_before_the_sum_are_taken_out() -> None:
    draw = np.random.default_rng(2)
    sums, weights = draw.normal(size=(3, 4)), np.array([2.0, 3.0, 4.0])
    plain = estimate(sums, weights)
    assert plain is not None
    for unit in (2.0**-10, 9.0):
        found = estimate(sums, weights, unit=unit)
        assert found is not None
        assert astuple(found) == pytest.approx(astuple(plain), rel=1e-9)  # the unit is divided out in floats


@pytest.mark.parametrize(
    ("weight", "grad_norm", "added", "squared"),
    [
        (0.0, None, 0.0, 0.0),
        (4.0, None, 1.0, 8.0),
        (4.0, math.inf, 1.0, 8.0),
        (4.0, 1.0, math.nan, 8.0),
        (4.0, 1.0, 16.0, 16.0),  # one micro-batch
    ],
)
def test_what_means_nothing_gives_no_estimate(
    weight: float, grad_norm: float | None, added: float, squared: float
) -> None:
    row = np.array([[added, squared, 0.0]])
    assert noise_of(row, weight=weight, grad_norm=grad_norm, unit=1.0, samples=4) is None


@settings(max_examples=50, deadline=None)
@given(num_leaves=st.integers(1, 20), world_size=st.integers(1, 6), num_terms=st.integers(1, 3))
def test_the_row_of_noise_travels_with_the_loss_sums(
    num_leaves: int, world_size: int, num_terms: int
) -> None:
    draw = np.random.default_rng(num_leaves)
    rows = draw.normal(size=(num_leaves, num_terms, NUM_COLUMNS))
    squares, weights = draw.random(num_leaves).tolist(), draw.random(num_leaves).tolist()

    def counted(world_size: int) -> Sums:
        total: Fold[Sums] = Fold(num_leaves)
        for run in assign(num_leaves, [1.0] * world_size):
            sums: Fold[Sums] = Fold(num_leaves)
            for leaf in run:
                sums.add(Node(0, leaf), rows[leaf])
            own = {leaf: squares[leaf] for leaf in run}
            joined = with_noise(sums, own, {leaf: weights[leaf] for leaf in run}, num_leaves)
            assert [node for node, _ in joined.partial()] == [node for node, _ in sums.partial()]
            for node, value in joined.partial():
                total.add(node, value)
        return total.total()

    alone = counted(1)
    assert alone.shape == (num_terms + 1, NUM_COLUMNS)
    assert counted(world_size).tobytes() == alone.tobytes()
    assert alone[-1, 1] == pytest.approx(sum(weight**2 for weight in weights))


def test_the_collector_measures_each_leaf_before_it_is_added_up() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    beside = Parameter(torch.randn(3, dtype=torch.complex64))
    named = [*model.named_parameters(), ("beside", beside)]
    inputs = torch.randn(6, 4, 5)

    def leaf_loss(leaf: int) -> Any:
        loss = model(inputs[leaf]).pow(2).sum()
        return loss + (beside * (1 + 2j)).abs().pow(2).sum() if leaf % 2 else loss

    wanted = []
    for leaf in range(6):
        leaf_loss(leaf).backward()
        gradients = [parameter.grad for _, parameter in named if parameter.grad is not None]
        wanted.append(sum(float(g.abs().double().pow(2).sum()) for g in gradients))
        for _, parameter in named:
            parameter.grad = None

    def measured(run: range) -> dict[int, float]:
        layout = lay_out(named, world_size=1, whole=False)
        collector = Collector(layout, [parameter for _, parameter in named])
        collector.measure_leaves()
        for _ in range(2):
            collector.begin(plan_ordered(run, 6), lambda bucket: None)
            for leaf in run:
                with collector.leaf(leaf):
                    leaf_loss(leaf).backward()
            collector.end()
        collector.close()
        return collector.squares()

    whole = measured(range(6))
    assert list(whole.values()) == pytest.approx(wanted, rel=1e-6)
    assert measured(range(2)) | measured(range(2, 3)) | measured(range(3, 6)) == whole


@pytest.mark.parametrize("numel", [1, 1000, 70_000, 102_400])
@pytest.mark.parametrize("sums", [None, torch.bfloat16])
def test_gradients_of_any_size_are_measured(numel: int, sums: torch.dtype | None) -> None:
    torch.manual_seed(numel)
    p, gradient = Parameter(torch.zeros(numel)), torch.randn(numel)
    collector = Collector(lay_out([("p", p)], world_size=1, whole=False, sums=sums), [p])
    collector.measure_leaves()
    collector.begin(plan_ordered(range(1), 1), lambda bucket: None)
    with collector.leaf(0):
        (p * gradient).sum().backward()
    counted = gradient.to(sums or torch.float32).double()
    assert collector.squares()[0] == pytest.approx(float(counted.square().sum()), rel=1e-6)


def test_nothing_is_measured_where_nobody_asks() -> None:
    p = Parameter(torch.ones(3))
    collector = Collector(lay_out([("p", p)], world_size=1, whole=False), [p])
    collector.begin(plan_ordered(range(1), 1), lambda bucket: None)
    with collector.leaf(0):
        p.sum().backward()
    assert collector.squares() == {}
