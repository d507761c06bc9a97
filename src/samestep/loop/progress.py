"""How far this rank is with the batch of a step, and what may be done when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import final

from samestep.data.global_batch import GlobalBatch
from samestep.errors import ConfigError, LossError
from samestep.loop.leaf import LossSums


class Phase(Enum):
    """Where a batch stands on this rank."""

    IDLE = auto()  # none is begun
    BEGUN = auto()  # no micro-batch of it is collected here
    INSIDE = auto()  # in the block of a micro-batch
    COLLECTED = auto()  # some or all micro-batches are: buckets may be under way
    VOID = auto()  # a micro-batch failed after its loss was recorded: the batch can only be dropped


@final
class Progress:
    """Follows one batch after the other through its micro-batches, and refuses what is out of order."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._batch: GlobalBatch | None = None
        self._sums: LossSums | None = None
        self.runs: Sequence[range] = ()
        self.phase = Phase.IDLE

    def begin(self, batch: GlobalBatch, runs: Sequence[range], sums: LossSums) -> None:
        """Take up a batch, or the same one anew."""
        self._batch, self.runs, self._sums = batch, runs, sums
        self.phase = Phase.BEGUN

    def end(self) -> None:
        """Let go of the batch, stepped or dropped."""
        self._batch = self._sums = None
        self.phase = Phase.IDLE

    def is_at(self, batch: GlobalBatch) -> bool:
        """Say whether a batch is the one that is begun."""
        return self._batch is batch

    def require_batch(self) -> tuple[GlobalBatch, LossSums]:
        """Return the batch that is begun and its sums; ConfigError where there is none."""
        if self._batch is None or self._sums is None:
            raise ConfigError("no step was begun. Take batches from session.batches(...), one step for each.")
        return self._batch, self._sums

    def require_due(self, index: int, step: int) -> LossSums:
        """Return the sums that a micro-batch goes into; raise where another one is due."""
        batch, sums = self.require_batch()
        self._require_whole(batch)
        if step != batch.step:
            raise ConfigError(
                f"micro-batch {index} of step {step} was collected in step {batch.step}. Collect the "
                "micro-batches of a batch before the next one is taken."
            )
        run, num_done = self.runs[self._rank], sums.num_added
        if num_done >= len(run) or run[num_done] != index:
            due = (
                f"micro-batch {run[num_done]} is due" if num_done < len(run) else "all of this rank are done"
            )
            raise LossError(
                f"micro-batch {index} was collected, but {due}. Collect each micro-batch of the batch once, "
                "in the order in which the batch yields them."
            )
        return sums

    @contextmanager
    def inside(self, index: int) -> Iterator[None]:
        """Mark the block of a micro-batch; if it raises after the loss was recorded, the batch is void."""
        batch, sums = self.require_batch()
        self._require_whole(batch)
        if self.phase is Phase.INSIDE:
            raise ConfigError(
                f"micro-batch {index} of step {batch.step} was begun inside the block of another. End each "
                "block of micro.collect() before the next one."
            )
        num_before = sums.num_added
        self.phase = Phase.INSIDE
        try:
            yield
        except BaseException:
            recorded = sums.num_added > num_before
            self.phase = Phase.VOID if recorded else _after(num_before)
            raise
        self.phase = _after(sums.num_added)

    def require_quiet(self, what: str) -> None:
        """Raise ConfigError where `what` would cross the buckets of a batch that are under way."""
        if self.phase in (Phase.INSIDE, Phase.COLLECTED, Phase.VOID):
            batch, _ = self.require_batch()
            raise ConfigError(
                f"{what} was called while step {batch.step} is being collected: its gradients may be under "
                "way between the ranks. Call it after session.step(batch), or before the first micro-batch "
                "of the batch. A batch that is not to be stepped is dropped when the next one is taken."
            )

    def require_complete(self) -> None:
        """Raise where micro-batches of this rank are missing, or one is not ended."""
        batch, sums = self.require_batch()
        self._require_whole(batch)
        if self.phase is Phase.INSIDE:
            raise ConfigError(
                f"session.step was called inside the block of a micro-batch of step {batch.step}. Call it "
                "after the loop over the micro-batches."
            )
        num_own = len(self.runs[self._rank])
        if sums.num_added != num_own:
            raise LossError(
                f"step {batch.step} was taken after {sums.num_added} of {num_own} micro-batches of this "
                "rank. Collect every micro-batch of the batch, once, before session.step(batch)."
            )

    def _require_whole(self, batch: GlobalBatch) -> None:
        if self.phase is Phase.VOID:
            raise LossError(
                f"a micro-batch of step {batch.step} failed after its loss was recorded, so the sums of this "
                "step are void. Take the next batch, which drops this one on all ranks."
            )


def _after(num_added: int) -> Phase:
    return Phase.COLLECTED if num_added else Phase.BEGUN
