"""The run folder: what was run, how it went, and what came out."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

from samestep.errors import ConfigError
from samestep.events import Event, Phases, RunStarted, StepReport
from samestep.track.ledger import LedgerWriter
from samestep.track.lines import LineWriter

LEDGER: Final = "ledger.jsonl"
EVENTS: Final = "events.jsonl"
RECIPE: Final = "recipe.yaml"
RUN: Final = "run.json"
STATE: Final = "state.safetensors"
CHECKPOINTS: Final = "checkpoints"
# Kinds of lines that an end before the end leaves in the events.
FAILED: Final = "RunFailed"
STOPPED: Final = "RunStopped"


def refuse_used(folder: Path) -> None:
    """Raise ConfigError where a folder holds a run already: two runs in one ledger are none."""
    if (folder / LEDGER).exists():
        raise ConfigError(f"folder is {folder}, which holds a run already. Name another one, or remove it.")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"folder is {folder}, which is a file. Name a folder.")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "is not writable for you" if there.is_dir() else "is a file"
        raise ConfigError(f"folder is {folder}, but {there} {reason}. Name one where you may write.")


def read_fingerprint(folder: Path) -> str | None:
    """Return the fingerprint of a run that ended, or None where it did not."""
    path = folder / EVENTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    ends = [line for line in lines if line.startswith('{"event": "RunEnded"')]
    if not ends:
        return None
    found: str = json.loads(ends[-1])["fingerprint"]
    return found


@final
class RunFolder:
    """Keep a run: steps in the ledger, other events in a file of their own, facts in run.json.

    A listener of events, for one rank only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._ledger = LedgerWriter(folder / LEDGER)
            self._events = LineWriter(folder / EVENTS)
        except OSError as error:
            raise ConfigError(
                f"folder is {folder}, which cannot be written: {error}. Name one where you may write."
            ) from error

    def __call__(self, event: Event) -> None:
        """Write an event down."""
        if isinstance(event, StepReport):
            self._ledger(event)
            return
        if isinstance(event, Phases):
            return  # each rank keeps its own, in its own file
        if isinstance(event, RunStarted):
            self._write_facts(event)
        self._keep(type(event).__name__, asdict(event))

    def _keep(self, kind: str, values: Mapping[str, object]) -> None:
        # The kind comes first and the time last: whoever reads the file finds both without parsing.
        self._events.write({"event": kind, **values, "time": round(time.time(), 3)})

    def _write_facts(self, event: RunStarted) -> None:
        facts: Mapping[str, object] = {"world_size": event.world_size, "steps": event.steps, **event.facts}
        text = json.dumps(facts, ensure_ascii=False, indent=2, default=str)
        (self.folder / RUN).write_text(f"{text}\n", encoding="utf-8")

    def close(self) -> None:
        """Finish both files."""
        self._ledger.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; what ends the run before its end is written down, so that the folder says how it went."""
        if error is not None and not self._events.closed:
            with suppress(OSError):  # a full disk: the error that is on its way out is the one to tell
                if isinstance(error, SystemExit):  # asked for, and no error
                    self._keep(STOPPED, {"code": error.code})
                else:
                    self._keep(FAILED, {"problem": f"{type(error).__name__}: {error}".removesuffix(": ")})
        self.close()
