"""MLflow: a run with its settings, numbers and outcome, in a file beside the run or on a server."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any, Final, Self, final

from samestep.events import Event, RunEnded, RunStarted, Stopping
from samestep.track.trackers.background import CLOSING_SECONDS, Background
from samestep.track.trackers.guard import Guard, Warn, require
from samestep.track.trackers.scalars import scalars, settings

SECONDS_BETWEEN_BATCHES: Final = 1.0
MOST_METRICS: Final = 900  # a server takes 1000 at once
MOST_PARAMETERS: Final = 100
RUN_ID: Final = "mlflow-run-id"
DATABASE: Final = "mlflow.db"


@final
class MLflow:
    """Log a run to MLflow, in the background; a listener of events, for the first rank.

    Without `tracking_uri` the numbers lie in `folder`/mlflow.db. The id of the run is kept in `folder`, so
    that a resumed run goes on in it. Raises ConfigError where the package is missing; what fails later is
    one warning.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        tracking_uri: str | None = None,
        experiment: str = "samestep",
        run_name: str | None = None,
        closing_seconds: float = CLOSING_SECONDS,
        warn: Warn | None = None,
    ) -> None:
        # A database of one's own needs more than the client does.
        own = ("sqlalchemy", "alembic") if tracking_uri is None else ()
        require("mlflow", "mlflow", *own)
        self._folder = Path(folder)
        self._uri = tracking_uri or f"sqlite:///{self._folder.absolute() / DATABASE}"
        self._experiment = experiment
        self._name = run_name or self._folder.absolute().name
        self._closing_seconds = closing_seconds
        self._guard = Guard("mlflow", warn)
        self._background: Background | None = None
        self._metrics: list[tuple[str, float, int, int]] = []  # name, value, milliseconds, step
        self._sent = 0.0
        self._status = "FAILED"  # until the run has ended well
        self._client: Any = None
        self._run = ""

    def __call__(self, event: Event) -> None:
        """Log an event."""
        if self._guard.off:
            return
        if self._background is None:
            self._background = Background(self._guard)
            self._background.put(self._open)
        now = time.time()
        match event:
            case RunStarted():
                self._background.put(lambda: self._log_settings(settings(event.facts)))
            case RunEnded():
                self._status = "FINISHED"
            case Stopping():
                self._status = "KILLED"
        if found := scalars(event):
            step, numbers = found
            self._metrics += [(name, value, int(now * 1000), step) for name, value in numbers.items()]
        if now - self._sent >= SECONDS_BETWEEN_BATCHES or len(self._metrics) >= MOST_METRICS:
            self._send(now)
        if isinstance(event, RunEnded):
            self.close()

    def close(self) -> None:
        """Send what is left and end the run; waits for a server at most `closing_seconds`."""
        if self._background is not None:
            background, self._background = self._background, None
            status = self._status
            if self._metrics:
                self._send_to(background, time.time())
            background.put(lambda: self._client.set_terminated(self._run, status))
            background.close(self._closing_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, now: float) -> None:
        if self._background is not None and self._metrics:
            self._send_to(self._background, now)

    def _send_to(self, background: Background, now: float) -> None:
        metrics, self._metrics, self._sent = self._metrics, [], now
        background.put(lambda: self._log_metrics(metrics))

    # What follows runs in the background, in the order in which it was put there.

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._client = importlib.import_module("mlflow").MlflowClient(tracking_uri=self._uri)
        kept = self._folder / RUN_ID
        if kept.is_file():
            self._run = kept.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(self._experiment)
        place = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self._run = self._client.create_run(place, run_name=self._name).info.run_id
        kept.write_text(f"{self._run}\n", encoding="utf-8")

    def _log_settings(self, values: dict[str, str]) -> None:
        # Tags, not parameters: those cannot be changed, and a resumed run may stand elsewhere.
        tag = importlib.import_module("mlflow.entities").RunTag
        tags = [tag(name, value) for name, value in values.items()][:MOST_PARAMETERS]
        self._client.log_batch(self._run, tags=tags)

    def _log_metrics(self, metrics: list[tuple[str, float, int, int]]) -> None:
        metric = importlib.import_module("mlflow.entities").Metric
        for start in range(0, len(metrics), MOST_METRICS):
            part = metrics[start : start + MOST_METRICS]
            self._client.log_batch(self._run, metrics=[metric(*values) for values in part])
