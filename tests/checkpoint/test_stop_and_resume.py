"""Stopped twenty times at random steps, on 4, 2, 3 and 1 ranks: the same bits as in one go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from stopped_runs import Case, disturbed, undisturbed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import samestep
from samestep.testing.workloads import WORKLOADS, Drawn

STEPS = 32
STOPS = 20


def of_workload(name: str, **settings: Any) -> Case:
    load = WORKLOADS[name]()

    def loss(model: nn.Module, batch: Any) -> samestep.Weighted:
        return samestep.weighted(*load.values(model, batch))

    settings = {
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "collate_fn": load.collate_fn,
        "digest_every": 3,
        **settings,
    }
    return Case(make_model=load.make_model, dataset=load.dataset, loss=loss, settings=settings)


def dropout_and_averages() -> Case:
    return of_workload(
        "mlp",
        ema=samestep.EMA(decay=0.9, warmup=True, every=2),
        schedule=samestep.schedules.warmup_cosine(updates=40, warmup=5),
        batching=samestep.Batching(global_batch=12, micro_batch=2, last="keep"),
        clip_norm=0.5,
    )


def running_statistics() -> Case:
    return of_workload(
        "cnn",
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
        schedule=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1),
        ema=samestep.EMA(decay=0.8, buffers="average"),
        batching=samestep.Batching(global_batch=8, micro_batch=4, last="drop"),
    )


def masters_and_ties() -> Case:
    return of_workload(
        "gpt",
        precision=samestep.Precision(compute="bf16", parameters="bf16"),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4, 2),
        ema=0.7,
        batching=samestep.Batching(global_batch=10, micro_batch=3, last="wrap"),
    )


def overflows() -> Case:
    case = of_workload(
        "mlp",
        precision=samestep.Precision(compute="fp16", loss_scale="hysteresis"),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        schedule=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9, 17], 0.3),
        ema=0.9,
        batching=samestep.Batching(global_batch=7, micro_batch=2, last="wrap"),
    )

    def loss(model: nn.Module, batch: Any) -> samestep.Weighted:
        found: samestep.Weighted = case.loss(model, batch)
        huge = bool(batch[0][:, 0].max() > 1.7)  # some batches overflow at any scale
        return samestep.Weighted(found.total * (torch.inf if huge else 1.0), found.weight)

    return Case(make_model=case.make_model, dataset=case.dataset, loss=loss, settings=case.settings)


def whole_parameters() -> Case:
    return of_workload(
        "adapter",
        optimizer=lambda params: torch.optim.Adafactor(params, lr=1e-2),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CyclicLR(
            optimizer, 1e-3, 1e-2, 3, cycle_momentum=False
        ),
        batching=samestep.Batching(global_batch=8, micro_batch=2, last="keep", growth={9: 12}),
    )


class Waves(nn.Module):
    """Complex parameters, one that is cut by tiles, and buffers that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.spin = nn.Parameter(torch.randn(3, 40, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.randn(()))
        self.image = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.head = nn.Linear(40, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Map (batch, 3) to (batch, 4) twice."""
        hidden = (inputs.to(torch.complex64) @ self.spin).abs() * self.gain
        logits: Tensor = self.head(hidden)
        return logits, logits * self.image.sum()


def several_terms_and_groups() -> Case:
    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        label = torch.randint(-3, 4, (), generator=generator)
        return torch.randn(3, generator=generator), torch.randn(4, generator=generator), label

    def loss(model: nn.Module, batch: Any) -> dict[str, samestep.Weighted]:
        inputs, targets, labels = batch
        logits, others = model(inputs)
        labelled = labels >= 0
        named = cross_entropy(logits, labels.clamp(min=0), reduction="none")
        far = mse_loss(others, targets, reduction="none").sum(1)
        return {
            "labels": samestep.weighted(named, labelled),
            "targets": samestep.weighted(far, coefficient=0.3),
        }

    def optimizer(model: Waves) -> torch.optim.Optimizer:
        slow = [model.gain, *model.head.parameters()]
        return torch.optim.Adam(
            [{"params": slow, "lr": 1e-3}, {"params": [model.spin, model.image]}], lr=1e-2
        )

    holder: dict[int, Waves] = {}

    def make() -> nn.Module:
        made = Waves()
        holder[id(made.gain)] = made
        return made

    def of_parameters(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return optimizer(next(holder[id(p)] for p in params if id(p) in holder))

    return Case(
        make_model=make,
        dataset=Drawn(37, draw),
        loss=loss,
        settings={
            "optimizer": of_parameters,
            "schedule": lambda made: torch.optim.lr_scheduler.SequentialLR(
                made,
                [
                    torch.optim.lr_scheduler.LinearLR(made, 0.1, total_iters=5),
                    torch.optim.lr_scheduler.ExponentialLR(made, 0.9),
                ],
                [5],
            ),
            "batching": samestep.Batching(global_batch=9, micro_batch=2),
            "ema": 0.9,
            "digest_every": 1,
        },
    )


CASES: dict[str, Callable[[], Case]] = {
    made.__name__: made
    for made in (
        dropout_and_averages,
        running_statistics,
        masters_and_ties,
        overflows,
        whole_parameters,
        several_terms_and_groups,
    )
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_stopped_again_and_again_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    expected = undisturbed(case, STEPS, tmp_path / "one")
    came, stops = disturbed(case, STEPS, tmp_path / "many", Random(name))
    assert came == expected
    assert stops >= STOPS
    assert list(expected.visited) == list(range(STEPS))
    assert len({line["loss"] for line in expected.ledger}) > STEPS // 2
    if name == "overflows":
        assert len({line["loss_scale"] for line in expected.ledger}) > 3
    assert [place for place in (tmp_path / "many" / "checkpoints").iterdir() if place.name[0] == "."] == []
