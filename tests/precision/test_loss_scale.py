"""The loss scale: a pure function, compared step by step with other writings of the same rules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from samestep.errors import ConfigError
from samestep.precision.loss_scale import (
    LARGEST,
    RULES,
    ScaleRule,
    Verdict,
    first_scale,
    next_scale,
    rule_named,
)

VERDICTS = st.sampled_from(list(Verdict))
RULE = st.builds(
    ScaleRule,
    growth_after=st.integers(1, 5),
    overflows=st.integers(1, 4),
    floor=st.sampled_from([1.0, 2.0**-24]),
    initial=st.sampled_from([1.0, 2.0**16, 2.0**60]),
)
WEIGHTS = st.one_of(st.integers(0, 10**9).map(float), st.floats(1e-200, 1e200))


def is_power_of_two(number: float) -> bool:
    return number > 0 and math.frexp(number)[0] == 0.5


@given(rule=RULE, verdicts=st.lists(st.tuples(VERDICTS, WEIGHTS), max_size=60))
def test_the_scale_is_always_a_power_of_two_within_its_limits(
    rule: ScaleRule, verdicts: list[tuple[Verdict, float]]
) -> None:
    state = first_scale(rule, expected_weight=7.0)
    for verdict, weight in verdicts:
        before = state
        state = next_scale(rule, state, verdict, weight=weight)
        assert state == next_scale(rule, before, verdict, weight=weight)  # nothing is hidden
        assert is_power_of_two(state.scale)
        assert is_power_of_two(state.multiplier)
        assert min(rule.floor, rule.initial) <= state.scale <= LARGEST
        assert 1 <= state.credit <= rule.overflows
        assert state.scale / before.scale in (0.5, 1.0, 2.0)
        if verdict is Verdict.EMPTY:
            assert state == before
        if verdict is Verdict.OVERFLOW:
            assert state.scale <= before.scale
            assert state.good_steps == 0
        if verdict is Verdict.GOOD:
            assert state.scale >= before.scale


@given(weight=st.floats(1e-200, 1e200))
def test_the_multiplier_takes_the_sum_back_to_the_size_of_a_mean(weight: float) -> None:
    rule = RULES["torch"]
    state = next_scale(rule, first_scale(rule, expected_weight=1.0), Verdict.GOOD, weight=weight)
    assert state.scale <= state.multiplier * weight < 2 * state.scale


@settings(max_examples=20, deadline=None)
@given(overflows=st.lists(st.booleans(), min_size=1, max_size=30), growth=st.integers(1, 4))
def test_the_torch_preset_is_the_scale_of_grad_scaler(overflows: list[bool], growth: int) -> None:
    """Weights of 1: then the scale of the mean is the scale of the sum."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=growth)
    rule = replace(RULES["torch"], growth_after=growth)
    ours = first_scale(rule, expected_weight=1.0)
    for overflow in overflows:
        assert ours.scale == theirs.get_scale()
        optimizer.zero_grad()
        theirs.scale(parameter.sum() * (torch.inf if overflow else 1.0)).backward()
        theirs.step(optimizer)
        theirs.update()
        ours = next_scale(rule, ours, Verdict.OVERFLOW if overflow else Verdict.GOOD, weight=1.0)
    assert ours.scale == theirs.get_scale()


def test_the_presets_have_the_documented_numbers() -> None:
    torch_rule, hysteresis = rule_named("torch"), rule_named("hysteresis")
    scaler = torch.amp.GradScaler("cpu")
    assert torch_rule.growth_after == scaler.get_growth_interval() == 2000
    assert torch_rule.initial == scaler.get_scale()
    assert (hysteresis.growth_after, hysteresis.overflows, hysteresis.floor) == (1000, 2, 1.0)
    with pytest.raises(ConfigError, match=r"precision\.loss_scale is 'other'.*torch, hysteresis"):
        rule_named("other")  # type: ignore[arg-type]


class Hysteresis:
    """The documented rule in another form: it counts steps and remembers when the last overflow was."""

    def __init__(self, scale: float, window: int, shift: int, least: float) -> None:
        self.scale, self.window, self.shift, self.least = scale, window, shift, least
        self.step, self.last_overflow, self.credit = 0, -1, shift

    def update(self, *, overflow: bool) -> None:
        if overflow:
            if self.shift == 1 or self.credit == 1:
                self.scale = max(self.scale / 2, self.least)
            else:
                self.credit -= 1
            self.last_overflow = self.step
        elif (self.step - self.last_overflow) % self.window == 0:
            self.credit = self.shift
            self.scale *= 2
        self.step += 1


@given(
    overflows=st.lists(st.booleans(), max_size=80),
    window=st.integers(1, 5),
    shift=st.integers(1, 4),
)
def test_hysteresis_is_the_rule_of_its_documentation(overflows: list[bool], window: int, shift: int) -> None:
    rule = ScaleRule(growth_after=window, overflows=shift, floor=1.0, initial=2.0**4)
    ours = first_scale(rule, expected_weight=1.0)
    other = Hysteresis(2.0**4, window, shift, 1.0)
    for overflow in overflows:
        ours = next_scale(rule, ours, Verdict.OVERFLOW if overflow else Verdict.GOOD, weight=1.0)
        other.update(overflow=overflow)
        assert ours.scale == min(other.scale, LARGEST)


def test_the_scale_stops_at_its_floor_and_at_its_largest() -> None:
    for rule in RULES.values():
        state = first_scale(rule, expected_weight=1.0)
        for _ in range(200):
            state = next_scale(rule, state, Verdict.OVERFLOW, weight=1.0)
        assert state.scale == rule.floor
        eager = replace(rule, growth_after=1)
        for _ in range(200):
            state = next_scale(eager, state, Verdict.GOOD, weight=1.0)
        assert state.scale == LARGEST
