"""What users do that might make results depend on the number of ranks: it does not, or it is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from failures_inputs import Data, errors_of, fingerprints, loss, make_model, train
from torch import Tensor, nn
from torch.nn.functional import dropout

import samestep
from samestep import LossError, StepReport

pytestmark = pytest.mark.timeout(60)


def dropping(model: nn.Module, batch: Any) -> samestep.Weighted:
    rows, targets = batch
    return samestep.weighted((model(dropout(rows, 0.3))[:, 0] - targets) ** 2)


class Augmented(Data):
    """Draws from every generator that is seeded by position."""

    def __getitem__(self, index: int) -> Any:
        row, target = super().__getitem__(index)
        return row + torch.rand(4) + random.random() + float(np.random.rand()), target


def drawing_callback(event: samestep.Event) -> None:
    torch.rand(3)
    random.random()
    np.random.rand()


def changes_batch(model: nn.Module, batch: Any) -> samestep.Weighted:
    batch[0].add_(0.1)
    return loss(model, batch)


def seeds_itself(model: nn.Module, batch: Any) -> samestep.Weighted:
    torch.manual_seed(5)
    return dropping(model, batch)


def clears_gradients(model: nn.Module, batch: Any) -> samestep.Weighted:
    model.zero_grad()
    return loss(model, batch)


def sets_gradients(model: nn.Module, batch: Any) -> samestep.Weighted:
    model[0].weight.grad = torch.ones_like(model[0].weight)
    return loss(model, batch)


def evaluates_a_teacher(model: nn.Module, batch: Any) -> samestep.Weighted:
    model.eval()
    with torch.no_grad():
        taught = model(batch[0])[:, 0]
    model.train()
    return samestep.weighted((model(batch[0])[:, 0] - taught) ** 2)


HARMLESS: list[dict[str, Any]] = [
    {"dataset": Augmented()},
    {"dataset": Augmented(), "loader_workers": 2},
    {"loss": dropping},
    {"loss": changes_batch},
    {"loss": seeds_itself},
    {"loss": clears_gradients},
    {"loss": sets_gradients},
    {"loss": evaluates_a_teacher},
]


@pytest.mark.parametrize("changes", HARMLESS, ids=lambda value: "-".join(value))
def test_it_makes_no_difference(changes: dict[str, Any]) -> None:
    assert len(set(fingerprints(lambda: dict(changes)))) == 1


def test_draws_of_a_callback_move_nothing() -> None:
    # Alone, because ranks that are threads share their generators with each other's callbacks.
    assert train(loss=dropping, callbacks=[drawing_callback]).fingerprint == train(loss=dropping).fingerprint


def replace_parameter(model: nn.Module, _: StepReport) -> None:
    model[0].weight.data = model[0].weight.data * 0.5


def shrink(model: nn.Module, _: StepReport) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def set_gradient(model: nn.Module, _: StepReport) -> None:
    model[0].weight.grad = torch.ones_like(model[0].weight)


BETWEEN_STEPS: list[Callable[[nn.Module, StepReport], object]] = [
    lambda model, _: model.eval(),
    lambda model, report: model[0].weight.requires_grad_(report.step % 2 == 1),
    replace_parameter,
    shrink,
    set_gradient,
]


@pytest.mark.parametrize("change", BETWEEN_STEPS)
def test_what_every_rank_does_between_steps_makes_no_difference(
    change: Callable[[nn.Module, StepReport], object],
) -> None:
    def make() -> dict[str, Any]:
        made: list[nn.Module] = []

        def build() -> nn.Module:
            made.append(make_model())
            return made[0]

        def callback(event: samestep.Event) -> None:
            if isinstance(event, StepReport):
                change(made[0], event)

        return {"make_model": build, "callbacks": [callback]}

    assert len(set(fingerprints(make))) == 1


def shrinks_in_place(model: nn.Module, batch: Any) -> samestep.Weighted:
    with torch.no_grad():
        model[0].weight.mul_(0.99)
    return loss(model, batch)


def replaces_data(model: nn.Module, batch: Any) -> samestep.Weighted:
    model[0].weight.data = model[0].weight.data * 0.99
    return loss(model, batch)


class Renormed(nn.Module):
    """nn.Embedding changes its weight in the forward pass where max_norm is set."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 4, max_norm=0.5)
        self.head = nn.Linear(4, 1)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.head(self.table((rows[:, 1] * 10).long()))
        return found


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"loss": shrinks_in_place}, "0.weight"),
        ({"loss": replaces_data}, "0.weight"),
        ({"make_model": Renormed}, "table.weight"),
    ],
)
def test_a_forward_pass_that_changes_a_parameter_is_refused(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(LossError) as caught:
        train(**changes)
    assert f"micro-batch 0 changed the parameter {name}" in str(caught.value)
    assert "between steps" in str(caught.value)


def test_a_loss_that_leaves_another_training_mode_is_refused() -> None:
    def forgets(model: nn.Module, batch: Any) -> samestep.Weighted:
        model.eval()
        return samestep.weighted(errors_of(model, batch))

    with pytest.raises(LossError, match="left the model in another training mode"):
        train(loss=forgets)
