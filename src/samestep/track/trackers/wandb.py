"""Weights & Biases: offline unless told otherwise, since a training must not depend on a network."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any, Literal, Self, final

from samestep.events import Event, RunEnded, RunStarted
from samestep.track.trackers.guard import Guard, Warn, require
from samestep.track.trackers.scalars import scalars, settings


@final
class WandB:
    """Log a run for Weights & Biases; a listener of events, for the first rank.

    Offline the run lies in `folder`/wandb, and `wandb sync` uploads it. A resumed run of the same folder has
    the same id. Raises ConfigError where the package `wandb` is missing; what fails later is one warning.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        project: str = "samestep",
        mode: Literal["offline", "online"] = "offline",
        run_name: str | None = None,
        warn: Warn | None = None,
    ) -> None:
        require("wandb", "wandb")
        self._folder = Path(folder)
        self._project = project
        self._mode = mode
        self._name = run_name or self._folder.absolute().name
        self._guard = Guard("wandb", warn)
        self._run: Any = None

    def __call__(self, event: Event) -> None:
        """Log an event."""
        self._guard.run(lambda: self._log(event))

    def close(self) -> None:
        """End the run there; a later event goes on with it."""
        self._guard.run(self._close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._opened().config.update(settings(event.facts), allow_val_change=True)
        elif found := scalars(event):
            step, numbers = found
            self._opened().log({**numbers, "step": step})
        elif isinstance(event, RunEnded):
            if self._run is not None:
                self._run.summary["fingerprint"] = event.fingerprint
            self._close()

    def _opened(self) -> Any:
        if self._run is None:
            wandb = importlib.import_module("wandb")
            self._folder.mkdir(parents=True, exist_ok=True)
            name = str(self._folder.absolute())
            self._run = wandb.init(
                project=self._project,
                mode=self._mode,
                dir=str(self._folder),
                id=hashlib.sha256(name.encode()).hexdigest()[:16],
                name=self._name,
                resume="allow" if self._mode == "online" else None,
                settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
            )
            # Its own count of steps refuses to go back, which a resumed run does.
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")
        return self._run

    def _close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()
