"""Each rank's own file: where its time went and what it used, about one line a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Self, final

from samestep.errors import ConfigError
from samestep.events import Event, Phases, RunEnded, StepReport
from samestep.track.lines import LineWriter
from samestep.track.resources import Sampler

RANKS: Final = "ranks"
SECONDS_BETWEEN_LINES: Final = 1.0


@dataclass(kw_only=True, slots=True)
class Window:
    """Sums over the steps since the last line."""

    since: float
    first: int | None = None  # step
    last: int = 0
    steps: int = 0
    samples: int = 0
    micro_batches: int = 0  # of all ranks
    seconds: float = 0.0  # of steps
    slowest: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)  # seconds


@final
class RankFile:
    """Keep the phases and resources of one rank in `ranks/<rank>.jsonl` of the run folder.

    A listener of events, for every rank. Steps are summed until a second has gone by, and at the end of the
    run, so that the file grows with the time and not with the steps. `gpu_uuid`: see Sampler.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        gpu_uuid: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        seconds_between_lines: float = SECONDS_BETWEEN_LINES,
    ) -> None:
        try:
            self._lines = LineWriter(folder / RANKS / f"{rank}.jsonl")
        except OSError as error:
            raise ConfigError(
                f"folder is {folder}, where rank {rank} cannot write: {error}. Name one that every rank may "
                "write to."
            ) from error
        self._rank = rank
        self._clock = clock
        self._between = seconds_between_lines
        self._sampler = Sampler(gpu_uuid)
        self._window = Window(since=clock())

    def __call__(self, event: Event) -> None:
        """Add a step, or its phases; write a line where it is time."""
        match event:
            case Phases():
                self._see(event.step)
                for name, seconds in event.seconds.items():
                    self._window.phases[name] = self._window.phases.get(name, 0.0) + seconds
            case StepReport():
                self._see(event.step)
                window = self._window
                window.steps += 1
                window.samples += event.samples
                window.micro_batches += event.micro_batches
                window.seconds += event.seconds
                window.slowest = max(window.slowest, event.seconds)
            case RunEnded():
                self._write()

    def close(self) -> None:
        """Write what is left, and close the file."""
        if not self._lines.closed:
            self._write()
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _see(self, step: int) -> None:
        # Report and phases of a step come one after the other: a line ends before a step begins, so that
        # both stand in the same one.
        late = self._clock() - self._window.since >= self._between
        if self._window.first is not None and step != self._window.last and late:
            self._write()
        if self._window.first is None:
            self._window.first = step
        self._window.last = step

    def _write(self) -> None:
        window, now = self._window, self._clock()
        if window.first is None:
            return
        resources = {name: value for name, value in asdict(self._sampler.read()).items() if value is not None}
        self._lines.write(
            {
                "time": round(time.time(), 3),
                "rank": self._rank,
                "first": window.first,
                "last": window.last,
                "steps": window.steps,
                "samples": window.samples,
                "micro_batches": window.micro_batches,
                "wall": round(now - window.since, 6),
                "seconds": round(window.seconds, 6),
                "slowest": round(window.slowest, 6),
                "phases": {name: round(seconds, 6) for name, seconds in window.phases.items()},
                "resources": resources,
            }
        )
        self._window = Window(since=now)
