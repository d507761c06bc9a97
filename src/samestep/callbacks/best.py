"""The best value of a metric so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, final

from samestep.errors import ConfigError
from samestep.events import Evaluated

Mode = Literal["min", "max"]


@final
class Best:
    """Follows one metric through the evaluations.

    A value counts as better where it passes the best one by more than `min_delta`; a NaN never does.
    """

    def __init__(self, metric: str, *, mode: Mode, min_delta: float) -> None:
        if not isinstance(metric, str) or not metric:
            raise ConfigError(f"metric is {metric!r}. Give the name of a metric of the evaluation.")
        if mode not in ("min", "max"):
            raise ConfigError(f"mode is {mode!r}. Use 'min' where less is better, or 'max'.")
        if not (isinstance(min_delta, int | float) and 0 <= min_delta < math.inf):
            raise ConfigError(f"min_delta is {min_delta!r}. Give a number of 0 or more.")
        self.metric = metric
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta
        self.value: float | None = None
        self.step: int | None = None

    def improved(self, evaluated: Evaluated) -> bool:
        """Take in an evaluation, and say whether it is the best so far. Raises ConfigError."""
        if self.metric not in evaluated.metrics:
            known = ", ".join(evaluated.metrics) or "none"
            raise ConfigError(
                f"there is no metric {self.metric}. The evaluation has: {known}. Those of averaged weights "
                "begin with ema/."
            )
        value = evaluated.metrics[self.metric]
        if math.isnan(value):
            return False
        if self.value is not None and not self._sign * (self.value - value) > self._min_delta:
            return False
        self.value, self.step = value, evaluated.step
        return True

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"value": self.value, "step": self.step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned."""
        self.value, self.step = state["value"], state["step"]
