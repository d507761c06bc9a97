"""The proof: one recipe at several sizes, each in processes of its own, compared with the first."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from samestep.track.folder import refuse_used
from samestep.verify.compare import Comparison, compare_runs
from samestep.verify.distance import Level

# Each size trains from the start, by itself, and leaves nothing but its run folder.
ALONE: Final = ("--set", "resume=never", "--set", "checkpoint=null", "--set", "track=[]")
END_S: Final = 10.0  # how long a run that is no longer wanted may take to end in order


@final
class RunFailed(Exception):
    """One of the runs did not end well; it has said why in `text`."""

    def __init__(self, workers: int, code: int, text: str) -> None:
        super().__init__(f"the run on {ranks(workers)} ended with exit code {code}")
        self.code = code
        self.text = text


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """One finished run."""

    workers: int
    folder: Path
    seconds: float
    comparison: Comparison  # with the first run; of the first run with itself


def ranks(count: int) -> str:
    """Return the count with its noun.

    >>> ranks(1), ranks(3)
    ('1 rank', '3 ranks')
    """
    return f"{count} rank" if count == 1 else f"{count} ranks"


def run_sizes(
    recipe: Path,
    workers: Sequence[int],
    *,
    options: Sequence[str],
    folder: Path,
    say: Callable[[str], None],
) -> list[Size]:
    """Train the recipe once for each number of ranks, one after the other, and compare each with the first.

    Run folders lie in `folder`, named after their place and size. `options` go to `samestep train` as they
    are. Raises ConfigError where `folder` holds such runs already, and RunFailed where one did not end well.
    """
    folders = [folder / f"{place}-workers-{count}" for place, count in enumerate(workers, start=1)]
    for run_folder in folders:
        refuse_used(run_folder)
    sizes: list[Size] = []
    for count, run_folder in zip(workers, folders, strict=True):
        say(f"running on {ranks(count)}")
        seconds = _run(recipe, count, run_folder, options)
        comparison = compare_runs(folders[0], run_folder)
        sizes.append(Size(workers=count, folder=run_folder, seconds=seconds, comparison=comparison))
    return sizes


def all_same(sizes: Sequence[Size]) -> bool:
    """Say whether every run has the bits of the first, and whether each of them has ended."""
    return all(
        size.comparison.level is Level.SAME and None not in size.comparison.fingerprints for size in sizes
    )


def table(sizes: Sequence[Size]) -> list[str]:
    """Return one line for each run, under a line of headings."""
    rows = [("ranks", "steps", "fingerprint", "ledger", "states", "level", "seconds")]
    for place, size in enumerate(sizes):
        found = size.comparison
        ledger = "equal" if found.step is None else f"differs from step {found.step.step}"
        states = "equal" if found.state is None else f"{found.state.num_tensors} tensors differ"
        rows.append(
            (
                str(size.workers),
                str(found.num_steps[1]),
                (found.fingerprints[1] or "none")[:16],
                ledger if place else "reference",
                (states if found.states else "none") if place else "reference",
                found.level.word,
                f"{size.seconds:.1f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _run(recipe: Path, workers: int, folder: Path, options: Sequence[str]) -> float:
    """Run one size to its end and return the seconds that it took."""
    command = [sys.executable, "-P", "-m", "samestep", "train", str(recipe), *options, *ALONE]
    command += ["--workers", str(workers), "--folder", str(folder)]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        text, _ = process.communicate()
    except BaseException:  # an interrupt: nothing may run on without us
        process.terminate()
        try:
            process.wait(END_S)
        finally:
            process.kill()
            process.wait()
        raise
    if process.returncode != 0:
        raise RunFailed(workers, process.returncode, text)
    return time.monotonic() - start
