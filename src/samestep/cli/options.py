"""Options that more than one command has, and the recipe that they lead to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from samestep.config import load_recipe
from samestep.tasks.prepare import Prepared, prepare

RecipePath: TypeAlias = Annotated[
    Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe.", show_default=False)
]
Steps: TypeAlias = Annotated[
    int | None, typer.Option(help="Steps in all, in place of the recipe's.", show_default=False)
]
Grace: TypeAlias = Annotated[
    float,
    typer.Option(help="Seconds that ranks have after a signal to store their state and end.", min=0.0),
]
GRACE_S = 30.0  # what Slurm and Kubernetes give a process before they kill it
Assignments: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY.PATH=VALUE", help="Replace a value of the recipe.", show_default=False
    ),
]


def prepare_recipe(
    path: Path, assignments: Sequence[str], *, steps: int | None, workers: int | None = None
) -> Prepared:
    """Return the checked recipe; a task of the user's is looked for beside it, as a script's modules are."""
    beside = str(path.absolute().parent)
    if beside not in sys.path:
        sys.path.insert(0, beside)
    return prepare(load_recipe(path, assignments, steps=steps, workers=workers), path)


def recipe_options(assignments: Sequence[str], steps: int | None) -> list[str]:
    """Return the options that lead another process to the same recipe, whatever its number of ranks."""
    options = [option for assignment in assignments for option in ("--set", assignment)]
    return options if steps is None else [*options, "--steps", str(steps)]
