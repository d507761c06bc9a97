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
from samestep import Disagreement, LossError, StepReport
from samestep.comm.transport import Transport
from samestep.testing.threads import run_threads

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


Body = Callable[[nn.Module, Any], object]
WITH_MASTERS = samestep.Precision(compute="bf16", parameters="bf16")


def own_loop(transport: Transport, before: Body, after: Body, micro_batches: int, **settings: Any) -> str:
    """Take four steps, with something done before the first micro-batch and after the last one."""
    with transport.turn():
        torch.manual_seed(0)
        model = make_model()
        if "precision" not in settings:  # BatchNorm in evaluation mode knows no 16-bit weights
            model = nn.Sequential(*model, nn.BatchNorm1d(1))
    batching = samestep.Batching(global_batch=2 * micro_batches, micro_batch=2)
    with samestep.Session(transport=transport, digest_every=1, **settings) as session:
        session.setup(model, lambda params: torch.optim.AdamW(params, lr=1e-2))
        for batch in session.batches(Data(), batching, steps=4):
            before(model, batch)
            for micro in batch:
                with micro.collect() as record:
                    record(loss(model, micro.data))
            after(model, batch)
            session.step(batch)
        return session.agreed_fingerprint()


def nothing(model: nn.Module, batch: Any) -> None:
    pass


def alternate(model: nn.Module, batch: Any) -> None:
    model.train(batch.step % 2 == 0)


def decay(model: nn.Module, batch: Any) -> None:
    with torch.no_grad():
        model[2].weight.mul_(0.9)


def replace(model: nn.Module, batch: Any) -> None:
    model[2].weight.data = model[2].weight.data * 0.9


def reset_statistics(model: nn.Module, batch: Any) -> None:
    if isinstance(model[-1], nn.BatchNorm1d):
        model[-1].reset_running_stats()


@pytest.mark.parametrize("settings", [{}, {"precision": WITH_MASTERS}], ids=["fp32", "masters"])
@pytest.mark.parametrize("micro_batches", [2, 6])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (alternate, nothing),
        (nothing, alternate),
        (decay, nothing),
        (nothing, decay),
        (replace, nothing),
        (nothing, replace),
        (reset_statistics, alternate),
    ],
)
def test_changes_alike_on_all_ranks_around_the_micro_batches(
    before: Body, after: Body, micro_batches: int, settings: dict[str, Any]
) -> None:
    ended = [
        fingerprint
        for strategy in ("replicate", "zero1")
        for world_size in (1, 2, 3)  # of three ranks with two micro-batches, one has none
        for fingerprint in run_threads(
            lambda t, s=strategy: own_loop(t, before, after, micro_batches, strategy=s, **settings),
            world_size,
            timeout_s=20,
        )
    ]
    assert len(set(ended)) == 1
    (untouched,) = run_threads(lambda t: own_loop(t, nothing, nothing, micro_batches, **settings), 1)
    assert ended[0] != untouched


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (alternate, "step 1: the training modes .* rank 1 is unlike rank 0"),
        (decay, "step 1: parameters were changed between the steps on some ranks but not on all"),
        (replace, "step 1: parameters were changed between the steps on some ranks but not on all"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_changes_on_one_rank_around_the_micro_batches(change: Body, words: str, when: str) -> None:
    def work(transport: Transport) -> str:
        def alone(model: nn.Module, batch: Any) -> None:
            if transport.rank == 1 and batch.step == 1:
                change(model, batch)

        return own_loop(transport, *((alone, nothing) if when == "before" else (nothing, alone)), 6)

    if change is alternate and when == "after":  # it shows in the next step
        words = words.replace("step 1", "step 2")
    with pytest.raises(Disagreement, match=words):
        run_threads(work, 3, timeout_s=20)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (decay, r"parameter 2\.weight was changed between two micro-batches, before micro-batch 1"),
        (replace, r"parameter 2\.weight was changed between two micro-batches, before micro-batch 1"),
        (
            lambda model, _: model.eval(),
            "the training mode of the model was changed between two micro-batches",
        ),
    ],
)
def test_changes_between_two_micro_batches_are_refused(change: Body, words: str) -> None:
    torch.manual_seed(0)
    model = make_model()
    with samestep.Session() as session, pytest.raises(LossError, match=words):
        session.setup(model, lambda params: torch.optim.SGD(params, lr=0.1))
        for batch in session.batches(Data(), samestep.Batching(global_batch=12, micro_batch=2), steps=1):
            for micro in batch:
                with micro.collect() as record:
                    record(loss(model, micro.data))
                change(model, batch)


def penalty(model: nn.Module, batch: Any) -> None:
    if batch.step == 1:
        (model[2].weight ** 2).sum().backward()


def leftover(model: nn.Module, batch: Any) -> None:
    model[2].weight.grad = torch.ones_like(model[2].weight)


@pytest.mark.parametrize("body", [penalty, leftover])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_gradient_made_outside_the_micro_batches_is_refused(body: Body, world_size: int) -> None:
    with pytest.raises(LossError, match=r"parameter 2\.weight got a gradient outside of micro\.collect"):
        run_threads(lambda t: own_loop(t, body, nothing, 6), world_size, timeout_s=20)
    if body is penalty:
        with pytest.raises(LossError, match=r"parameter 2\.weight got a gradient outside"):
            run_threads(lambda t: own_loop(t, nothing, body, 2), world_size, timeout_s=20)


def test_the_tensor_that_differs_at_the_end_is_named() -> None:
    told: list[str] = []

    def work(transport: Transport) -> None:
        def last(model: nn.Module, batch: Any) -> None:
            if transport.rank and batch.step == 3:
                model[0].weight.data.mul_(0.5)
                model[2].bias.data.mul_(transport.rank)

        with pytest.raises(Disagreement) as caught:
            own_loop(transport, nothing, last, 6)
        told.append(str(caught.value))

    run_threads(work, 3, timeout_s=20)
    assert len(set(told)) == 1
    assert "0.weight has other values on rank 1 than on rank 0 (2 tensors differ in all)" in told[0]
