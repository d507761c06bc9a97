"""The gradient-noise scale: up to which global batch more samples per step still help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, final

from samestep.callbacks.callback import Callback, RunControl
from samestep.config.arguments import require_count
from samestep.errors import ConfigError
from samestep.events import StepReport


@final
class GradientNoiseScale(Callback):
    """Follows the simple noise scale tr C / |G|^2 of McCandlish et al. 2018.

    Numerator and denominator are averaged over steps by themselves, exponentially with `smoothing`, as the
    paper does, since single estimates are noisy. A global batch far below the scale wastes steps, one far
    above it wastes samples. Needs two micro-batches or more in a step. The value has the same bits on any
    number of ranks. Measuring costs one more pass over each micro-batch's gradient.
    """

    ranks: ClassVar[Literal["all", "first"]] = "all"
    needs_noise: ClassVar[bool] = True

    def __init__(self, *, smoothing: float = 0.99, tell_every: int | None = None) -> None:
        if isinstance(smoothing, bool) or not 0 <= smoothing < 1:
            raise ConfigError(f"smoothing is {smoothing!r}. Give a number in [0, 1), such as 0.99.")
        if tell_every is not None:
            require_count("tell_every", tell_every, least=1)
        self._smoothing = smoothing
        self._tell_every = tell_every
        self._sums = {"share": 0.0, "signal": 0.0, "trace": 0.0, "weight": 0.0, "samples": 0.0}

    @property
    def trace(self) -> float | None:
        """The averaged variance of the gradient of one unit of weight, None before the first estimate."""
        return self._mean("trace")

    @property
    def signal(self) -> float | None:
        """The averaged squared length of the mean gradient."""
        return self._mean("signal")

    @property
    def scale(self) -> float | None:
        """The noise scale in units of weight; None where noise still drowns the signal."""
        if not self._sums["share"] or not self._sums["signal"] > 0:
            return None
        return self._sums["trace"] / self._sums["signal"]

    @property
    def samples(self) -> float | None:
        """The noise scale in samples."""
        scale = self.scale
        return None if scale is None else scale * self._sums["samples"] / self._sums["weight"]

    def on_step(self, report: StepReport, run: RunControl) -> None:
        """Take in the estimates of a step, where it has some."""
        noise = run.noise
        if noise is not None:
            told = {
                "share": 1.0,
                "signal": noise.signal,
                "trace": noise.trace,
                "weight": noise.weight,
                "samples": noise.samples,
            }
            for name, value in told.items():
                self._sums[name] = self._smoothing * self._sums[name] + (1.0 - self._smoothing) * value
        if self._tell_every and run.first and (report.step + 1) % self._tell_every == 0:
            samples = self.samples
            found = "drowned in noise so far" if samples is None else f"about {samples:.3g} samples"
            run.tell(f"step {report.step}: the gradient-noise scale is {found}.")

    def on_end(self, run: RunControl) -> None:
        """Say where no step gave an estimate."""
        if run.first and not self._sums["share"]:
            run.tell("no step gave an estimate. It needs two micro-batches or more with a weight in a step.")

    def state(self) -> dict[str, Any]:
        """Return the averages."""
        return dict(self._sums)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up the averages."""
        self._sums = {name: float(state[name]) for name in self._sums}

    def _mean(self, name: str) -> float | None:
        return self._sums[name] / self._sums["share"] if self._sums["share"] else None
