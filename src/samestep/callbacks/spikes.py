"""A watch over the loss: what is not finite, and what jumps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, ClassVar, Final, Literal, final

from samestep.callbacks.callback import Callback, RunControl
from samestep.config.arguments import require_count, require_positive
from samestep.errors import ConfigError
from samestep.events import StepReport

_NORMAL: Final = 1.4826  # times the MAD of normal draws is their standard deviation
_FLAT: Final = (
    1e-3  # of the median: a spread below that is taken as that, else a flat loss jumps at every step
)


@final
class SpikeWatch(Callback):
    """Quarantines the samples of losses that are not finite, and watches for spikes.

    A loss that is not finite: its step is skipped (so does this callback ask for), and the samples of the
    first micro-batch whose loss is not finite are passed over from then on. Where all losses are finite and
    only the gradient is not, nothing is quarantined: with a loss scale that is an ordinary overflow.

    A spike: the loss is above m + threshold x s, where m is the median of the last `window` finite losses, s
    is 1.4826 times the median of their distances from m, and at least 0.001 |m|. Spikes enter the window
    like all others; a level that stays is normal after half a window. Nothing counts before `least` losses.
    `at_spike`: tell of it; skip, which quarantines the whole global batch, for which of its micro-batches
    made the spike is not known; or stop.

    More than `limit` quarantined samples stop the run: then it is the model, and not the data.
    """

    skips_nonfinite: ClassVar[bool] = True

    def __init__(
        self,
        *,
        threshold: float = 10.0,
        window: int = 100,
        least: int = 20,
        at_spike: Literal["tell", "skip", "stop"] = "tell",
        limit: int = 1000,
    ) -> None:
        require_positive("threshold", threshold)
        require_count("least", least, least=3)
        require_count("window", window, least=least)
        require_count("limit", limit, least=1)
        if at_spike not in ("tell", "skip", "stop"):
            raise ConfigError(f"at_spike is {at_spike!r}. Use 'tell', 'skip' or 'stop'.")
        self._threshold = threshold
        self._window = window
        self._least = least
        self._at_spike = at_spike
        self._limit = limit
        self._losses: list[float] = []
        self._quarantined: set[int] = set()

    @property
    def quarantined(self) -> frozenset[int]:
        """The samples that this callback has asked to pass over."""
        return frozenset(self._quarantined)

    def on_step(self, report: StepReport, run: RunControl) -> None:
        """Look at the loss of a step."""
        if run.bad_ids:
            run.tell(f"step {report.step}: the loss of {len(run.bad_ids)} samples is not finite.")
            self._skip(run.bad_ids, "a loss that is not finite", run)
        if report.loss is None or not math.isfinite(report.loss):
            return
        limit = self.threshold()
        if limit is not None and report.loss > limit:
            self._spiked(report.step, report.loss, limit, run)
        self._losses = [*self._losses, report.loss][-self._window :]

    def threshold(self) -> float | None:
        """Return the loss above which the next step is a spike; None before there are enough losses."""
        if len(self._losses) < self._least:
            return None
        middle = median(self._losses)
        spread = _NORMAL * median(abs(loss - middle) for loss in self._losses)
        return middle + self._threshold * max(spread, _FLAT * abs(middle))

    def state(self) -> dict[str, Any]:
        """Return the window, and what is quarantined."""
        return {"losses": list(self._losses), "quarantined": sorted(self._quarantined)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on watching."""
        self._losses = [float(loss) for loss in state["losses"]]
        self._quarantined = {int(sample) for sample in state["quarantined"]}

    def _spiked(self, step: int, loss: float, limit: float, run: RunControl) -> None:
        text = f"the loss of step {step} is {loss:.6g}, above the limit of {limit:.6g}"
        run.tell(text + ".")
        if self._at_spike == "stop":
            run.stop(text)
        elif self._at_spike == "skip":
            self._skip(run.ids, f"a spike of the loss at step {step}", run)

    def _skip(self, ids: tuple[int, ...], reason: str, run: RunControl) -> None:
        run.skip(ids, reason)
        self._quarantined |= set(ids)
        if len(self._quarantined) > self._limit:
            run.stop(
                f"{len(self._quarantined)} samples are quarantined, more than the limit of {self._limit}: "
                "the fault is in the model or its settings, not in single samples"
            )
