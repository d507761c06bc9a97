"""From a prepared recipe to the parts that are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from samestep.config import AdamSettings, OptimizerSettings, Recipe
from samestep.data.global_batch import Batches
from samestep.data.planner import planned_steps
from samestep.optim.schedules import Schedule
from samestep.tasks.prepare import Prepared, schedule_of
from samestep.tasks.task import Collates, DataSet


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembly:
    """What `samestep.train` needs, made from a recipe."""

    model: nn.Module
    dataset: DataSet
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    schedule: Schedule
    collate: Callable[[Any], object] | None


def assemble(prepared: Prepared) -> Assembly:
    """Build model, data set, optimizer and schedule; the same on every rank."""
    recipe, task = prepared.recipe, prepared.task
    dataset = task.build_dataset()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = task.build_model()
    return Assembly(
        model=model,
        dataset=dataset,
        optimizer=optimizer_of(recipe.optimizer),
        schedule=schedule_of(recipe.schedule, num_steps(recipe, len(dataset))),
        collate=task.collate if isinstance(task, Collates) else None,
    )


def num_steps(recipe: Recipe, num_samples: int) -> int:
    """Return the steps of the whole run."""
    if recipe.steps is not None:
        return recipe.steps
    batches = Batches(
        num_samples=num_samples, batching=recipe.batching, seed=recipe.seed, epochs=recipe.epochs
    )
    return planned_steps(batches)


def optimizer_of(settings: OptimizerSettings) -> Callable[[Iterable[Tensor]], Optimizer]:
    """Return what makes the optimizer once the parameters are known."""
    options = settings.model_dump(exclude={"name"})
    if isinstance(settings, AdamSettings):
        kind = {"adam": optim.Adam, "adamw": optim.AdamW}[settings.name]
        return lambda params: kind(params, **options)
    return lambda params: optim.SGD(params, **options)
