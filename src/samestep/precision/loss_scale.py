"""The dynamic loss scale: a pure function of its state and the verdict on a step.

Every rank holds the same state and hears the same verdict, so nothing needs to be agreed. The scale is a
power of two: taking it out again is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Literal

from samestep.errors import ConfigError

LARGEST = 2.0**64  # far above any useful scale; keeps the scale itself finite in float32


class Verdict(Enum):
    """What a step came to, as far as the loss scale is concerned."""

    GOOD = auto()
    OVERFLOW = auto()
    EMPTY = auto()  # no weight: says nothing about the scale


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleRule:
    """How a scale grows and shrinks."""

    growth_after: int  # good steps in a row
    overflows: int  # this many overflows spend the credit, then each one halves the scale
    floor: float
    initial: float = 2.0**16


RULES = {
    # torch.amp.GradScaler: halve at every overflow, double after 2000 good steps.
    "torch": ScaleRule(growth_after=2000, overflows=1, floor=2.0**-24),
    # DeepSpeed's DynamicLossScaler: the first overflow after a growth only skips the step.
    "hysteresis": ScaleRule(growth_after=1000, overflows=2, floor=1.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """The state. `scale` is that of a mean loss; `multiplier` that of the sum samestep differentiates."""

    scale: float
    good_steps: int
    credit: int  # overflows until the scale is halved
    sum_exponent: int  # the last weight, as a power of two: the sum is that much larger than the mean

    @property
    def multiplier(self) -> float:
        """The power of two to multiply a micro-batch's loss sum with."""
        return math.ldexp(self.scale, -self.sum_exponent)


def first_scale(rule: ScaleRule, *, expected_weight: float) -> LossScale:
    """Return the state of a new run."""
    return LossScale(
        scale=rule.initial,
        good_steps=0,
        credit=rule.overflows,
        sum_exponent=_exponent(expected_weight),
    )


def next_scale(rule: ScaleRule, state: LossScale, verdict: Verdict, *, weight: float) -> LossScale:
    """Return the state after a step of this weight.

    >>> rule = RULES["torch"]
    >>> next_scale(rule, first_scale(rule, expected_weight=1.0), Verdict.OVERFLOW, weight=1.0).scale
    32768.0
    """
    if verdict is Verdict.EMPTY:
        return state
    exponent = _exponent(weight)
    if verdict is Verdict.OVERFLOW:
        if state.credit > 1:
            return replace(state, credit=state.credit - 1, good_steps=0, sum_exponent=exponent)
        smaller = max(rule.floor, state.scale / 2)
        return replace(state, scale=smaller, good_steps=0, sum_exponent=exponent)
    good = state.good_steps + 1
    if good < rule.growth_after:
        return replace(state, good_steps=good, sum_exponent=exponent)
    larger = min(LARGEST, state.scale * 2)
    return LossScale(scale=larger, good_steps=0, credit=rule.overflows, sum_exponent=exponent)


def rule_named(name: Literal["torch", "hysteresis"]) -> ScaleRule:
    """Return a preset; ConfigError for an unknown name."""
    if name not in RULES:
        raise ConfigError(f"precision.loss_scale is {name!r}. Known presets: {', '.join(RULES)}.")
    return RULES[name]


def _exponent(weight: float) -> int:
    return math.frexp(weight)[1] - 1 if weight > 0 and math.isfinite(weight) else 0
