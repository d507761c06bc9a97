"""`samestep train`: what a recipe describes, on the ranks of this machine or of a launcher."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.options import (
    GRACE_S,
    Assignments,
    Grace,
    RecipePath,
    Steps,
    prepare_recipe,
    recipe_options,
)
from samestep.processes.child import recording_failures
from samestep.processes.supervise import run_ranks
from samestep.topology.devices import num_devices
from samestep.topology.environment import Environment
from samestep.track.console import show_cursor
from samestep.track.folder import refuse_used


def train(
    recipe: RecipePath,
    workers: Annotated[
        int | None, typer.Option(help="Number of ranks.", show_default="all devices of this machine")
    ] = None,
    steps: Steps = None,
    assignments: Assignments = None,
    folder: Annotated[
        Path | None, typer.Option(help="The run folder.", show_default="runs/<recipe>-<time>")
    ] = None,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Show the output of every rank, not of the first alone.")
    ] = False,
    grace: Grace = GRACE_S,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the resolved recipe and the plan, and train nothing.")
    ] = False,
) -> None:
    """Train what a recipe describes; under another launcher, as the rank that it made."""
    with recording_failures():
        given = assignments or []
        prepared = prepare_recipe(recipe, given, steps=steps, workers=workers)
        settings = prepared.recipe
        if dry_run:
            from samestep.cli.dry_run import tell

            tell(prepared, settings.workers or num_devices())
            return
        chosen = folder or settings.folder or new_folder(Path("runs"), recipe.stem)
        place = Environment.current().place()
        if place.launcher != "none":
            # Only ranks import torch: see Note [no torch before the ranks].
            from samestep.cli.rank import Order, take_part

            order = Order(path=recipe, assignments=given, steps=steps, folder=chosen)
            take_part(order, prepared, place)
            return
        if settings.checkpoint is None or settings.resume == "never":
            refuse_used(chosen)
        # `-P`: no file where the user stands may shadow what the start-up imports.
        command = [sys.executable, "-P", "-m", "samestep", "train", str(recipe), "--folder", str(chosen)]
        command += recipe_options(given, steps)
        count = settings.workers or num_devices()
        code = run_ranks(command, count, threads=settings.threads, all_ranks=all_ranks, stop_grace_s=grace)
        if code != 0:
            show_cursor(sys.stdout)
    raise SystemExit(code)


def new_folder(runs: Path, name: str) -> Path:
    """Return the name of a run folder that is not there yet: the recipe's name and the time of day."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem, *(f"{stem}-{number}" for number in range(2, 1000)))
    return next(runs / name for name in names if not (runs / name).exists())
