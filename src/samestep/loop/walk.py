"""Which steps a call of `batches` walks: a later call goes on where an earlier one ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from samestep.config import Batching
from samestep.data.fetch import count_samples
from samestep.data.global_batch import Batches, GlobalBatch
from samestep.errors import ConfigError


@final
@dataclass(slots=True)
class Walk:
    """A run of steps over one data set; `offset` makes the session's step numbers from the plan's."""

    dataset: Any
    batches: Batches
    first: int
    offset: int
    ended: int  # the plan's step after the last one that was yielded
    is_past: bool = False  # walked by the run that this one goes on from

    def __iter__(self) -> Iterator[GlobalBatch]:
        """Yield the global batches under the session's step numbers."""
        for batch in () if self.is_past else self.batches.starting_at(self.first):
            yield replace(batch, step=batch.step + self.offset)

    @property
    def next_step(self) -> int:
        """The session's number of the step after the last one that was yielded."""
        return self.ended + self.offset

    def state(self) -> dict[str, int | str]:
        """Return where it stands, and what decides on the order of the samples, as JSON."""
        return {
            "ended": self.ended,
            "offset": self.offset,
            "the number of samples": self.batches.num_samples,
            "batching": self.batches.batching.model_dump_json(),
            "the seed": self.batches.seed,
        }

    def resumed(self, state: Mapping[str, Any], *, is_past: bool) -> Walk:
        """Return the same walk where a stored one stood; one that is past yields nothing more."""
        ended = int(state["ended"])
        return replace(self, first=ended, ended=ended, offset=int(state["offset"]), is_past=is_past)


def start_walk(
    previous: Walk | None,
    dataset: Any,
    batching: Batching,
    *,
    seed: int,
    steps: int | None,
    epochs: int | None,
) -> Walk:
    """Plan the next walk of a session.

    Over the same data set with the same batching the order goes on: a loop that asks for one epoch at a time
    sees new orders and new augmentations in each. An epoch that was broken off is not taken up again.
    """
    num_samples = count_samples(dataset)
    plan = Batches(num_samples=num_samples, batching=batching, seed=seed, steps=steps, epochs=epochs)
    if previous is None:
        return Walk(dataset, plan, first=0, offset=0, ended=0)
    if previous.dataset is not dataset or previous.batches.batching != plan.batching:
        return Walk(dataset, plan, first=0, offset=previous.next_step, ended=0)
    if epochs is None:
        first = previous.ended
        plan = replace(plan, steps=first + (steps or 0))
    else:
        first, done = _next_epoch(previous)
        plan = replace(plan, epochs=done + epochs)
    return Walk(dataset, plan, first=first, offset=previous.next_step - first, ended=first)


def _next_epoch(previous: Walk) -> tuple[int, int]:
    """Return the first step of the epoch after the one that was walked last, and that epoch's number."""
    batches = previous.batches
    if batches.batching.last == "wrap":
        samples = previous.ended * batches.batching.global_batch
        if samples % batches.num_samples:
            raise ConfigError(
                "batching.last is wrap, and the steps before ended in the middle of an epoch, after sample "
                f"{samples % batches.num_samples} of {batches.num_samples}. Ask for all epochs in one call, "
                "or for steps."
            )
        return previous.ended, samples // batches.num_samples
    epoch = -(-previous.ended // batches.steps_per_epoch)
    return epoch * batches.steps_per_epoch, epoch
