"""What `samestep train --dry-run` tells: the resolved recipe, and the plan of the run, without training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import default_collate

from samestep.config import Recipe, write_yaml
from samestep.data.assign import assign
from samestep.data.global_batch import Batches
from samestep.data.loader import Loader
from samestep.data.planner import planned_steps
from samestep.loop.trainables import make_optimizer, trainables
from samestep.loop.weighted import Weighted, check_loss
from samestep.tasks.assembly import Assembly, assemble
from samestep.tasks.prepare import Prepared
from samestep.tasks.task import CountsTokens, Task


def tell(prepared: Prepared, workers: int) -> None:
    """Print the recipe and the plan, and run the first micro-batch forwards. Raises what training would."""
    recipe, task = prepared.recipe, prepared.task
    print(write_yaml(recipe.written()))
    assembly = assemble(prepared)
    batches = Batches(
        num_samples=len(assembly.dataset),
        batching=recipe.batching,
        seed=recipe.seed,
        steps=recipe.steps,
        epochs=recipe.epochs,
    )
    for name, value in plan(batches, workers, task):
        print(f"{name:<24}{value}")
    for name, value in check(assembly, batches, recipe, task):
        print(f"{name:<24}{value}")
    print("nothing was trained. Without --dry-run this is what runs.")


def plan(batches: Batches, workers: int, task: Task) -> Iterator[tuple[str, str]]:
    """Yield what the run will do, by arithmetic alone."""
    first, steps = batches.batch(0), planned_steps(batches)
    shares = [len(run) for run in assign(first.num_micro_batches, [1.0] * workers)]
    yield "samples", f"{batches.num_samples:,}"
    yield "global batch", f"{batches.batching.global_batch} samples = {first.num_micro_batches} micro-batches"
    yield "micro-batch", f"{batches.micro_batch} samples"
    yield "ranks", f"{workers}, with {_range(shares)} micro-batches of a step each"
    if batches.batching.grows:
        sizes = ", ".join(f"{size} from update {update} on" for update, size in batches.batching.sizes.table)
        yield "steps", f"{steps:,} if every one is applied; {sizes}"
        return
    yield "steps", f"{steps:,}; {batches.steps_per_epoch:,} in an epoch"
    if steps:
        last = batches.batch(min(steps, batches.steps_per_epoch) - 1)
        yield "last batch of an epoch", f"{last.num_samples} samples ({batches.batching.last})"
        end = batches.batch(steps - 1).cursor
        yield "samples in all", f"{end:,} = {end / batches.num_samples:.2f} epochs"
        if isinstance(task, CountsTokens):
            yield "tokens in all", f"{end * task.tokens_per_sample():,}"


def check(assembly: Assembly, batches: Batches, recipe: Recipe, task: Task) -> Iterator[tuple[str, str]]:
    """Build what is trained, and run the first micro-batch forwards."""
    optimizer = make_optimizer(assembly.optimizer, assembly.model)
    trained = trainables(assembly.model, optimizer)
    yield "trained parameters", f"{sum(p.numel() for _, p in trained):,} in {len(trained)} tensors"
    loader = Loader(assembly.dataset, seed=recipe.seed, collate_fn=assembly.collate or default_collate)
    (data,) = loader.load([batches.batch(0).micro(0)])
    with torch.no_grad():
        result = check_loss(task.loss(assembly.model, data))
    terms = {"loss": result} if isinstance(result, Weighted) else result
    for name, term in terms.items():
        mean = float(term.total) / term.weight if term.weight else float("nan")
        yield f"first {name}", f"{mean:.4f} over a weight of {term.weight:g} in the first micro-batch"


def _range(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} or {high}"
