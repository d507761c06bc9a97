"""`samestep compare`: two run folders side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run folder.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another one.", show_default=False)],
) -> None:
    """Name the first step, tensor and element in which two runs differ; exit 0 only if all is the same."""
    # Torch, which reads the stored states, takes seconds to import: other commands do without.
    from samestep.verify.compare import compare_runs, describe
    from samestep.verify.distance import Level

    found = compare_runs(first, second)
    print("\n".join(describe(found)))
    raise SystemExit(0 if found.level is Level.SAME else 1)
