"""What a callback is: methods that are told what happened, and a narrow door to ask for something."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, ClassVar, Literal, final

from torch import nn

from samestep.errors import ConfigError
from samestep.events import CheckpointSaved, Evaluated, StepReport
from samestep.loop.noise import GradientNoise, StepDetails
from samestep.loop.requests import Requests, merge_requests


@final
@dataclass(slots=True)
class RunFacts:
    """What all callbacks of a rank are told of the run."""

    rank: int
    world_size: int
    model: nn.Module | None = None
    step: int | None = None  # of the last step that ended, None before the first
    update: int = 0  # applied updates
    details: StepDetails = field(default_factory=StepDetails)  # of that step
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation


@final
class RunControl:
    """What a callback sees of a run, and what it may ask of it.

    Requests are joined over all ranks and take effect on all of them alike: those made after a step when
    the next one ends, those made after an evaluation at once. The model is there to be read.
    """

    def __init__(self, name: str, facts: RunFacts) -> None:
        self._name = name
        self._facts = facts
        self._requests = Requests()
        self._notes: list[str] = []

    @property
    def step(self) -> int | None:
        """The step that ended last, counted from 0; None before the first one."""
        return self._facts.step

    @property
    def update(self) -> int:
        """How many updates were applied."""
        return self._facts.update

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of all samples of the step that ended last, over all ranks, in their order."""
        return self._facts.details.ids

    @property
    def bad_ids(self) -> tuple[int, ...]:
        """The ids of the first micro-batch of that step whose loss was not finite; empty where all were."""
        return self._facts.details.bad_ids

    @property
    def noise(self) -> GradientNoise | None:
        """The noise of that step's gradient, where a callback has asked for it with `needs_noise`."""
        return self._facts.details.noise

    @property
    def rank(self) -> int:
        """This rank."""
        return self._facts.rank

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        return self._facts.world_size

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self._facts.rank == 0

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last evaluation; empty before the first one."""
        return dict(self._facts.metrics)

    @property
    def model(self) -> nn.Module:
        """The model, to read from: a change made here is reported with the callback's name."""
        if self._facts.model is None:
            raise ConfigError("the run has no model yet.")
        return self._facts.model

    def stop(self, reason: str) -> None:
        """Ask all ranks to end the run."""
        self._ask(Requests(stop=self._reason(reason)))

    def checkpoint(self, reason: str) -> None:
        """Ask for a checkpoint."""
        self._ask(Requests(save=self._reason(reason)))

    def evaluate(self) -> None:
        """Ask for an evaluation."""
        self._ask(Requests(evaluate=True))

    def skip(self, ids: Iterable[int], reason: str) -> None:
        """Ask to pass over samples from now on; later global batches are filled up behind them."""
        skip = tuple(sorted({_sample_id(sample) for sample in ids}))
        if skip:
            self._ask(Requests(skip=skip, skip_reason=self._reason(reason)))

    def tell(self, message: str) -> None:
        """Say something to whoever follows the run; it becomes a notice under the callback's name."""
        self._notes.append(f"{self._name}: {message}")

    @property
    def asks(self) -> bool:
        """Whether something was asked since the last call of `take`."""
        return bool(self._requests)

    def take(self) -> Requests:
        """Return what was asked since the last call."""
        asked, self._requests = self._requests, Requests()
        return asked

    def notes(self) -> list[str]:
        """Return what was told since the last call."""
        told, self._notes = self._notes, []
        return told

    def _ask(self, request: Requests) -> None:
        self._requests = merge_requests([self._requests, request])

    def _reason(self, reason: str) -> str:
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(f"the reason is {reason!r}. Say in a few words why.")
        return f"{self._name}: {reason}"


def _sample_id(sample: object) -> int:
    if isinstance(sample, bool) or not isinstance(sample, Integral) or int(sample) < 0:
        raise ConfigError(f"skip was given the sample id {sample!r}. Ids are whole numbers from 0.")
    return int(sample)


class Callback:
    """Looks on while a run goes on. Every method may be left out.

    `ranks` says where it runs: on the first rank, which hears all that can be known of the run, or on all.
    A callback may read and ask; what it changes in the model or in the optimizer is told under its name, and
    is an error where it runs on the first rank only. One that raises ends the run with its name.
    """

    ranks: ClassVar[Literal["all", "first"]] = "first"
    needs_noise: ClassVar[bool] = False  # whether the noise of the gradient must be measured
    skips_nonfinite: ClassVar[bool] = False  # whether steps that are not finite are to be skipped, not raised

    def on_start(self, run: RunControl) -> None:
        """Called once, before the first step, also of a run that goes on from a checkpoint."""

    def on_step(self, report: StepReport, run: RunControl) -> None:
        """Called after each step, applied or skipped."""

    def on_evaluation(self, evaluated: Evaluated, run: RunControl) -> None:
        """Called after each evaluation."""

    def on_checkpoint(self, saved: CheckpointSaved, run: RunControl) -> None:
        """Called when a checkpoint lies in its place."""

    def on_end(self, run: RunControl) -> None:
        """Called once, after the last step, but not where the run ends in an error."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint is to keep: plain values that JSON can hold."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned before; called before `on_start`."""
