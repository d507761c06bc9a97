"""A session: the ranks of a run, and the steps they take together, for a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, final

import torch
from torch import nn
from torch.optim import Optimizer

from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.config import Batching
from samestep.config.arguments import require_callables
from samestep.config.checkpointing import Checkpointing
from samestep.errors import ConfigError
from samestep.events import Event, Notice, Phases, RunStarted, StepReport
from samestep.loop.agreed import agreed_fingerprint
from samestep.loop.averaging import Averaging
from samestep.loop.batches import LoadedBatch, Weights, open_stream
from samestep.loop.engine import Engine, StepRules
from samestep.loop.evaluate import Evaluation, evaluate
from samestep.loop.meeting import Meeting
from samestep.loop.noise import GradientNoise
from samestep.loop.parts import build_parts
from samestep.loop.persistence import Persistence
from samestep.loop.requests import Requests
from samestep.loop.run_settings import RunSettings
from samestep.loop.terms import LossFunction, Terms
from samestep.loop.trainables import OptimizerLike, make_optimizer
from samestep.loop.walk import Walk, start_walk
from samestep.numerics.fingerprint import model_fingerprint
from samestep.optim.ema import EMA, resolve_ema
from samestep.optim.rates import ScheduleLike, make_rates
from samestep.precision.policy import Precision, resolve_precision

Listener = Callable[[Event], None]

_NO_MODEL = "the session has no model yet: call session.setup(model, optimizer) first."


@final
class Session:
    """Joins the ranks of a run; use it as a context manager around a training loop.

    Every rank runs the same loop. `threads` are CPU threads per rank and part of the numbers. `transport`
    replaces the one that is found from the launcher's variables, and stays open; `timeout_s` bounds every
    wait for another rank. Listeners get each event, on every rank.

    With `checkpoint` the state is stored between two steps, and the loop goes on from the newest whole
    checkpoint of its folder ("auto"), from none ("never") or from a path: `batches` passes over the steps
    that were taken. A SIGTERM, SIGUSR1 or Ctrl-C then stores the state and ends all ranks after the same
    step with exit code 3.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        precision: str | Precision = "fp32",
        strategy: str = "replicate",
        reduction: Literal["ordered", "fast"] = "ordered",
        clip_norm: float | None = None,
        ema: float | EMA | None = None,
        checkpoint: Checkpointing | None = None,
        resume: str | Path = "auto",
        digest_every: int = 10,
        threads: int = 1,
        transport: Transport | None = None,
        device: torch.device | None = None,
        timeout_s: float = 300.0,
        listeners: Sequence[Listener] = (),
    ) -> None:
        require_callables("listeners", listeners, use="each is given every event")
        self._settings = RunSettings(
            seed=seed,
            precision=resolve_precision(precision),
            strategy=strategy,
            reduction=reduction,
            clip_norm=clip_norm,
            ema=resolve_ema(ema),
            checkpoint=checkpoint,
            resume=resume,
            digest_every=digest_every,
            threads=threads,
            transport=transport,
            device=device,
            timeout_s=timeout_s,
        )
        self._listeners = listeners
        self._meeting = Meeting(self._settings)
        self._resources = ExitStack()
        self._is_open = False
        self._engine: Engine | None = None
        self._terms: Terms | None = None
        self._persistence: Persistence | None = None
        self._announced = False
        self._walk: Walk | None = None

    def __enter__(self) -> Self:
        """Collective. Meet the other ranks, pin what the bits depend on, and find where to go on."""
        with ExitStack() as resources:
            meeting = resources.enter_context(self._meeting)
            self._persistence = resources.enter_context(
                Persistence(self._settings, meeting.transport, device=meeting.device, notify=self._emit)
            )
            self._resources, self._is_open = resources.pop_all(), True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """Collective. Give the model back with memory of its own, and part from the other ranks."""
        return self._resources.__exit__(kind, error, traceback)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        self._joined()
        return self._meeting.device

    @property
    def rank(self) -> int:
        """This rank, 0 .. world_size - 1."""
        return self._joined().rank

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        return self._joined().world_size

    @property
    def model(self) -> nn.Module:
        """The model that was set up."""
        return self._ready().model

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks for all: prints, logs, saves."""
        return self.rank == 0

    @property
    def terms(self) -> Terms:
        """What the ranks know of what the loss returns."""
        if self._terms is None:
            raise ConfigError(_NO_MODEL)
        return self._terms

    @property
    def persistence(self) -> Persistence:
        """Checkpoints of the run, where it goes on, and what is asked of it."""
        if self._persistence is None:
            raise ConfigError("the session is not open.")
        return self._persistence

    @property
    def step_number(self) -> int:
        """How many steps the run has taken, those before a resume included."""
        return self._walk.next_step if self._walk else self.persistence.first_step

    @property
    def update(self) -> int:
        """How many updates were applied."""
        return self._ready().update

    @property
    def bad_ids(self) -> tuple[int, ...]:
        """The samples of the first micro-batch of the last step whose loss was not finite."""
        return self._ready().bad_ids

    @property
    def noise(self) -> GradientNoise | None:
        """The noise of the last step's gradient, where it is measured and can be."""
        return self._ready().noise

    def measure_noise(self) -> None:
        """Measure the noise of the gradient from the next step on; on all ranks alike."""
        self._ready().measure_noise()

    @property
    def average(self) -> Averaging | None:
        """The averaged weights, where the session keeps them."""
        return self._ready().average

    def setup(
        self,
        model: nn.Module,
        optimizer: OptimizerLike,
        schedule: ScheduleLike | None = None,
    ) -> tuple[nn.Module, Optimizer]:
        """Collective. Take over a model and its optimizer, and return them.

        The model is the same object. Ranks that built it with different values get those of rank 0;
        different shapes or settings raise Disagreement. `schedule` maps an update to a multiple of the base
        rate, or an optimizer to a torch scheduler. Where the run goes on from a checkpoint, its state is
        put in.
        """
        if self._engine is not None:
            raise ConfigError("setup was called twice; a session trains one model.")
        _require_module(model)
        settings, transport = self._settings, self._joined()
        model = model.to(self.device)
        made = make_optimizer(optimizer, model)
        rates = make_rates(made, schedule)  # first, since it may fail, and must leave nothing behind
        parts = build_parts(
            model,
            made,
            transport,
            device=self.device,
            precision=settings.precision,
            strategy=settings.strategy,
            reduction=settings.reduction,
            notify=self._emit,
        )
        self._resources.callback(parts.close)
        average = None if settings.ema is None else Averaging(settings.ema, parts, transport)
        rules = StepRules(
            seed=settings.seed,
            clip_norm=settings.clip_norm,
            digest_every=settings.digest_every,
            precision=settings.precision,
        )
        engine = Engine(parts, transport, rules, rates=rates, average=average, notify=self._emit)
        self._resources.push(self._leave_engine)
        self._engine, self._terms = engine, Terms(engine, transport, device=self.device)
        self.persistence.take_up(engine)
        return model, made

    def batches(
        self,
        dataset: Any,
        batching: Batching,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        loader_workers: int = 0,
        weights: Weights | None = None,
    ) -> Iterator[LoadedBatch]:
        """Collective. Yield the global batches of the run; call `step` once for each.

        A later call with the same data set and batching goes on in the order: with epochs=1 in a loop over
        epochs, each has a new one. Checkpoints are written, and requests to stop followed, when the next
        batch is asked for: what the loop's body does after a step belongs to that step.

        `weights` is needed for a loss of several terms: it maps a micro-batch's data to the weight of each
        term by name. Raises ConfigError for settings that give no batch, SystemExit with code 3 after a
        signal.
        """
        engine, terms = self._ready(), self.terms
        engine.drop()  # a loop before this one may have been left within a step
        if self.persistence.is_over:
            return
        terms.come_from_data = weights is not None
        walk = start_walk(self._walk, dataset, batching, seed=self._settings.seed, steps=steps, epochs=epochs)
        walk = self.persistence.next_walk(walk, in_worker=loader_workers > 0)
        self._walk = walk
        key = self._meeting.numerics_key(walk.batches)
        self._meeting.require_alike(walk, key, has_weights=weights is not None)
        self.persistence.use_key(key)
        self._announce(walk, key)
        if batching.micro_batch is None and not walk.is_past:
            chosen = walk.batches.micro_batch
            self._emit(Notice(level="info", message=f"micro_batch: {chosen}, an eighth of the global batch."))
        stream = open_stream(
            engine, walk, self._joined(), self.device, collate_fn=collate_fn, workers=loader_workers
        )
        # An error in the loop's body leaves this generator to the garbage collector, which may come late.
        self._resources.callback(stream.close)  # type: ignore[attr-defined]
        with closing(stream):  # type: ignore[type-var]
            while self.persistence.goes_on and (batch := next(stream, None)) is not None:
                divisors = terms.weigh(batch, weights) if weights else {}
                engine.begin(batch.plan, batch.runs, divisors)
                yield batch
                engine.drop()  # where it was not stepped; every rank comes by here
                with engine.phases.during("checkpoint"):
                    self.persistence.between_steps(walk)

    def step(self, batch: LoadedBatch, loss: LossFunction | None = None) -> StepReport:
        """Collective. Reduce the gradients of the global batch, and update the parameters.

        Raises NonFinite for a gradient that holds an infinity or a NaN, unless the precision skips such
        steps; the parameters are unchanged then.
        """
        engine, terms = self._ready(), self.terms
        if not engine.progress.is_at(batch.plan):
            raise ConfigError(
                f"step {batch.step} is not the batch that was begun last, or was stepped before."
            )
        engine.progress.require_complete()
        if not terms.are_known:
            names = terms.agree([] if len(batch) else None)
            if names and loss is not None:
                terms.count(batch, loss)
        report, marks = engine.finish(self.persistence.marks())
        self._emit(report)
        self._emit(Phases(step=report.step, rank=self.rank, seconds=engine.phases.take()))
        self.persistence.hear(marks)
        return report

    def evaluate(self, evaluation: Evaluation) -> dict[str, float]:
        """Collective. Measure the model on each sample of a data set once; the same bits on all ranks."""
        engine = self._ready()
        engine.progress.require_quiet("session.evaluate")
        metrics = evaluate(
            evaluation,
            self.model,
            self._joined(),
            seed=self._settings.seed,
            precision=self._settings.precision,
            device=self.device,
            averaging=engine.average,
        )
        self.persistence.metrics = metrics
        return metrics

    def ask(self, requests: Requests) -> None:
        """Ask for something on behalf of this rank; all ranks follow after the next step."""
        self.persistence.ask(requests)

    def stop(self, reason: str = "the loop asked for it") -> None:
        """End the run early: all ranks take one more step, and `batches` ends. Any rank may ask."""
        self.ask(Requests(stop=reason))

    def told_by_first(self, message: bytes) -> bytes:
        """Collective. Return the message of the first rank; the others' are dropped."""
        own = message if self.first else b""
        return gather_bytes(self._joined(), own, device=self.device)[0]

    def conclude(self) -> None:
        """Collective. Store the last state, and wait until it is whole; leaving the session does it too."""
        engine = self._ready()
        engine.drop()
        self.persistence.conclude(self._walk)

    def agreed_fingerprint(self) -> str:
        """Collective. Return the fingerprint; raise Disagreement where a rank's copy of the model differs."""
        self._ready().progress.require_quiet("session.agreed_fingerprint")
        return agreed_fingerprint(self.model, self._joined(), device=self.device)

    def fingerprint(self) -> str:
        """Return the SHA-256 over the model's parameters and buffers: 64 hex digits."""
        return model_fingerprint(self._ready().model)

    def _announce(self, walk: Walk, key: dict[str, str | int]) -> None:
        if not self._announced:
            self._announced = True
            facts = self._meeting.facts(walk.batches, key)
            self._emit(RunStarted(world_size=self.world_size, steps=walk.num_steps, facts=facts))
            self.persistence.announce()
            self.persistence.before_steps()

    def _leave_engine(
        self,
        kind: type[BaseException] | None,  # noqa: ARG002
        error: BaseException | None,
        traceback: TracebackType | None,  # noqa: ARG002
    ) -> None:
        """Let go of a batch that was begun and not stepped, and store the last state.

        After an error nobody waits for that.
        """
        if error is None:
            self.conclude()

    def _emit(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)

    def _joined(self) -> Transport:
        if not self._is_open:
            raise ConfigError("the session is not open. Use it as: with samestep.Session(...) as session:")
        return self._meeting.transport

    def _ready(self) -> Engine:
        self._joined()
        if self._engine is None:
            raise ConfigError(_NO_MODEL)
        return self._engine


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigError(f"model is {kind}. Give a torch.nn.Module, already made.")
