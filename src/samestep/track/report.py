"""report.html: one page of a run, drawn anew while it goes on."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Self, final

from samestep.errors import ConfigError
from samestep.events import Event, RunStarted, StepReport, Stopping
from samestep.track.folder import EVENTS, LEDGER
from samestep.track.page_data import page_data
from samestep.track.record import RunRecord

REPORT: Final = "report.html"
SECONDS_BETWEEN_PAGES: Final = 5.0
SCRIPTS: Final = ("charts.js", "page.js")
SHARE_OF_TIME: Final = 0.02  # that drawing may take, at most


@final
class Report:
    """Write report.html into a run folder: at the start, every few seconds, and at the end.

    A listener of events, for the first rank, to be called after RunFolder, whose files it reads, and closed
    after it. Each line is read once, and drawing takes at most 2 % of the time. A page that cannot be
    written ends nothing: `warn` gets one line, and the next page is tried again.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: float = SECONDS_BETWEEN_PAGES,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._record = RunRecord(folder)
        self._every = every
        self._clock = clock
        self._warn = warn or _to_stderr
        self._next = clock()
        self._warned = False

    def __call__(self, event: Event) -> None:
        """Draw the page where it is time."""
        due = isinstance(event, StepReport) and self._clock() >= self._next
        if due or isinstance(event, RunStarted | Stopping):
            self.draw()

    def draw(self) -> None:
        """Read what is new, and write the page."""
        start = self._clock()
        try:
            write_page(self._record, every=self._every)
        except Exception as error:  # whatever it is: no picture is worth a run
            if not self._warned:
                self._warned = True
                self._warn(f"{REPORT} cannot be written: {type(error).__name__}: {error}. The run goes on.")
        now = self._clock()
        self._next = now + max(self._every, (now - start) / SHARE_OF_TIME)

    def close(self) -> None:
        """Draw the last page."""
        self.draw()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_report(folder: Path) -> Path:
    """Write the page of a run folder anew, whatever became of the run, and return its path.

    Raises ConfigError where the folder holds no run, or cannot be written.
    """
    if not any((folder / name).is_file() for name in (LEDGER, EVENTS)):
        raise ConfigError(f"{folder} holds no run: it has neither {LEDGER} nor {EVENTS}. Name a run folder.")
    try:
        write_page(RunRecord(folder), every=SECONDS_BETWEEN_PAGES)
    except OSError as error:
        raise ConfigError(f"{folder / REPORT} cannot be written: {error}.") from error
    return folder / REPORT


def write_page(record: RunRecord, *, every: float) -> None:
    """Bring a record up to date and put its page in place, whole or not at all."""
    record.update()
    page = render(page_data(record, every=every, now=round(time.time(), 3)))
    path = record.folder / REPORT
    half = path.with_name(f"{REPORT}.part")
    half.write_text(page, encoding="utf-8")
    os.replace(half, path)


def render(data: dict[str, Any]) -> str:
    """Return the page. Law: no text of the run is ever read as markup or code.

    The numbers stand as JSON without any "<", and the page's own script, the only one that its policy lets
    run, puts them in as text.
    """
    page = files("samestep.track") / "page"
    script = "".join((page / name).read_text(encoding="utf-8") for name in SCRIPTS)
    policy = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    filled = {
        "%POLICY%": policy,
        "%TITLE%": html.escape(f"{data['title']}: {data['state']}"),
        "%STYLE%": (page / "report.css").read_text(encoding="utf-8"),
        "%DATA%": text.replace("<", "\\u003c"),
        "%SCRIPT%": script,
    }
    rest = (page / "report.html").read_text(encoding="utf-8")
    done: list[str] = []
    for mark, value in filled.items():  # in the order of the file: what was put in is not looked at again
        before, _, rest = rest.partition(mark)
        done += [before, value]
    return "".join([*done, rest])


def _to_stderr(message: str) -> None:
    sys.stderr.write(f"samestep: warning: {message}\n")
