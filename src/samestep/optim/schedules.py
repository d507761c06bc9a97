"""Learning-rate schedules: functions of the number of applied updates, never of ranks or micro-batches.

Each function returns a schedule, which maps an update (0 is the first) to a multiple of each parameter
group's base rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from samestep.errors import ConfigError

Schedule = Callable[[int], float]


def constant(*, warmup: int = 0) -> Schedule:
    """Rise linearly over `warmup` updates, then stay at 1.

    >>> [constant(warmup=2)(update) for update in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """
    _check(warmup=warmup)
    return lambda update: _rise(update, warmup)


def linear(*, updates: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Rise over `warmup` updates, then fall in a line to `floor` at the end of `updates`."""
    _check(warmup=warmup, updates=updates)

    def multiplier(update: int) -> float:
        return _rise(update, warmup) * _between(1.0, floor, _progress(update, warmup, updates))

    return multiplier


def warmup_cosine(*, updates: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Rise over `warmup` updates, then fall along a half cosine to `floor` at the end of `updates`."""
    _check(warmup=warmup, updates=updates)

    def multiplier(update: int) -> float:
        half_wave = 0.5 * (1.0 - math.cos(math.pi * _progress(update, warmup, updates)))
        return _rise(update, warmup) * _between(1.0, floor, half_wave)

    return multiplier


def inverse_sqrt(*, warmup: int) -> Schedule:
    """Rise over `warmup` updates, then fall as 1 / sqrt(update), continuously."""
    _check(warmup=warmup)
    if warmup == 0:
        raise ConfigError(
            "schedule inverse_sqrt: warmup is 0; it sets the scale of the decay, use 1 or more."
        )
    return lambda update: min(_rise(update, warmup), math.sqrt(warmup / max(update + 1, 1)))


def wsd(*, updates: int, warmup: int = 0, decay: int, floor: float = 0.0) -> Schedule:
    """Warm up, stay at 1, and fall in a line to `floor` over the last `decay` of `updates`."""
    _check(warmup=warmup, updates=updates, decay=decay)
    if warmup + decay > updates:
        raise ConfigError(
            f"schedule wsd: warmup {warmup} and decay {decay} do not fit into {updates} updates."
        )

    def multiplier(update: int) -> float:
        falling = _progress(update, updates - decay, updates)
        return _rise(update, warmup) * _between(1.0, floor, falling)

    return multiplier


def _rise(update: int, warmup: int) -> float:
    return min(1.0, (update + 1) / warmup) if warmup else 1.0


def _progress(update: int, start: int, stop: int) -> float:
    return min(1.0, max(0.0, (update - start) / max(1, stop - start)))


def _between(first: float, last: float, share: float) -> float:
    return first + (last - first) * share


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 0 or (name == "updates" and value == 0):
            raise ConfigError(f"schedule: {name} is {value}; it counts updates and must be positive.")
