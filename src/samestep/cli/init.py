"""`samestep init`: a commented recipe to start from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from samestep.config.template import recipe_template
from samestep.errors import ConfigError
from samestep.registry import find_task
from samestep.tasks.task import Task


def init(
    task: Annotated[str, typer.Argument(help="A task, such as lm.", show_default=False)],
    to: Annotated[Path | None, typer.Option(help="The file to write.", show_default="TASK.yaml")] = None,
) -> None:
    """Write a recipe with every key of a task explained; nothing is overwritten."""
    beside = str(to.absolute().parent if to else Path.cwd())
    if beside not in sys.path:  # where a recipe looks for a task of the user's
        sys.path.insert(0, beside)
    kind = cast("type[Task]", find_task(task))
    path = to or Path(f"{task.rpartition('.')[2].rpartition(':')[2]}.yaml")
    text = recipe_template(task, kind.model_settings, kind.data_settings)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already. Name another file with --to.") from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Name another file with --to."
        ) from None
    print(f"wrote {path}: fill in what is in capitals, then: samestep train {path} --dry-run")
