"""`samestep report`: the page of a run, made anew from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samestep.track.report import write_report


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
) -> None:
    """Write a run's report.html anew, from the run folder alone; also of a run that was killed."""
    print(write_report(run))
