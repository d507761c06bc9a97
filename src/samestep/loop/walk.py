"""Which steps a call of `batches` walks: a later call goes on where an earlier one ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, final

from samestep.config import Batching
from samestep.data.fetch import count_samples
from samestep.data.global_batch import Batches, GlobalBatch
from samestep.data.mixture import Mixture
from samestep.data.planner import Planner, Standing
from samestep.data.reading import Reading, StreamPlan, StreamRequest
from samestep.data.stream import is_stream, length_of
from samestep.errors import ConfigError

Plan: TypeAlias = Batches | StreamPlan

# What a stored walk may hold besides what decides on the order of the samples.
MOVES: Final = ("ended", "offset", "cursor", "quarantine", "reading", "evidence", "asked")


@final
@dataclass(slots=True)
class Walk:
    """A run of steps over one data set; `offset` makes the session's step numbers from the plan's."""

    dataset: Any
    batches: Plan
    offset: int = 0
    standing: Standing = field(default_factory=Standing)
    quarantine: tuple[int, ...] = ()  # rising
    reading: Reading = field(default_factory=Reading)  # of a stream
    evidence: dict[str, str] = field(default_factory=dict)  # of what the samples hold
    asked: dict[str, Any] = field(default_factory=dict)  # of it, and not yet agreed, when it is stored
    is_past: bool = False  # walked by the run that this one goes on from

    @property
    def next_step(self) -> int:
        """The session's number of the step after the last one that was yielded."""
        return self.standing.step + self.offset

    @property
    def num_steps(self) -> int | None:
        """The plan's step at which this walk ends, where that is known before it is there."""
        if isinstance(self.batches, StreamPlan):
            step = self.standing.step
            return None if self.quarantine else self.batches.num_steps_from(step, self.reading)
        return self._planner(self.batches).num_steps(self.standing)

    def ahead(self, update: int) -> Iterator[GlobalBatch]:
        """Yield the global batches to come, if every step is applied, under the session's step numbers."""
        if self.is_past or isinstance(self.batches, StreamPlan):
            return
        for batch in self._planner(self.batches).ahead(replace(self.standing, update=update)):
            yield replace(batch, step=batch.step + self.offset)

    def requests_ahead(self, update: int) -> Iterator[StreamRequest]:
        """Yield what is asked of a stream, if every step is applied, under the session's step numbers."""
        plan = self.batches
        if self.is_past or not isinstance(plan, StreamPlan):
            return
        begin: Reading | None = self.reading
        step = self.standing.step
        while plan.steps is None or step < plan.steps:
            yield StreamRequest(
                step=step + self.offset,
                size=plan.batching.sizes(update),
                begin=begin,
                quarantine=self.quarantine,
            )
            step, update, begin = step + 1, update + 1, None

    def holds(self, planned_update: int, update: int) -> bool:
        """Say whether a batch that was planned for one update is that for another."""
        sizes = self.batches.batching.sizes
        return planned_update == update or sizes(planned_update) == sizes(update)

    def goes_on(self, update: int) -> bool:
        """Say whether there is a next batch; for a stream, as far as is known without reading it."""
        if self.is_past:
            return False
        if isinstance(self.batches, StreamPlan):
            return self.batches.steps is None or self.standing.step < self.batches.steps
        return self._planner(self.batches).at(replace(self.standing, update=update)) is not None

    def take(self, batch: GlobalBatch, reading: Reading | None = None) -> None:
        """Note that a batch is yielded."""
        self.standing = replace(self.standing, step=self.standing.step + 1, cursor=batch.cursor)
        if reading is not None:
            self.reading = reading

    def is_last(self, batch: GlobalBatch, update: int) -> bool:
        """Say whether the walk ends after a batch, if that becomes update number `update`."""
        plan = self.batches
        if isinstance(plan, StreamPlan):
            ends = self.reading.is_end if batch.cursor == self.standing.cursor else False
            return ends or self.standing.step == plan.steps
        return self._planner(plan).is_last(replace(batch, step=batch.step - self.offset), update)

    def pass_over(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Leave samples out of all batches from now on; return those that were not left out before.

        Law: all other samples keep their order and come as often as without it. Raises ConfigError for an id
        that no sample has, DataError where too few samples are left.
        """
        new = tuple(sorted(set(ids) - set(self.quarantine)))
        limit = self.batches.num_samples
        for sample in new:
            if sample < 0 or (limit is not None and sample >= limit):
                raise ConfigError(
                    f"sample {sample} was asked to be passed over, but the data set has {limit} samples, "
                    "counted from 0."
                )
        quarantine = tuple(sorted({*self.quarantine, *new}))
        if isinstance(self.batches, Batches):
            Planner(batches=self.batches, quarantine=quarantine)  # which refuses to be left without samples
        self.quarantine = quarantine
        return new

    def state(self) -> dict[str, Any]:
        """Return where it stands, and what decides on the order of the samples, as JSON."""
        batching = self.batches.batching.model_dump(mode="json", exclude_defaults=True)
        return {
            "ended": self.standing.step,
            "offset": self.offset,
            "cursor": self.standing.cursor,
            "quarantine": list(self.quarantine),
            "reading": self.reading.to_json(),
            "evidence": dict(self.evidence),
            "asked": dict(self.asked),
            "the number of samples": self.batches.num_samples,
            # Without defaults, so that a setting that comes later does not part old runs from new ones.
            **{f"batching.{name}": value for name, value in batching.items()},
            "the seed": self.batches.seed,
        }

    def resumed(self, state: Mapping[str, Any], *, is_past: bool) -> Walk:
        """Return the same walk where a stored one stood; one that is past yields nothing more."""
        return replace(
            self,
            standing=Standing(step=int(state["ended"]), cursor=int(state["cursor"])),
            offset=int(state["offset"]),
            quarantine=tuple(state["quarantine"]),
            reading=Reading.from_json(state["reading"]),
            is_past=is_past,
        )

    def _planner(self, batches: Batches) -> Planner:
        return Planner(batches=batches, quarantine=self.quarantine)


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
    plan = make_plan(dataset, batching, seed=seed, steps=steps, epochs=epochs)
    if previous is None:
        return Walk(dataset, plan)
    if previous.dataset is not dataset:
        return Walk(dataset, plan, offset=previous.next_step)
    walk = Walk(
        dataset,
        plan,
        offset=previous.next_step,
        quarantine=previous.quarantine,
        evidence=previous.evidence,
    )
    if previous.batches.batching != plan.batching:
        return walk
    if isinstance(plan, StreamPlan):
        return _stream_goes_on(walk, plan, previous)
    assert isinstance(previous.batches, Batches)
    if epochs is None:
        walk.batches = replace(plan, steps=previous.standing.step + (steps or 0))
        walk.standing = previous.standing
    else:
        walk.standing, done = _next_epoch(previous, previous.batches)
        walk.batches = replace(plan, epochs=done + epochs)
    walk.offset = previous.next_step - walk.standing.step
    return walk


def make_plan(dataset: Any, batching: Batching, *, seed: int, steps: int | None, epochs: int | None) -> Plan:
    """Return which samples each step of a new run owns, as far as that is known without reading any."""
    if is_stream(dataset):
        num_samples = length_of(dataset)
        return StreamPlan(num_samples=num_samples, batching=batching, seed=seed, steps=steps, epochs=epochs)
    num_samples = count_samples(dataset)
    shuffle = isinstance(batching, Batching) and batching.shuffle
    placing = dataset.placing(seed=seed, shuffle=shuffle) if isinstance(dataset, Mixture) else None
    return Batches(
        num_samples=num_samples, batching=batching, seed=seed, steps=steps, epochs=epochs, placing=placing
    )


def _next_epoch(previous: Walk, batches: Batches) -> tuple[Standing, int]:
    """Return where the epoch after the one that was walked last begins, and that epoch's number."""
    standing, num_samples = previous.standing, batches.num_samples
    epoch, place = divmod(standing.cursor, num_samples)
    if place and batches.batching.last == "wrap":
        raise ConfigError(
            "batching.last is wrap, and the steps before ended in the middle of an epoch, after sample "
            f"{place} of {num_samples}. Ask for all epochs in one call, or for steps."
        )
    epoch += bool(place)
    is_regular = Planner(batches=batches, quarantine=previous.quarantine).is_regular(standing)
    step = epoch * batches.steps_per_epoch if is_regular else standing.step
    return Standing(step=step, cursor=epoch * num_samples), epoch


def _stream_goes_on(walk: Walk, plan: StreamPlan, previous: Walk) -> Walk:
    reading = previous.reading
    if plan.epochs is None:
        walk.batches = replace(plan, steps=previous.standing.step + (plan.steps or 0))
    else:
        reading = reading.next_pass()
        walk.batches = replace(plan, epochs=reading.epoch + plan.epochs)
    walk.standing = replace(previous.standing, cursor=reading.cursor)
    walk.reading = replace(reading, is_end=False)
    walk.offset = previous.offset
    return walk
