"""What each rank of `samestep train` does: build, train, and on the first rank keep and show."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from samestep.cli.options import recipe_options
from samestep.config import Recipe, write_yaml
from samestep.errors import ConfigError
from samestep.events import Event, Notice
from samestep.loop.session import Listener
from samestep.optim.ema import EMA
from samestep.processes.child import STOPPED
from samestep.tasks.assembly import Assembly, assemble, num_steps
from samestep.tasks.prepare import Prepared
from samestep.tasks.task import Describes, Task
from samestep.topology.environment import Place
from samestep.track.console import Console
from samestep.track.folder import RECIPE, refuse_used
from samestep.trainer import Result, train

PROOF_STEPS = 20  # enough to see every kind of step, and short enough to be run


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the user asked for on the command line."""

    path: Path
    assignments: Sequence[str]
    steps: int | None
    folder: Path


def take_part(order: Order, prepared: Prepared, place: Place) -> None:
    """Collective. Train what was prepared; the first rank keeps the run in its folder and shows it."""
    recipe = prepared.recipe
    assembly = assemble(prepared)
    steps = num_steps(recipe, len(assembly.dataset))
    try:
        with listening(order.folder, recipe, place) as listeners:
            for event in notices(recipe, place):
                for listener in listeners:
                    listener(event)
            result = run(recipe, prepared.task, assembly, order.folder, listeners)
    except SystemExit as stopped:
        if stopped.code == STOPPED and place.rank == 0:
            print(f"stopped; to go on: {going_on(order)}", flush=True)
        raise
    if place.rank == 0:
        text = prepared.task.describe(result.model) if isinstance(prepared.task, Describes) else ""
        # A schedule that ends with a decay of its own length fits no shorter run.
        proof_steps = steps if recipe.schedule.name == "wsd" else min(steps, PROOF_STEPS)
        print("\n".join(ending(order, result, text, proof_steps)), flush=True)


def run(
    recipe: Recipe, task: Task, assembly: Assembly, folder: Path, listeners: Sequence[Listener]
) -> Result:
    """Collective. Hand every key of the recipe to the engine."""
    return train(
        assembly.model,
        assembly.dataset,
        task.loss,
        optimizer=assembly.optimizer,
        batching=recipe.batching,
        steps=recipe.steps,
        epochs=recipe.epochs,
        schedule=assembly.schedule,
        clip_norm=recipe.clip_norm,
        precision=recipe.precision,
        strategy=recipe.strategy,
        reduction=recipe.reduction,
        collate_fn=assembly.collate,
        loader_workers=recipe.loader_workers,
        seed=recipe.seed,
        threads=recipe.threads,
        digest_every=recipe.digest_every,
        ema=EMA(**recipe.ema.model_dump()) if recipe.ema else None,
        checkpoint=recipe.checkpoint,
        resume=recipe.resume,
        folder=folder,
        track=recipe.track,
        listeners=listeners,
    )


@contextmanager
def listening(folder: Path, recipe: Recipe, place: Place) -> Iterator[list[Listener]]:
    """Give the listeners of this rank: the console on the first, nothing elsewhere."""
    if place.rank != 0:
        yield []
        return
    if not goes_on(recipe):
        refuse_used(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECIPE).write_text(write_yaml(recipe.written()), encoding="utf-8")
    except OSError as error:
        problem = f"folder is {folder}, which cannot be written: {error.strerror}."
        raise ConfigError(f"{problem} Name one where you may write.") from None
    with Console(sys.stdout) as console:
        yield [console]


def goes_on(recipe: Recipe) -> bool:
    """Say whether the run may go on with one that its folder holds."""
    return recipe.checkpoint is not None and recipe.resume != "never"


def notices(recipe: Recipe, place: Place) -> Iterator[Event]:
    """Tell of a setting that could not be followed."""
    if place.launcher != "samestep" and recipe.workers not in (None, place.world_size):
        message = (
            f"workers is {recipe.workers}, but {place.launcher} started {place.world_size} ranks, and so "
            "many train. The bits are the same."
        )
        yield Notice(level="warning", message=message)


def going_on(order: Order) -> str:
    """Return the command that goes on with a run that was stopped."""
    options = recipe_options(order.assignments, order.steps)
    return shlex.join(["samestep", "train", str(order.path), "--folder", str(order.folder), *options])


def ending(order: Order, result: Result, text: str, proof_steps: int) -> Iterator[str]:
    """Yield the last lines of a run: what it can do, where it lies, and how to prove it."""
    if text:
        yield f"\n{text}\n"
    yield f"run folder: {order.folder}"
    options = recipe_options(order.assignments, proof_steps)
    proof = shlex.join(["samestep", "verify", str(order.path), "--workers", "1,2,3", *options])
    yield f"the same bits on 1, 2 and 3 ranks: {proof}"
    yield f"fingerprint: {result.fingerprint}"
