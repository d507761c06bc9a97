"""Gradients that are not finite: one decision of all ranks, and a message that finds the place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.comm.transport import Transport
from samestep.errors import NonFinite
from samestep.numerics.fingerprint import model_fingerprint
from samestep.testing.threads import run_threads
from samestep.testing.workloads import Drawn

DATASET = Drawn(24, lambda g: torch.randn(3, generator=g))
BATCHING = samestep.Batching(global_batch=6, micro_batch=2, shuffle=False)  # three micro-batches
BAD = 10  # the sample that is not finite: step 1, micro-batch 2, the last rank's


def loss(spoilt: float) -> Any:
    def of(model: nn.Module, batch: Tensor) -> samestep.Weighted:
        factor = torch.where((batch == DATASET[BAD]).all(1), spoilt, 1.0)
        return samestep.weighted(model(batch).squeeze(1) ** 2 * factor)

    return of


def gradient_only(model: nn.Module, batch: Tensor) -> samestep.Weighted:
    """Return a finite loss whose gradient is not: the square root of zero."""
    rows = (batch == DATASET[BAD]).all(1, keepdim=True)
    inputs = torch.where(rows, 0.0, batch)
    return samestep.weighted((model[1](model[0](inputs) * (~rows)).abs() ** 0.5).squeeze(1))


def train(transport: Transport, function: Any, make: Any = None, **settings: Any) -> samestep.Result:
    with transport.turn():
        torch.manual_seed(0)
        model = make() if make else nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 1, bias=False))
    arguments: dict[str, Any] = {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01), **settings}
    return samestep.train(
        model, DATASET, function, batching=BATCHING, steps=4, transport=transport, **arguments
    )


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_it_is_raised_on_all_ranks_with_step_parameter_and_samples(spoilt: float, strategy: str) -> None:
    def work(transport: Transport, steps: int = 4) -> tuple[str, str]:
        with transport.turn():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 1, bias=False))
        with pytest.raises(NonFinite) as caught:
            samestep.train(
                model,
                DATASET,
                loss(spoilt),
                optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
                batching=BATCHING,
                steps=4,
                strategy=strategy,
                transport=transport,
            )
        return str(caught.value), model_fingerprint(model)

    def before(transport: Transport) -> str:
        with transport.turn():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 1, bias=False))
        return samestep.train(
            model,
            DATASET,
            loss(1.0),
            optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
            batching=BATCHING,
            steps=1,
            transport=transport,
        ).fingerprint

    (wanted,) = run_threads(before, 1)
    for world_size in (1, 2, 3, 5):
        by_rank = run_threads(work, world_size, timeout_s=20)
        assert len(set(by_rank)) == 1
        text, fingerprint = by_rank[0]
        assert fingerprint == wanted
        assert text.startswith("step 1: the gradient of 0.weight, 1.weight holds an infinity or a NaN.")
        assert "The loss of micro-batch 2 (samples 10, 11) is not finite." in text


def test_a_gradient_that_is_not_finite_though_the_loss_is() -> None:
    with pytest.raises(NonFinite, match="loss itself is finite in every micro-batch"):
        run_threads(lambda t: train(t, gradient_only), 3, timeout_s=20)


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_it_is_skipped_by_all_ranks_where_asked(strategy: str) -> None:
    def run(transport: Transport) -> samestep.Result:
        return train(
            transport, loss(torch.nan), precision=samestep.Precision(nonfinite="skip"), strategy=strategy
        )

    (alone,) = run_threads(run, 1)
    assert [(r.applied, r.skipped) for r in alone.history] == [
        (True, None),
        (False, "overflow"),
        (True, None),
        (True, None),
    ]
    assert [r.update for r in alone.history] == [1, 1, 2, 3]
    assert [r.cursor for r in alone.history] == [6, 12, 18, 24]  # the samples count as consumed
    for world_size in (2, 3, 5):
        for result in run_threads(run, world_size):
            assert result.fingerprint == alone.fingerprint
            assert [r.skipped for r in result.history] == [r.skipped for r in alone.history]


class Counting(torch.optim.AdamW):
    """Counts its steps."""

    steps = 0
    elementwise = True

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_an_overflow_on_one_rank_halves_the_scale_once_and_moves_nothing_else(strategy: str) -> None:
    made: list[Counting] = []

    def optimizer(params: Any) -> Counting:
        made.append(Counting(params, lr=0.01))
        return made[-1]

    def run(transport: Transport) -> samestep.Result:
        return train(
            transport,
            loss(1e30),  # far beyond float16 in the backward pass of that micro-batch alone
            precision="fp16",
            strategy=strategy,
            optimizer=optimizer,
            schedule=lambda update: 1 / (1 + update),
        )

    (alone,) = run_threads(run, 1)
    first = alone.history[0].loss_scale
    assert first == 2.0**16
    assert [r.loss_scale for r in alone.history] == [first, first, first / 2, first / 2]
    assert [r.skipped for r in alone.history] == [None, "overflow", None, None]
    rates = [r.learning_rate for r in alone.history]
    assert rates == pytest.approx([0.01, 0.005, 0.005, 0.01 / 3])
    for world_size in (2, 3, 5):
        for result in run_threads(run, world_size):
            assert result.fingerprint == alone.fingerprint
            assert [r.loss_scale for r in result.history] == [r.loss_scale for r in alone.history]
    assert {one.steps for one in made} == {3}


def test_the_user_is_told_after_ten_overflows_in_a_row() -> None:
    told: list[samestep.Notice] = []

    def listen(event: samestep.Event) -> None:
        if isinstance(event, samestep.Notice):
            told.append(event)

    torch.manual_seed(0)
    result = samestep.train(
        nn.Linear(3, 1),
        DATASET,
        lambda model, batch: samestep.weighted(model(batch) * torch.inf),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        batching=BATCHING,
        steps=12,
        precision="fp16",
        callbacks=[listen],
    )
    assert not any(r.applied for r in result.history)
    (notice,) = told
    assert notice.level == "warning"
    assert "10 steps in a row were skipped for overflow; the loss scale is down to 64" in notice.message
