"""Callbacks of whole runs: what they ask for happens on all ranks alike, and one that fails is named."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pytest
import torch
from callbacks_on_processes import TIMEOUT_S, Failing, fail, train
from torch import nn

import samestep
from samestep.callbacks.callback import Callback, RunControl
from samestep.callbacks.evaluations import EarlyStopping
from samestep.comm.transport import Transport
from samestep.errors import CallbackError
from samestep.testing.processes import run_processes
from samestep.testing.threads import run_threads


def rising(model: nn.Module, batch: Any) -> samestep.Weighted:
    """A metric that only gets worse: the weights of the model do not matter."""
    return samestep.weighted(batch[0][:, 0] * 0.0 + 1.0)


def test_early_stopping_ends_all_ranks_after_the_same_step() -> None:
    data = [(torch.zeros(3), torch.zeros(()))] * 5

    def run(transport: Transport) -> tuple[str, int, list[int]]:
        evaluation = samestep.Evaluation(dataset=data, metric=rising, every=2)
        stopping = EarlyStopping("metric", patience=2)
        result = train(transport, stopping, evaluate=evaluation)
        return result.fingerprint, result.step, [report.step for report in result.history]

    (alone,) = run_threads(run, 1)
    assert alone[1:] == (6, list(range(6)))  # the first evaluation is the best, and two more are no better
    for world_size in (2, 3):
        assert run_threads(run, world_size) == [alone] * world_size


class Asking(Callback):
    """Asks on one rank for an evaluation after step 2, and for the end after step 4."""

    ranks: ClassVar[Literal["all", "first"]] = "all"

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.evaluated: list[int] = []

    def on_step(self, report: samestep.StepReport, run: RunControl) -> None:
        if run.rank == self.rank and report.step == 2:
            run.evaluate()
        if run.rank == self.rank and report.step == 4:
            run.stop("enough")

    def on_evaluation(self, evaluated: samestep.Evaluated, run: RunControl) -> None:
        self.evaluated.append(evaluated.step)


def test_what_one_rank_asks_for_happens_on_all_after_the_next_step() -> None:
    def run(transport: Transport) -> tuple[str, int, list[int]]:
        asking = Asking(transport.world_size - 1)
        evaluation = samestep.Evaluation(dataset=[(torch.zeros(3), torch.zeros(()))], metric=rising)
        result = train(transport, asking, evaluate=evaluation)
        return result.fingerprint, result.step, asking.evaluated

    (alone,) = run_threads(run, 1)
    assert alone[1] == 6
    assert alone[2][0] == 3
    for world_size in (2, 3):
        assert run_threads(run, world_size) == [alone] * world_size


NAMED = "callback Failing on rank 1, at step 1,"


def test_a_callback_that_raises_on_one_rank_is_named() -> None:
    with pytest.raises(CallbackError, match=f"{NAMED} failed: ValueError: it broke"):
        run_threads(lambda t: train(t, Failing("raises")), 3)
    with pytest.raises(CallbackError, match=f"{NAMED} failed: ValueError: it broke"):
        run_processes(fail, 2, "raises", timeout_s=60)


def test_a_callback_that_blocks_on_one_rank_ends_with_its_name() -> None:
    started = time.monotonic()
    with pytest.raises(CallbackError, match=f"{NAMED} did not return within {TIMEOUT_S / 2:g} s"):
        run_processes(fail, 2, "blocks", timeout_s=60)
    assert time.monotonic() - started < 60


def test_a_callback_on_the_first_rank_may_not_change_the_model() -> None:
    class Changing(Callback):
        def on_step(self, report: samestep.StepReport, run: RunControl) -> None:
            with torch.no_grad():
                next(run.model.parameters()).zero_()

        def state(self) -> Mapping[str, Any]:  # type: ignore[override]
            return {}

    with pytest.raises(CallbackError, match="Changing on rank 0, at step 0, changed parameter weight"):
        run_threads(lambda t: train(t, Changing()), 2)
