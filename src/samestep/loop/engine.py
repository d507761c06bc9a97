"""The parts of a session around one model, wired together: collect leaves, then take the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from samestep.comm.transport import Transport
from samestep.data.global_batch import GlobalBatch
from samestep.errors import NonFinite
from samestep.events import Event, Notice, StepReport, TermReport
from samestep.loop.alike import Alike
from samestep.loop.averaging import Averaging
from samestep.loop.ballot import Ballot, Count, Vote
from samestep.loop.leaf import LeafLoss, LossSums
from samestep.loop.noise import GradientNoise, NoiseMeter
from samestep.loop.parts import Parts
from samestep.loop.phase_clock import PhaseClock
from samestep.loop.progress import Progress
from samestep.loop.state_digest import changed_buffers, require_same_changes, state_digest, word_of
from samestep.numerics.seeds import seed_micro_batch
from samestep.optim.rates import Rates, learning_rate
from samestep.precision.loss_scale import LossScale, Verdict, first_scale, next_scale, rule_named
from samestep.precision.policy import Precision
from samestep.precision.settle import Settlement, TileNorms, divide, settle, total_norm

_TELL_AFTER_SKIPS = 10  # overflows in a row before the user is told


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRules:
    """How a session takes its steps."""

    seed: int
    clip_norm: float | None
    digest_every: int
    precision: Precision


@final
class Engine:
    """Takes the step. Every rank holds one, and all take the same decisions from the same numbers."""

    def __init__(
        self,
        parts: Parts,
        transport: Transport,
        rules: StepRules,
        *,
        rates: Rates,
        average: Averaging | None = None,
        notify: Callable[[Event], None],
    ) -> None:
        self.average = average
        self._noise_meter: NoiseMeter | None = None
        self.noise: GradientNoise | None = None  # of the last step, where it is measured
        self._parts = parts
        self._transport = transport
        self._rules = rules
        self._notify = notify
        self._rates = rates
        self._norms = TileNorms(parts.layout)
        self._ballot = Ballot(parts.layout, transport, num_buffers=parts.buffers.num_buffers)
        name = rules.precision.scale_rule
        self._scale_rule = rule_named(name) if name else None
        self._scale = first_scale(self._scale_rule, expected_weight=1.0) if self._scale_rule else None
        self._overflows = 0
        self._alike = Alike(parts.model, parts.optimizer)
        self._clock = time.perf_counter()
        self.phases = PhaseClock()
        self.bad_ids: tuple[int, ...] = ()  # samples of the first micro-batch whose loss was not finite
        self.progress = Progress(transport.rank)
        self.update = 0

    @property
    def parts(self) -> Parts:
        """What the step works on."""
        return self._parts

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self._parts.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that updates what this rank owns."""
        return self._parts.optimizer

    def measure_noise(self) -> None:
        """Measure the noise of the gradient from the next step on; on all ranks alike."""
        self._noise_meter = NoiseMeter(self._parts.collector)

    def begin(self, batch: GlobalBatch, runs: Sequence[range], divisors: Mapping[str, float]) -> None:
        """Start a step: `divisors` are the weights of several loss terms, empty for a single loss.

        Parameters, modes and buffers may still be changed, on all ranks alike, until the first micro-batch.
        """
        if self._scale is not None and self._scale_rule is not None and batch.step == 0:
            # Several terms are divided before the backward pass: what is scaled is a mean already.
            expected = 1.0 if divisors else float(batch.num_samples)
            self._scale = first_scale(self._scale_rule, expected_weight=expected)
        multiplier = self._scale.multiplier if self._scale else 1.0
        sums = LossSums(batch.num_micro_batches, divisors, multiplier=multiplier)
        self.progress.begin(batch, runs, sums)
        self._alike.begin()
        self._parts.strategy.begin(runs, batch.num_micro_batches)
        self._parts.statistics.begin()
        self._parts.buffers.begin()

    def restart(self, divisors: Mapping[str, float]) -> None:
        """Start the step that is begun anew, with the weights of its loss terms; nothing is collected yet."""
        self.progress.require_quiet("the count of loss weights")
        batch, _ = self.progress.require_batch()
        self.begin(batch, self.progress.runs, divisors)

    def drop(self) -> None:
        """Collective. Give up a batch that was begun and not stepped, so that nothing of it is under way."""
        self.progress.end()
        self._parts.strategy.drop()

    @contextmanager
    def leaf(self, index: int, *, step: int) -> Iterator[LeafLoss]:
        """Take the gradients made inside the block as those of one micro-batch of this rank."""
        loss = LeafLoss(self.progress.require_due(index, step), index, self.phases)
        batch, _ = self.progress.require_batch()
        with self.forward(index):
            with self._parts.strategy.collect(index):
                with self._rules.precision.autocast(self._parts.device):
                    yield loss
                loss.require_recorded()
                self._alike.leave(index, self._moved())
            self._parts.statistics.after_leaf()
            self._parts.buffers.after_leaf(is_last=index == batch.num_micro_batches - 1)
        for _, parameter in self._parts.untrained:
            parameter.grad = None

    @contextmanager
    def forward(self, index: int) -> Iterator[None]:
        """Give a micro-batch its seeds, and the buffers that the step started from."""
        batch, _ = self.progress.require_batch()
        with self.progress.inside(index), self._transport.turn(), self.phases.during("forward"):
            if self._alike.is_first:
                self._take_in()
            self._alike.enter(index, self._moved())
            seed_micro_batch(self._rules.seed, batch.step, index, self._parts.device)
            self._parts.statistics.before_leaf()
            self._parts.buffers.before_leaf()
            try:
                yield
            except BaseException:  # the step may be begun anew, and must start from the same values
                self._restore()
                raise

    @contextmanager
    def counting(self, index: int) -> Iterator[None]:
        """Run a micro-batch's forward pass for its weights alone: nothing of it stays."""
        with self.forward(index), torch.no_grad(), self._rules.precision.autocast(self._parts.device):
            yield
            self._alike.leave(index, self._moved())
        self._restore()

    def finish(self, marks: Sequence[int] = ()) -> tuple[StepReport, list[list[int]]]:
        """Collective. Reduce, settle, update: the step of the batch that was begun.

        Returns the report, and the marks of all ranks, by rank.
        """
        self.progress.require_complete()
        batch, sums = self.progress.require_batch()
        runs = self.progress.runs
        self.progress.end()
        self._take_in()
        with self.phases.during("communication"):
            reduced = self._parts.strategy.reduce(self._norms.inspect)
        self._rates.prepare(self.update)
        changes = changed_buffers(self._parts)
        meter = self._noise_meter
        vote = Vote(
            sums=meter.joined(sums, batch) if meter else sums.fold,
            used=reduced.used,
            changed=self._parts.buffers.changed(),
            tile_norms=self._norms.measured(),
            bad_leaf=sums.bad_leaf,
            words=[*self._alike.words(), word_of(changes)],
            marks=marks,
        )
        num_rows = sums.num_terms + (meter is not None)
        with self.phases.during("communication"):
            count = self._ballot.cast(vote, runs, batch.num_micro_batches, num_rows)
        counted, count = count.sums, replace(count, sums=count.sums[: sums.num_terms])
        self._alike.require([words[:-1] for words in count.words_by_rank], batch.step)
        told = [words[-1] for words in count.words_by_rank]
        require_same_changes(changes, told, self._transport, step=batch.step, device=self._parts.device)
        sums.require_counted(count.sums, batch.step)
        self._parts.buffers.settle(count.changed_by_rank)
        self._parts.statistics.replay(runs)
        bad = None if count.bad_leaf is None else batch.micro(count.bad_leaf)
        self.bad_ids = tuple(bad.ids.tolist()) if bad else ()
        settlement = settle(
            weight=sums.divisor(count.sums),
            summed_norm=total_norm(count.tile_norms),
            multiplier=sums.multiplier,
            clip_norm=self._rules.clip_norm,
        )
        self.noise = meter.estimate(counted, sums, batch, settlement.grad_norm) if meter else None
        if not settlement.finite and not self._rules.precision.skips_nonfinite:
            raise NonFinite(self._non_finite(batch, count))
        rate = learning_rate(self._parts.optimizer)
        if settlement.applied:
            with self.phases.during("update"):
                quotient = divide(reduced.gradient, self._parts.updated, settlement.divisor)
                self._parts.apply(quotient, count.used)
            self._rates.advance()
            self.update += 1
            if self.average is not None:
                self.average.follow(self.update)
        self._alike.end()
        scale = self._scale.scale if self._scale else None
        self._rescale(settlement, weight=sums.divisor(count.sums))
        report = self._report(batch, sums, count, settlement, learning_rate=rate, loss_scale=scale)
        return report, count.marks_by_rank

    def state(self) -> dict[str, Any]:
        """Return what a later run needs besides tensors to go on from here, as JSON."""
        scale = asdict(self._scale) if self._scale else None
        return {"update": self.update, "overflows": self._overflows, "scale": scale}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; before the first step."""
        self.update = state["update"]
        self._overflows = state["overflows"]
        if state["scale"] is not None and self._scale is not None:
            self._scale = LossScale(**state["scale"])
        self._rates.resume(self.update)

    def _report(
        self,
        batch: GlobalBatch,
        sums: LossSums,
        count: Count,
        settlement: Settlement,
        *,
        learning_rate: float,
        loss_scale: float | None,
    ) -> StepReport:
        terms: dict[str, TermReport] = sums.terms(count.sums)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        due = self._rules.digest_every and (batch.step + 1) % self._rules.digest_every == 0
        return StepReport(
            step=batch.step,
            update=self.update,
            epoch=batch.epoch,
            cursor=batch.cursor,
            samples=batch.num_samples,
            sample_hash=batch.sample_hash,
            micro_batches=batch.num_micro_batches,
            weight=float(count.sums[0, 1]),
            loss=sums.loss(count.sums),
            terms=terms,
            grad_norm=settlement.grad_norm,
            learning_rate=learning_rate,
            applied=settlement.applied,
            skipped=settlement.skipped,
            loss_scale=loss_scale,
            world_size=self._transport.world_size,
            seconds=seconds,
            digest=state_digest(self._parts, self._transport) if due else None,
        )

    def _take_in(self) -> None:
        """Take in what was done to the parameters since the last step, outside of any micro-batch."""
        self._parts.require_frozen()
        moved = self._parts.store.moved()
        self._alike.replaced([slot.name for slot in moved])
        for slot in moved:
            self._parts.store.adopt(slot)
            self._notify(Notice(level="info", message=f"{slot.name}: .data was replaced; its values count."))
        for slot in self._parts.store.edited():
            self._parts.store.follow(slot)

    def _moved(self) -> list[str]:
        return [slot.name for slot in self._parts.store.moved()]

    def _restore(self) -> None:
        self._parts.statistics.restore()
        self._parts.buffers.restore()

    def _rescale(self, settlement: Settlement, *, weight: float) -> None:
        if self._scale is None or self._scale_rule is None:
            return
        if not settlement.finite:
            verdict = Verdict.OVERFLOW
        else:
            verdict = Verdict.GOOD if settlement.applied else Verdict.EMPTY
        self._scale = next_scale(self._scale_rule, self._scale, verdict, weight=weight)
        self._overflows = self._overflows + 1 if verdict is Verdict.OVERFLOW else 0
        if self._overflows == _TELL_AFTER_SKIPS:
            text = (
                f"{_TELL_AFTER_SKIPS} steps in a row were skipped for overflow; the loss scale is down to "
                f"{self._scale.scale:g}. If it goes on, the loss or the data hold an infinity or a NaN."
            )
            self._notify(Notice(level="warning", message=text))

    def _non_finite(self, batch: GlobalBatch, count: Count) -> str:
        names = self._parts.names_of_bad_tiles(count.tile_norms)
        where = f"the gradient of {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
        if count.bad_leaf is None:
            cause = "The loss itself is finite in every micro-batch: look for a 0/0, log 0 or sqrt 0."
        else:
            ids = _brief(self.bad_ids)
            cause = f"The loss of micro-batch {count.bad_leaf} (samples {ids}) is not finite."
        return (
            f"step {batch.step}: {where} holds an infinity or a NaN. {cause} The step was not applied. "
            "Correct the data or the loss, or skip such steps with Precision(nonfinite='skip')."
        )


def _brief(ids: Sequence[int]) -> str:
    shown = ", ".join(str(i) for i in ids[:8])
    return f"{shown}, ..." if len(ids) > 8 else shown
