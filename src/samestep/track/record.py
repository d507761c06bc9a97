"""What a run folder says of a run, read piece by piece while the run goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final, final

from samestep.track.curve import Curve
from samestep.track.folder import EVENTS, LEDGER, RECIPE, RUN
from samestep.track.ledger import LedgerDigest
from samestep.track.lines import LineReader
from samestep.track.rank_record import RankRecord
from samestep.track.ranks import RANKS

STEP_CURVES: Final = ("loss", "learning_rate", "grad_norm", "loss_scale")
MOST_SKIPPED: Final = 20


@final
class RunRecord:
    """The curves, events and facts of one run folder; `update` reads what has come since the last call.

    Only the folder's files are read. Torn last lines wait, damaged ones are counted, missing files are
    runs that have not come so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: dict[int, RankRecord] = {}
        self.facts: dict[str, Any] = {}
        self.recipe: str | None = None
        self._events = LineReader(folder / EVENTS)
        self._ledger = LineReader(folder / LEDGER)
        self._begin_events()
        self._begin_ledger()

    def _begin_events(self) -> None:
        self.events: list[dict[str, Any]] = []  # all but evaluations
        self.metrics: dict[str, Curve] = {}
        self.checkpoints = {"stall": Curve(), "write": Curve()}  # seconds

    def _begin_ledger(self) -> None:
        self.curves: dict[str, Curve] = {name: Curve() for name in STEP_CURVES}
        self.terms: dict[str, Curve] = {}
        self.digest = LedgerDigest()
        self.last: dict[str, Any] = {}  # the last line
        self.num_lines = 0
        self.num_skipped = 0
        self.skipped: list[tuple[int, str]] = []  # the first of them
        self.uneven = 1.0
        self.span: list[int] = []  # first and last step

    def update(self) -> None:
        """Read what is new."""
        self.recipe = _text(self.folder / RECIPE)
        self.facts = _object(self.folder / RUN)
        if self._ledger.begun_anew():  # cut back at a resume
            self._begin_ledger()
        for line, values in self._ledger.read():
            self._add_step(line, values)
        if self._events.begun_anew():
            self._begin_events()
        for _, values in self._events.read():
            self._add_event(values)
        for path in sorted((self.folder / RANKS).glob("*.jsonl")):
            if path.stem.isdecimal():
                self.ranks.setdefault(int(path.stem), RankRecord(path)).update()

    def problems(self) -> list[str]:
        """Return what could not be read."""
        readers = {EVENTS: self._events.damaged, LEDGER: self._ledger.damaged}
        readers |= {f"{RANKS}/{rank}.jsonl": record.damaged for rank, record in self.ranks.items()}
        return [
            f"{name}: {count} damaged lines were passed over." for name, count in readers.items() if count
        ]

    def _add_step(self, text: bytes, line: dict[str, Any]) -> None:
        step = line.get("step")
        if not isinstance(step, int):
            return
        self.last = line
        self.num_lines += 1
        self.span = [min(self.span[0], step) if self.span else step, step]
        self.digest.add(text)
        for name, curve in self.curves.items():
            _add(curve, step, line.get(name))
        terms = line.get("terms")
        for name, term in terms.items() if isinstance(terms, dict) else ():
            _add(self.terms.setdefault(name, Curve()), step, term.get("loss"))
        if line.get("applied") is False:
            self.num_skipped += 1
            if len(self.skipped) < MOST_SKIPPED:
                self.skipped.append((step, str(line.get("skipped"))))
        share, more = divmod(int(line.get("micro_batches", 0)), max(1, int(line.get("world_size", 1))))
        if share and more:
            self.uneven = max(self.uneven, (share + 1) / share)

    def _add_event(self, event: dict[str, Any]) -> None:
        kind, step = event.get("event"), event.get("step")
        if kind != "Evaluated":
            self.events.append(event)
        if not isinstance(step, int):
            return
        if kind == "CheckpointSaved":
            _add(self.checkpoints["stall"], step, event.get("stall_seconds"))
            _add(self.checkpoints["write"], step, event.get("write_seconds"))
        if kind == "Evaluated" and isinstance(metrics := event.get("metrics"), dict):
            for name, value in metrics.items():
                _add(self.metrics.setdefault(name, Curve()), step, value)


def _add(curve: Curve, step: int, value: object) -> None:
    if value is not None:
        curve.add(step, as_float(value))


def as_float(value: object) -> float:
    """Return a number of a JSON file, which may stand as the word "nan" or "inf"."""
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except ValueError:
        return math.nan


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def _object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(_text(path) or "{}")
    except ValueError:  # half-written: the next look finds it whole
        return {}
    return values if isinstance(values, dict) else {}
