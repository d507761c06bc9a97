"""Callbacks that follow the evaluations: stop early, and store the best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from samestep.callbacks.best import Best, Mode
from samestep.callbacks.callback import Callback, RunControl
from samestep.config.arguments import require_count
from samestep.events import Evaluated


@final
class EarlyStopping(Callback):
    """Stops the run when a metric was not better for `patience` evaluations in a row.

    Better is by more than `min_delta`. The run ends on all ranks right after that evaluation; its count goes
    on when the run is resumed.
    """

    def __init__(self, metric: str, *, patience: int = 3, mode: Mode = "min", min_delta: float = 0.0) -> None:
        require_count("patience", patience, least=1)
        self._best = Best(metric, mode=mode, min_delta=min_delta)
        self._patience = patience
        self._num_worse = 0
        self._has_seen = False

    @property
    def best(self) -> float | None:
        """The best value so far."""
        return self._best.value

    def on_start(self, run: RunControl) -> None:
        """Stop at once where the run that is gone on with was stopped before."""
        self._stop_if_patience_is_out(run)

    def on_evaluation(self, evaluated: Evaluated, run: RunControl) -> None:
        """Count evaluations that were no better."""
        self._has_seen = True
        if self._best.improved(evaluated):
            self._num_worse = 0
            return
        self._num_worse += 1
        self._stop_if_patience_is_out(run)

    def _stop_if_patience_is_out(self, run: RunControl) -> None:
        if self._num_worse >= self._patience:
            run.stop(
                f"{self._best.metric} was not better for {self._num_worse} evaluations; the best was "
                f"{self._best.value} after step {self._best.step}"
            )

    def on_end(self, run: RunControl) -> None:
        """Say where there was nothing to look at."""
        if not self._has_seen:
            run.tell(
                "there was no evaluation to look at. Give train(..., evaluate=samestep.Evaluation(...))."
            )

    def state(self) -> dict[str, Any]:
        """Return the best value, and how many evaluations were no better."""
        return {"best": self._best.state(), "num_worse": self._num_worse}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._best.load_state(state["best"])
        self._num_worse = int(state["num_worse"])


@final
class BestCheckpoint(Callback):
    """Asks for a checkpoint after each evaluation with the best value of a metric so far.

    Which checkpoints are kept says Checkpointing(best=metric, mode=mode).
    """

    def __init__(self, metric: str, *, mode: Mode = "min", min_delta: float = 0.0) -> None:
        self._best = Best(metric, mode=mode, min_delta=min_delta)

    @property
    def best(self) -> float | None:
        """The best value so far."""
        return self._best.value

    def on_evaluation(self, evaluated: Evaluated, run: RunControl) -> None:
        """Ask for a checkpoint where the metric is better than ever."""
        if self._best.improved(evaluated):
            run.checkpoint(f"{self._best.metric} is {self._best.value}, the best so far")

    def state(self) -> dict[str, Any]:
        """Return the best value so far."""
        return self._best.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up the best value so far."""
        self._best.load_state(state)
