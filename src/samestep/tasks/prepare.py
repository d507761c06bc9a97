"""From a recipe to checked settings and a task, without torch: see Note [no torch before the ranks]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from samestep.config import Recipe, ScheduleSettings, Settings
from samestep.errors import ConfigError
from samestep.optim import schedules
from samestep.optim.schedules import Schedule
from samestep.registry import find_task
from samestep.tasks.task import REQUIRED, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A recipe whose settings are all checked."""

    recipe: Recipe  # resolved: every default filled in, every path absolute
    task: Task


def prepare(recipe: Recipe, path: Path) -> Prepared:
    """Check the sections of the task too, and fill in their defaults; needs no torch.

    `path` is the recipe's file, which names the place of a mistake and what paths are relative to.
    Raises ConfigError.
    """
    task_class = find_task(recipe.task)
    missing = [name for name in REQUIRED if name not in dir(task_class)]
    if missing:
        raise ConfigError(
            f"task is {recipe.task!r}, but the class has no {', '.join(missing)}. A task has "
            f"{', '.join(REQUIRED)}: see samestep.tasks.task.Task."
        )
    kinds = cast("type[Task]", task_class)
    sections: dict[str, Settings] = {}
    for name, kind in (("model", kinds.model_settings), ("data", kinds.data_settings)):
        settings = kind.read(getattr(recipe, name), source=str(path), place=(name,))
        sections[name] = settings.anchored(path.absolute().parent)
    task = cast("Callable[..., Task]", task_class)(**sections)
    if recipe.steps is not None:
        schedule_of(recipe.schedule, recipe.steps)
    written = {name: settings.model_dump(mode="json") for name, settings in sections.items()}
    resolved = recipe.model_copy(update={**written, "batching": recipe.batching.resolved()})
    return Prepared(recipe=resolved, task=task)


def schedule_of(settings: ScheduleSettings, steps: int) -> Schedule:
    """Return the multiplier of the base rate by applied updates; a run of `steps` has no more of them."""
    warmup, floor, updates = settings.warmup, settings.floor, settings.updates or steps
    match settings.name:
        case "constant":
            return schedules.constant(warmup=warmup)
        case "linear":
            return schedules.linear(updates=updates, warmup=warmup, floor=floor)
        case "warmup_cosine":
            return schedules.warmup_cosine(updates=updates, warmup=warmup, floor=floor)
        case "inverse_sqrt":
            return schedules.inverse_sqrt(warmup=warmup)
        case "wsd":
            return schedules.wsd(updates=updates, warmup=warmup, decay=settings.decay or 0, floor=floor)
