"""All that is kept of a run, as one listener for each rank."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, final

from samestep.events import Event
from samestep.track.folder import RunFolder
from samestep.track.ranks import RankFile
from samestep.track.report import Report


@final
class Keeping:
    """Keep a run in its folder: every rank its own file, the first one ledger, events, facts and report too.

    A listener of events and a context, for every rank. What the report reads is written before it is drawn,
    and an error that ends the block is written down. `gpu_uuid`: see resources.Sampler.
    """

    def __init__(self, folder: Path, rank: int, *, gpu_uuid: str | None = None) -> None:
        with ExitStack() as opened:
            self._report = opened.enter_context(Report(folder)) if rank == 0 else None
            self._folder = opened.enter_context(RunFolder(folder)) if rank == 0 else None
            self._rank = opened.enter_context(RankFile(folder, rank, gpu_uuid=gpu_uuid))
            self._opened = opened.pop_all()

    def __call__(self, event: Event) -> None:
        """Write an event down, and draw the report where it is time."""
        self._rank(event)
        if self._folder is not None:
            self._folder(event)
        if self._report is not None:
            self._report(event)

    def close(self) -> None:
        """Finish all files, and draw the last page."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)
