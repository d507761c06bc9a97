"""How a run stands: running, done, stopped, failed, or silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from samestep.track.folder import FAILED, STOPPED
from samestep.track.record import RunRecord

SILENT_SECONDS: Final = 300.0  # without a line from any rank


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The state of a run in a word, and why."""

    word: str  # running, done, stopped, failed, silent
    why: str
    seconds: float  # from the first event to the last
    fingerprint: str | None = None

    @property
    def running(self) -> bool:
        """Whether the page may still change."""
        return self.word == "running"


def state_of(record: RunRecord, now: float) -> State:
    """Judge by the events since the last start: a run that was resumed is running again."""
    started = [place for place, event in enumerate(record.events) if event.get("event") == "RunStarted"]
    current = record.events[started[-1] :] if started else record.events
    times = [float(event["time"]) for event in record.events if isinstance(event.get("time"), int | float)]
    times += [one.last_time for one in record.ranks.values() if one.last_time]
    seconds = max(times) - min(times) if times else 0.0
    by_kind: dict[str, dict[str, Any]] = {str(event.get("event")): event for event in current}
    stopping = by_kind.get("Stopping", {})
    if ended := by_kind.get("RunEnded"):
        word = "stopped" if stopping else "done"
        fingerprint = str(ended.get("fingerprint"))
        return State(word=word, why=str(stopping.get("reason", "")), seconds=seconds, fingerprint=fingerprint)
    if failed := by_kind.get(FAILED):
        return State(word="failed", why=str(failed.get("problem")), seconds=seconds)
    if stopped := by_kind.get(STOPPED):
        why = str(stopping.get("reason", f"exit code {stopped.get('code')}"))
        return State(word="stopped", why=why, seconds=seconds)
    if times and now - max(times) > SILENT_SECONDS:
        return State(word="silent", why="no sign of life: it may have been killed", seconds=seconds)
    why = f"stopping: {stopping.get('reason')}" if stopping else ""
    return State(word="running", why=why, seconds=seconds)
