"""`samestep verify`: the proof that a recipe ends in the same bits on any number of ranks."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from samestep.cli.options import Assignments, RecipePath, Steps, prepare_recipe, recipe_options
from samestep.errors import ConfigError


def verify(
    recipe: RecipePath,
    workers: Annotated[str, typer.Option(help="Numbers of ranks to compare, separated by commas.")] = "1,2,3",
    steps: Steps = None,
    assignments: Assignments = None,
    keep: Annotated[
        Path | None, typer.Option(help="Where to keep the run folders.", show_default="removed at the end")
    ] = None,
) -> None:
    """Run a recipe at several sizes and compare every step; exit 0 only if all bits are the same."""
    counts = parse_workers(workers)
    given = assignments or []
    prepare_recipe(recipe, given, steps=steps)
    # Torch, which reads the stored states, takes seconds to import: wrong settings are told before.
    from samestep.verify.compare import describe
    from samestep.verify.proof import RunFailed, all_same, ranks, run_sizes, table

    with ending_on_terminate(), kept(keep) as folder:
        try:
            sizes = run_sizes(recipe, counts, options=recipe_options(given, steps), folder=folder, say=say)
        except RunFailed as failed:
            sys.stderr.write(f"{failed.text.rstrip()}\nsamestep verify: {failed}.\n")
            raise SystemExit(failed.code if failed.code > 0 else 1) from None
    say("\n".join(["", *table(sizes)]))
    for size in sizes:
        if not all_same([size]):
            say("\n".join(["", f"{ranks(sizes[0].workers)} (A) against {ranks(size.workers)} (B):"]))
            say("\n".join(describe(size.comparison)))
            break
    if not all_same(sizes):
        raise SystemExit(1)
    say(f"fingerprint: {sizes[0].comparison.fingerprints[0]}")


def say(text: str) -> None:
    """Print at once: the next run may take long."""
    print(text, flush=True)


def parse_workers(text: str) -> list[int]:
    """Return the numbers in "1,2,3"; raise ConfigError where there is nothing to compare."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--workers {text}: expected numbers of ranks with commas between, such as 1,2,3.")
    if len(parts) < 2:
        raise ConfigError(
            f"--workers {text}: one size alone proves nothing. Give two or more, such as 1,2,3."
        )
    return [int(part) for part in parts]


@contextmanager
def kept(folder: Path | None) -> Iterator[Path]:
    """Give the folder for the runs: the user's, or one that is removed at the end."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="samestep-verify-") as temporary:
        yield Path(temporary)


@contextmanager
def ending_on_terminate() -> Iterator[None]:
    """Let a SIGTERM end the block like an error, so that what it started is ended too."""

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise SystemExit(1)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
