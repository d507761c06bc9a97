"""What a user watches: one progress line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Final, Protocol, Self, TextIO, final

from rich.console import Console as Screen
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from samestep.events import Event, Phases, RunEnded, RunStarted, StepReport, Stopping
from samestep.track.sentences import sentence

WINDOW: Final = 32  # steps over which the speed is taken
SECONDS_BETWEEN_LINES: Final = 1.0


class View(Protocol):
    """Where the progress is shown."""

    def open(self, steps: int | None) -> None:
        """Begin."""

    def show(self, report: StepReport, text: str) -> None:
        """Show the last finished step."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """End; the last step stays."""


@final
class Console:
    """Show a run as it goes; a listener of events, for the first rank only.

    Nothing is shown twice: the last step appears once, however the run ends.
    """

    def __init__(
        self,
        out: TextIO,
        *,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        screen = Screen(file=out, force_terminal=terminal, highlight=False, soft_wrap=True)
        self._view: View = ProgressLine(screen) if screen.is_terminal else PlainLines(out, clock)
        self._clock = clock
        self._steps: int | None = None
        self._speed = Speed()
        self._last: StepReport | None = None
        self._stopped = False

    def __call__(self, event: Event) -> None:
        """Show an event."""
        match event:
            case RunStarted():
                self._steps = event.steps
                self._view.open(event.steps)
                self._say(event)
            case StepReport():
                self._last = event
                self._speed.add(self._clock(), event.samples)
                self._view.show(event, step_line(event, self._steps, self._speed))
            case RunEnded():
                self._view.close()
                if self._last is not None:
                    self._view.say(_ending(event, self._last, stopped=self._stopped))
            case Phases():
                pass  # each rank's own; the report shows them
            case _:
                self._stopped = self._stopped or isinstance(event, Stopping)
                self._say(event)

    def _say(self, event: Event) -> None:
        text = sentence(type(event).__name__, asdict(event))
        if text is not None:
            self._view.say(text)

    def close(self) -> None:
        """Leave the terminal as it was, also where the run never ended."""
        self._view.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class Speed:
    """Samples and steps per second over the last steps; the first, which warms up, starts the clock."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=WINDOW + 1)

    def add(self, now: float, samples: int) -> None:
        """Count one step that has just ended."""
        self._marks.append((now, samples))

    def per_second(self) -> tuple[float, float] | None:
        """Return samples and steps per second, or None before the second step."""
        seconds = self._marks[-1][0] - self._marks[0][0]
        if seconds <= 0:
            return None
        samples = sum(samples for _, samples in self._marks) - self._marks[0][1]
        return samples / seconds, (len(self._marks) - 1) / seconds


def step_line(report: StepReport, steps: int | None, speed: Speed) -> str:
    """Return what there is to say of a step: number, loss, learning rate, samples/s, time left."""
    done = report.step + 1
    parts = [f"step {done:>{len(str(steps))}}/{steps}" if steps else f"step {done}"]
    parts.append("loss none" if report.loss is None else f"loss {report.loss:.4f}")
    parts.append(f"rate {report.learning_rate:.2e}")
    if report.skipped:
        parts.append(f"skipped: {report.skipped}")
    if measured := speed.per_second():
        samples_per_second, steps_per_second = measured
        parts.append(f"{samples_per_second:,.0f} samples/s")
        if steps:
            parts.append(f"{clock_time((steps - done) / steps_per_second)} left")
    return "  ".join(parts)


def clock_time(seconds: float) -> str:
    """Return a time as minutes and seconds, with hours where there are any.

    >>> clock_time(59.6), clock_time(3661)
    ('1:00', '1:01:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _ending(event: RunEnded, last: StepReport, *, stopped: bool) -> str:
    loss = "none" if last.loss is None else f"{last.loss:.4f}"
    word = "stopped" if stopped else "done"
    return f"{word}: {event.step} steps, {event.update} updates, loss {loss}"


@final
class PlainLines:
    """At most about one line a second, and the last step."""

    def __init__(self, out: TextIO, clock: Callable[[], float]) -> None:
        self._out = out
        self._clock = clock
        self._next = clock()
        self._pending: str | None = None

    def open(self, steps: int | None) -> None:
        """Begin; a file needs nothing for that."""

    def show(self, report: StepReport, text: str) -> None:  # noqa: ARG002
        """Print the step, or keep it where a line was printed a moment ago."""
        self._pending = text
        if self._clock() >= self._next:
            self._print_pending()

    def say(self, text: str) -> None:
        """Print a line, after the step before it."""
        if self._pending is not None:
            self._print_pending()
        print(text, file=self._out, flush=True)

    def close(self) -> None:
        """Print the last step where it was kept back."""
        if self._pending is not None:
            self._print_pending()

    def _print_pending(self) -> None:
        print(self._pending, file=self._out, flush=True)
        self._pending = None
        self._next = self._clock() + SECONDS_BETWEEN_LINES


def show_cursor(out: TextIO) -> None:
    """Show the cursor again, which a progress line hides, and which a killed process leaves hidden."""
    Screen(file=out).show_cursor(True)


@final
class ProgressLine:
    """One line that is redrawn in place."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        columns = (BarColumn(bar_width=24), TextColumn("{task.fields[text]}", markup=False))
        self._progress = Progress(*columns, console=screen, refresh_per_second=8)
        self._task: TaskID | None = None

    def open(self, steps: int | None) -> None:
        """Draw the line."""
        self._task = self._progress.add_task("", total=steps, text="")
        self._progress.start()

    def show(self, report: StepReport, text: str) -> None:
        """Redraw the line with a step."""
        if self._task is not None:
            self._progress.update(self._task, completed=report.step + 1, text=text)

    def say(self, text: str) -> None:
        """Print a line above the progress line."""
        self._screen.print(text, markup=False)

    def close(self) -> None:
        """Draw the line a last time and leave it."""
        self._progress.stop()
