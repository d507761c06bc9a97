"""Which rank computes which micro-batches of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from samestep.errors import ConfigError


def assign(num_micro_batches: int, speeds: Sequence[float]) -> list[range]:
    """Split the micro-batches into one contiguous run per rank, in proportion to speed.

    Law: the runs cover 0..num_micro_batches-1 once. The split never changes the result of a step. Run k
    ends at the share of the first k speeds, rounded to the nearest whole micro-batch (halves go up). The
    arithmetic is exact, so ranks with the same speeds come to the same split; no rank is more than one
    micro-batch away from its share, and a rank that grows faster never gets less. Speed 0 gets nothing.

    Raises ConfigError where the speeds have no shares: none, negative, not finite, or all zero.

    >>> assign(6, [1.0, 2.0])
    [range(0, 2), range(2, 6)]
    >>> assign(2, [1.0, 0.0, 1.0])
    [range(0, 1), range(1, 1), range(1, 2)]
    """
    if num_micro_batches < 0:
        raise ConfigError(f"{num_micro_batches} micro-batches cannot be shared out: give 0 or more.")
    wrong = [speed for speed in speeds if not (math.isfinite(speed) and speed >= 0)]
    if wrong or not any(speeds):
        raise ConfigError(
            f"the speeds of the ranks are {list(speeds)}: micro-batches are shared out in proportion, so "
            "each must be a finite number, 0 or more, and one at least above 0. Use 1.0 for each to share "
            "evenly."
        )
    reached = [0, *accumulate(_whole(speeds))]
    total = reached[-1]
    ends = [(2 * num_micro_batches * part + total) // (2 * total) for part in reached]
    return [range(start, end) for start, end in pairwise(ends)]


def _whole(speeds: Sequence[float]) -> list[int]:
    """Return integers in exactly the proportion of the speeds."""
    ratios = [float(speed).as_integer_ratio() for speed in speeds]
    common = max(below for _, below in ratios)  # all are powers of two
    return [above * (common // below) for above, below in ratios]
