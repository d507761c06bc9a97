"""The noise of the gradient, from the micro-batches' gradients that a step adds up anyway.

Note [noise of unequal micro-batches]: this is the estimator of McCandlish et al. 2018, appendix A.1, for
micro-batches of any weights. Micro-batch i has the gradient sum s_i and the weight w_i, W is the sum of the
weights, and G the true mean gradient. Units of weight are independent draws with covariance C, so that

    E |s_i|^2     = w_i^2 |G|^2 + w_i tr C
    E |sum s_i|^2 = W^2 |G|^2 + W tr C

With A = sum |s_i|^2, Q = sum w_i^2 and N = |sum s_i|^2 that is solved by

    |G|^2 = (N - A) / (W^2 - Q)        tr C = (A - Q |G|^2) / W

Both are unbiased, and |G|^2 may come out negative in one step. For equal weights they are the paper's. The
scale tr C / |G|^2 counts weight: samples, or tokens where each token has a weight of 1. Real-valued weights
are taken as if a weight of 2 were two draws. A and Q are folded in leaf order with the loss sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from samestep.data.global_batch import GlobalBatch
from samestep.loop.ballot import NUM_COLUMNS, Sums
from samestep.loop.leaf import LossSums
from samestep.numerics.fold import Fold, Node
from samestep.sync.collector import Collector


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class GradientNoise:
    """One step's estimates, the same on every rank; see Note [noise of unequal micro-batches]."""

    signal: float  # |G|^2; noisy, and sometimes negative
    trace: float  # tr C, for a unit of weight
    weight: float  # of the global batch
    samples: int  # in it


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StepDetails:
    """What callbacks may ask of a step beyond its report, the same on every rank."""

    ids: tuple[int, ...] = ()  # all samples of the step, in their order
    bad_ids: tuple[int, ...] = ()  # those of the first micro-batch whose loss is not finite
    noise: GradientNoise | None = None  # where it is measured and can be


@final
class NoiseMeter:
    """Measures the noise of each step's gradient, beside its loss sums."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        collector.measure_leaves()

    def joined(self, sums: LossSums, batch: GlobalBatch) -> Fold[Sums]:
        """Return this rank's loss sums with one row more, for the ballot: see `with_noise`."""
        squares = self._collector.squares()
        weights = {
            leaf: float(len(batch.micro(leaf).ids)) if sums.are_divided else sums.weights[leaf]
            for leaf in squares
        }
        return with_noise(sums.fold, squares, weights, batch.num_micro_batches)

    def estimate(
        self, counted: Sums, sums: LossSums, batch: GlobalBatch, grad_norm: float | None
    ) -> GradientNoise | None:
        """Return the estimates from what the ballot counted, the row of noise at its end."""
        weight = float(batch.num_samples) if sums.are_divided else float(counted[0, 1])
        unit = (weight if sums.are_divided else 1.0) / sums.multiplier
        samples = batch.num_samples
        return noise_of(counted, weight=weight, grad_norm=grad_norm, unit=unit, samples=samples)


def with_noise(
    sums: Fold[Sums], squares: Mapping[int, float], weights: Mapping[int, float], num_leaves: int
) -> Fold[Sums]:
    """Return the loss sums with one row more, as if it were a loss term: (A, Q, 0) of this rank's leaves.

    `squares` and `weights` are of the leaves of this rank: those that `sums` was made of.
    """
    rows: Fold[Sums] = Fold(num_leaves)
    for leaf, square in squares.items():
        row = np.zeros((1, NUM_COLUMNS), dtype=np.float64)
        row[0, :2] = square, weights[leaf] ** 2
        rows.add(Node(0, leaf), row)
    joined: Fold[Sums] = Fold(num_leaves)
    for (node, above), (_, below) in zip(sums.partial(), rows.partial(), strict=True):
        joined.add(node, np.vstack([above, below]))
    return joined


def noise_of(
    sums: Sums, *, weight: float, grad_norm: float | None, unit: float, samples: int
) -> GradientNoise | None:
    """Return the estimates from the last row of the counted sums; None where they mean nothing.

    `unit` times a gradient as it was added up is the sum over the micro-batch: 1 / loss scale multiplier,
    and `weight` times that for several loss terms, which are divided before they are added. `weight` and the
    leaves' weights are those of the loss, or the numbers of samples for several terms. `grad_norm` is that
    of the mean.
    """
    if grad_norm is None or not math.isfinite(grad_norm) or not weight > 0:
        return None
    added, squared_weights = float(sums[-1, 0]) * unit**2, float(sums[-1, 1])
    room = weight**2 - squared_weights
    if not math.isfinite(added) or not room > 1e-12 * weight**2:  # one micro-batch has all the weight
        return None
    signal = ((grad_norm * weight) ** 2 - added) / room
    trace = (added - squared_weights * signal) / weight
    return GradientNoise(signal=signal, trace=trace, weight=weight, samples=samples)
