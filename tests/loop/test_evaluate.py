"""Evaluation sees each sample once and gives the same bits on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.comm.transport import Transport
from samestep.testing.threads import run_threads
from samestep.testing.workloads import cnn_with_batch_norm


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
