"""A curve over steps that stays small however long the run: neighbours merge, extremes stay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, final

MOST_BUCKETS: Final = 1000


@dataclass(kw_only=True, slots=True)
class Bucket:
    """Neighbouring values; all of them finite."""

    first: int
    last: int
    low: float
    high: float
    total: float
    count: int


@final
class Curve:
    """Keep least, greatest and mean value of runs of steps: 500 to 1000 runs once there are so many values.

    Law: no extreme value is lost, and reading a run in pieces gives what reading it at once gives. A value
    whose step is not above the last one takes the curve back to there: the run went on from a checkpoint.
    Values that are not finite leave a gap and are counted.
    """

    def __init__(self) -> None:
        self._buckets: list[Bucket] = []
        self._width = 1  # steps in a bucket
        self._last_step = -1
        self.first: float | None = None
        self.last: float | None = None
        self.not_finite = 0
        self.first_not_finite: int | None = None

    def __bool__(self) -> bool:
        return bool(self._buckets) or self.not_finite > 0

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        if step <= self._last_step:
            self._go_back(step)
        self._last_step = step
        if not math.isfinite(value):
            self.not_finite += 1
            self.first_not_finite = step if self.first_not_finite is None else self.first_not_finite
            return
        self.last = value
        if self.first is None:
            self.first = value
        tail = self._buckets[-1] if self._buckets else None
        if tail is not None and tail.first // self._width == step // self._width:
            tail.last = step
            tail.low = value if value < tail.low else tail.low  # min() takes thrice the time
            tail.high = value if value > tail.high else tail.high
            tail.total += value
            tail.count += 1
            return
        self._buckets.append(Bucket(first=step, last=step, low=value, high=value, total=value, count=1))
        while len(self._buckets) > MOST_BUCKETS:
            self._width *= 2
            self._buckets = _merged(self._buckets, self._width)

    def numbers(self, most: int = MOST_BUCKETS) -> dict[str, Any]:
        """Return lists of x and y (the mean), and of lo and hi where a point stands for several values."""
        width, buckets = self._width, self._buckets
        while len(buckets) > max(2, most):
            width *= 2
            buckets = _merged(buckets, width)
        values: dict[str, Any] = {
            "x": [(bucket.first + bucket.last) / 2 for bucket in buckets],
            "y": [short(bucket.total / bucket.count) for bucket in buckets],
        }
        if any(bucket.count > 1 for bucket in buckets):
            values["lo"] = [short(bucket.low) for bucket in buckets]
            values["hi"] = [short(bucket.high) for bucket in buckets]
        return values

    def summary(self) -> dict[str, Any]:
        """Return first, last, least and greatest value, and the values that are not finite."""
        return {
            "first": None if self.first is None else short(self.first),
            "last": None if self.last is None else short(self.last),
            "low": short(min((bucket.low for bucket in self._buckets), default=math.nan)),
            "high": short(max((bucket.high for bucket in self._buckets), default=math.nan)),
            "not_finite": self.not_finite,
            "first_not_finite": self.first_not_finite,
        }

    def _go_back(self, step: int) -> None:
        while self._buckets and self._buckets[-1].first >= step:
            self._buckets.pop()


def short(value: float) -> float | None:
    """Return a value with six digits, which is more than a screen shows; None where it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _merged(buckets: list[Bucket], width: int) -> list[Bucket]:
    merged: list[Bucket] = []
    for bucket in buckets:
        if merged and merged[-1].first // width == bucket.first // width:
            tail = merged[-1]
            merged[-1] = Bucket(
                first=tail.first,
                last=bucket.last,
                low=min(tail.low, bucket.low),
                high=max(tail.high, bucket.high),
                total=tail.total + bucket.total,
                count=tail.count + bucket.count,
            )
        else:
            merged.append(bucket)
    return merged
