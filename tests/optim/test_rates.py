"""Learning rates are counted in applied updates, whoever sets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import samestep
from samestep.errors import ConfigError
from samestep.optim.rates import learning_rate, make_rates
from samestep.testing.threads import run_threads

FACTORIES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda update: 0.9**update),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def make_optimizer(lr: Any = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0}],
        lr=lr,
        momentum=0.9,
    )


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("name", FACTORIES)
def test_a_torch_scheduler_steps_once_for_each_update(name: str) -> None:
    ours, theirs = make_optimizer(), make_optimizer()
    rates = make_rates(ours, FACTORIES[name])
    scheduler = FACTORIES[name](theirs)
    for update in range(8):
        for _ in range(2):  # a skipped step asks again and moves nothing
            rates.prepare(update)
            assert rates_of(ours) == rates_of(theirs)
        ours.step()
        rates.advance()
        theirs.step()
        scheduler.step()


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_a_schedule_multiplies_the_base_rate_of_each_group(lr: Any) -> None:
    optimizer = make_optimizer(lr)
    rates = make_rates(optimizer, lambda update: 1 / (1 + update))
    for update in (0, 3, 1):
        rates.prepare(update)
        assert rates_of(optimizer) == pytest.approx([0.1 / (1 + update), 1.0 / (1 + update)])
    assert learning_rate(optimizer) == pytest.approx(0.05)


def test_without_a_schedule_the_rates_stay() -> None:
    optimizer = make_optimizer()
    rates = make_rates(optimizer, None)
    rates.prepare(5)
    rates.advance()
    assert rates_of(optimizer) == [0.1, 1.0]


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (lambda o: lr_scheduler.ReduceLROnPlateau(o), "ReduceLROnPlateau needs a metric"),
        (lambda update: "fast", r"schedule\(0\) returned 'fast'"),
        (lambda update: None, r"schedule\(0\) returned None"),
        (lambda update: 1 / update, "fails for update 0 .ZeroDivisionError"),
        (lambda o: o.param_groups, "not a torch scheduler"),
        (3, "fails for update 0"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_rates(make_optimizer(), schedule)


def loss(model: nn.Module, batch: Tensor) -> samestep.Weighted:
    values = model(batch[:, :3]).squeeze(1) ** 2
    return samestep.weighted(values * torch.where(batch[:, 3] == 1, torch.inf, 1.0))


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_skipped_steps_move_no_scheduler(name: str, strategy: str) -> None:
    """Sample 4 is infinite: step 2 of each epoch of five is skipped."""

    class Data:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, i: int) -> Tensor:
            inputs = torch.randn(3, generator=torch.Generator().manual_seed(i))
            return torch.cat([inputs, torch.tensor([1.0 if i == 4 else 0.0])])

    def run(transport: Any) -> samestep.Result:
        with transport.turn():
            torch.manual_seed(0)
            model = nn.Linear(3, 1)
        return samestep.train(
            model,
            Data(),
            loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            batching=samestep.Batching(global_batch=2, micro_batch=1, shuffle=False),
            steps=8,
            schedule=FACTORIES[name],
            precision=samestep.Precision(nonfinite="skip"),
            strategy=strategy,
            transport=transport,
        )

    (alone,) = run_threads(run, 1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler = FACTORIES[name](optimizer)
    wanted = []
    for _ in range(6):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [r.learning_rate for r in alone.history if r.applied] == wanted[:6]
    assert [r.applied for r in alone.history] == [True, True, False, True, True, True, True, False]
    assert [r.fingerprint for r in run_threads(run, 3)] == [alone.fingerprint] * 3


def test_constant_rates_of_zero_and_tensors_report_a_number() -> None:
    assert learning_rate(make_optimizer(0.0)) == 0.0
    assert isinstance(learning_rate(make_optimizer(torch.tensor(0.25))), float)
