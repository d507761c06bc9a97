"""Checks of arguments that come from a script: what, which value, and what to give instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from samestep.errors import ConfigError


def require_count(name: str, value: object, *, least: int) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} is {value!r}, a {_kind(value)}. Give a whole number, {least} or more.")
    if int(value) < least:
        raise ConfigError(f"{name} is {value}. Give a whole number, {least} or more.")


def require_positive(name: str, value: object, *, otherwise: str = "") -> None:
    """Raise ConfigError unless `value` is a finite number above 0; `otherwise` tells what else may stand."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ConfigError(f"{name} is {value!r}. Give a finite number above 0{otherwise}.")


def require_callable(name: str, value: object, *, use: str) -> None:
    """Raise ConfigError unless `value` can be called; `use` tells what it is given and returns."""
    if not callable(value):
        raise ConfigError(f"{name} is a {_kind(value)}, which cannot be called. Give a function: {use}.")


def require_callables(name: str, values: object, *, use: str) -> None:
    """Raise ConfigError unless `values` is a list or tuple of things that can be called."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ConfigError(f"{name} is a {_kind(values)}. Give a list of functions: {use}.")
    for position, value in enumerate(values):
        require_callable(f"{name}[{position}]", value, use=use)


def _kind(value: object) -> str:
    return type(value).__name__
