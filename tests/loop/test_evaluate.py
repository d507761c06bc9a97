"""Evaluation sees each sample once and gives the same bits on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.comm.transport import Transport
from samestep.testing.threads import run_threads
from samestep.testing.workloads import Drawn, cnn_with_batch_norm


def run(transport: Transport, micro_batch: int, every: int | None, seen: list[int]) -> samestep.Result:
    load = cnn_with_batch_norm()
    with transport.turn():
        torch.manual_seed(0)
        model = load.make_model()
    model[1].eval()  # frozen statistics stay frozen

    class Numbered:
        def __len__(self) -> int:
            return 17

        def __getitem__(self, index: int) -> tuple[int, tuple[Tensor, Tensor]]:
            return index, load.dataset[index]

    def metric(model: nn.Module, batch: Any) -> dict[str, samestep.Weighted]:
        assert not model.training
        assert not torch.is_grad_enabled()
        numbers, sample = batch
        seen.extend(numbers.tolist())
        losses, _ = load.values(model, sample)
        right = model(sample[0]).argmax(1) == sample[1]
        return {"loss": samestep.weighted(losses), "accuracy": samestep.weighted(right.float())}

    result = samestep.train(
        model,
        load.dataset,
        lambda model, batch: samestep.weighted(*load.values(model, batch)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batching=samestep.Batching(global_batch=8, micro_batch=2),
        steps=4,
        evaluate=samestep.Evaluation(dataset=Numbered(), metric=metric, every=every, micro_batch=micro_batch),
        transport=transport,
    )
    assert model.training
    assert not model[1].training
    return result


@pytest.mark.parametrize("micro_batch", [1, 3, 32])
def test_each_sample_counts_once_on_any_number_of_ranks(micro_batch: int) -> None:
    (alone,) = run_threads(lambda t: run(t, micro_batch, None, []), 1)
    assert set(alone.metrics) == {"loss", "accuracy"}
    for world_size in (1, 2, 3, 4, 8):
        seen: list[int] = []
        for result in run_threads(lambda t, s=seen: run(t, micro_batch, None, s), world_size):
            assert result.metrics == alone.metrics
        assert sorted(seen) == list(range(17))


def test_evaluating_more_often_moves_no_bit_of_the_training() -> None:
    (seldom,) = run_threads(lambda t: run(t, 4, None, []), 1)
    (often,) = run_threads(lambda t: run(t, 4, 1, []), 1)
    assert often.fingerprint == seldom.fingerprint
    assert often.metrics == seldom.metrics


class Counting(nn.Module):
    """Counts its calls, in training and in evaluation, and lets what it counted into its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("latest", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.latest = 0.5 * self.latest + inputs[-1, :1]
        result: Tensor = self.norm(self.linear(inputs)).squeeze(1) + self.calls + self.latest
        return result


POINTS = Drawn(24, lambda g: torch.randn(2, generator=g))
SGD = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731


def trained_and_measured(transport: Transport, every: int | None) -> tuple[str, dict[str, float], int]:
    with transport.turn():
        torch.manual_seed(0)
        model = Counting()

    def metric(model: nn.Module, batch: Tensor) -> samestep.Weighted:
        model.train()  # neither the mode nor what it moves may reach the next micro-batch
        return samestep.weighted(model(batch))

    result = samestep.train(
        model,
        POINTS,
        lambda model, batch: samestep.weighted((model(batch) - 1.0) ** 2),
        optimizer=SGD,
        batching=samestep.Batching(global_batch=8, micro_batch=2),
        steps=3,
        evaluate=samestep.Evaluation(dataset=POINTS, metric=metric, every=every, micro_batch=4),
        transport=transport,
    )
    return result.fingerprint, result.metrics, int(model.calls)


def test_a_model_that_counts_its_calls_forgets_those_of_the_evaluation() -> None:
    (alone,) = run_threads(lambda t: trained_and_measured(t, 1), 1)
    assert alone[2] == 3 * 4
    for world_size in (1, 2, 3, 7):  # of seven ranks, one has nothing to measure
        for every in (None, 1):
            ended = run_threads(lambda t, e=every: trained_and_measured(t, e), world_size)
            assert ended == [alone] * world_size


def test_a_metric_that_fails_leaves_buffers_and_modes_alone() -> None:
    torch.manual_seed(0)
    model = Counting()

    def metric(model: nn.Module, batch: Tensor) -> samestep.Weighted:
        model.train()
        model(batch)
        raise RuntimeError("the metric broke")

    with samestep.Session() as session:
        session.setup(model.eval(), SGD)
        before = session.fingerprint()
        with pytest.raises(RuntimeError, match="the metric broke"):
            session.evaluate(samestep.Evaluation(dataset=POINTS, metric=metric))
        assert session.fingerprint() == before
        assert not model.training


def test_an_evaluation_draws_nothing_that_training_drew() -> None:
    drawn: dict[str, set[float]] = {"training": set(), "evaluation": set()}
    data = Drawing()

    def draw(kind: str, value: Tensor, batch: Tensor) -> Tensor:
        drawn[kind] |= {float(torch.rand(())), *batch[:, 1].tolist()}
        return value

    samestep.train(
        nn.Linear(2, 1),
        data,
        lambda model, batch: samestep.weighted(draw("training", model(batch).squeeze(1), batch)),
        optimizer=SGD,
        batching=samestep.Batching(global_batch=8, micro_batch=2, shuffle=False),
        steps=1,
        evaluate=samestep.Evaluation(
            dataset=data,
            metric=lambda model, batch: samestep.weighted(draw("evaluation", batch[:, 0], batch)),
            micro_batch=2,
        ),
    )
    assert [len(values) for values in drawn.values()] == [12, 12]
    assert not drawn["training"] & drawn["evaluation"]


class Drawing:
    """Eight samples, with a random number beside each."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(torch.rand(()))])


def test_a_metric_without_weight_is_refused() -> None:
    evaluation = samestep.Evaluation(
        dataset=[1.0, 2.0], metric=lambda model, batch: samestep.weighted(batch, batch < 0)
    )
    with samestep.Session() as session:
        session.setup(nn.Linear(1, 1), lambda params: torch.optim.SGD(params, lr=0.1))
        with pytest.raises(samestep.LossError, match="metric add up to zero"):
            session.evaluate(evaluation)
    with pytest.raises(samestep.ConfigError, match="every is 0"):
        samestep.Evaluation(dataset=[1], metric=lambda model, batch: samestep.weighted(batch), every=0)
