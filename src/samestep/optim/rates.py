"""Learning rates of parameter groups, moved by applied updates only."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any, Protocol, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.errors import ConfigError

ScheduleLike = Callable[[Any], Any]  # update -> multiplier, or optimizer -> torch scheduler


class Rates(Protocol):
    """What sets the rates before an update and moves on after it."""

    def prepare(self, update: int) -> None:
        """Set the rates of the update with this number, counted from 0."""

    def advance(self) -> None:
        """Take note that the update was applied."""

    def resume(self, update: int) -> None:
        """Come to where a run stands after so many updates; called before the first one, once."""


@final
class _Fixed:
    def prepare(self, update: int) -> None:
        """Leave the rates as they are."""

    def advance(self) -> None:
        """Leave the rates as they are."""

    def resume(self, update: int) -> None:
        """Leave the rates as they are."""


@final
class _Multiplied:
    def __init__(self, optimizer: Optimizer, schedule: Callable[[int], float]) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._base = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]

    def prepare(self, update: int) -> None:
        multiplier = float(self._schedule(update))
        if not math.isfinite(multiplier):
            raise ConfigError(
                f"schedule({update}) returned {multiplier!r}; it must be a finite multiple of the base rate."
            )
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base * multiplier)
            else:
                group["lr"] = base * multiplier

    def advance(self) -> None:
        """Need nothing: the rate is a function of the update."""

    def resume(self, update: int) -> None:
        """Need nothing: the rate is a function of the update."""


@final
class _Stepped:
    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler

    def prepare(self, update: int) -> None:
        """Leave the rates: the scheduler has set them."""

    def advance(self) -> None:
        self._scheduler.step()

    def resume(self, update: int) -> None:
        """Step as often as the run did: what a scheduler keeps is its own affair, and need not be stored."""
        with warnings.catch_warnings():
            # It misses the optimizer's own steps, which were taken by the run that was stopped.
            warnings.filterwarnings(
                "ignore", message="Detected call of `lr_scheduler.step", category=UserWarning
            )
            for _ in range(update):
                self._scheduler.step()


def make_rates(optimizer: Optimizer, schedule: ScheduleLike | None) -> Rates:
    """Turn the user's schedule into rates of this optimizer.

    A schedule is asked for update 0 first; if that gives no number it is given the optimizer and must return
    a torch scheduler. Raises ConfigError when it is neither.
    """
    if schedule is None:
        return _Fixed()
    try:
        first = schedule(0)
    except Exception as error:  # a torch scheduler's constructor refuses 0 in its own way
        return _Stepped(_scheduler(optimizer, schedule, error))
    if not isinstance(first, Real):
        raise ConfigError(
            f"schedule(0) returned {first!r}. A schedule maps an update to a multiple of the base rate, or "
            "an optimizer to a torch scheduler."
        )
    return _Multiplied(optimizer, schedule)


def _scheduler(optimizer: Optimizer, schedule: ScheduleLike, first_error: Exception) -> LRScheduler:
    try:
        made = schedule(optimizer)
    except Exception as error:
        raise ConfigError(
            f"the schedule fails for update 0 ({type(first_error).__name__}: {first_error}) and for the "
            f"optimizer ({type(error).__name__}: {error}). It must map an update to a multiple of the base "
            "rate, or an optimizer to a torch scheduler."
        ) from error
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError("ReduceLROnPlateau needs a metric at each step; use a schedule over updates.")
    if not isinstance(made, LRScheduler):
        raise ConfigError(f"the schedule returned {made!r} for the optimizer, not a torch scheduler.")
    return made


def learning_rate(optimizer: Optimizer) -> float:
    """Return the current rate of the first parameter group."""
    return float(optimizer.param_groups[0]["lr"])
