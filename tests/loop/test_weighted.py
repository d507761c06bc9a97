"""A loss is a sum and a weight, and whatever is not is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import samestep
from samestep.errors import LossError
from samestep.loop.weighted import Weighted, check_loss, weighted
from samestep.testing.workloads import Drawn

DATASET = Drawn(12, lambda g: torch.randn(3, generator=g))


def test_every_value_counts_one_where_no_weight_is_given() -> None:
    got = weighted(torch.arange(6.0).view(2, 3))
    assert (float(got.total), got.weight, got.coefficient) == (15.0, 6.0, 1.0)
    assert weighted(torch.empty(0)).weight == 0.0


def test_a_mask_counts_its_true_ones() -> None:
    got = weighted(torch.arange(6.0).view(2, 3), torch.tensor([True, False, True]))
    assert (float(got.total), got.weight) == (0.0 + 2 + 3 + 5, 4.0)


def test_weights_broadcast_to_values() -> None:
    values = torch.arange(6.0).view(2, 3)
    assert weighted(values, torch.tensor([[1], [2]])).weight == 9.0
    assert weighted(values, 0.5).weight == 3.0
    assert float(weighted(values, 2).total) == 30.0
    with pytest.raises(LossError, match=r"values of shape \(2, 3\) and weights of shape \(2,\)"):
        weighted(values, torch.ones(2))
    with pytest.raises(LossError, match="must broadcast to the values"):
        weighted(torch.ones(3), torch.ones(2, 3))


@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20),
    data=st.data(),
)
def test_sum_of_value_times_weight(values: list[float], data: Any) -> None:
    weights = data.draw(st.lists(st.floats(0, 10, width=32), min_size=len(values), max_size=len(values)))
    got = weighted(torch.tensor(values).double(), torch.tensor(weights).double())
    assert float(got.total) == pytest.approx(
        sum(v * w for v, w in zip(values, weights, strict=True)), abs=1e-9
    )
    assert got.weight == pytest.approx(sum(weights), abs=1e-12)


@pytest.mark.parametrize("spoilt", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_what_weighs_nothing_is_left_out_even_where_it_is_not_finite(
    spoilt: float, kind: torch.dtype
) -> None:
    values = torch.tensor([1.0, spoilt, 3.0], requires_grad=True)
    got = weighted(values, torch.tensor([1, 0, 1]).to(kind))
    assert (float(got.total.detach()), got.weight) == (4.0, 2.0)
    got.total.backward()
    assert values.grad.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_values_are_summed_in_float32(dtype: torch.dtype) -> None:
    assert float(weighted(torch.ones(5000, dtype=dtype)).total) == 5000.0
    assert weighted(torch.ones(3, dtype=dtype), torch.ones(3)).total.dtype == torch.float32
    # A scalar too: the loss scale that it is multiplied with is beyond float16.
    assert weighted(torch.ones((), dtype=dtype), weight=1).total.dtype == torch.float32


def test_counts_are_exact_beyond_float32() -> None:
    assert weighted(torch.ones(3), torch.tensor([2**24, 1, 1])).weight == 2**24 + 2
    tenth = torch.tensor([0.1], dtype=torch.float64)
    assert weighted(torch.ones(3), tenth).weight == float(tenth.expand(3).sum())


def test_weights_are_data_and_get_no_gradient() -> None:
    values, weights = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    weighted(values, weights * 2).total.backward()
    assert weights.grad is None
    assert values.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_scalar_is_a_sum_and_needs_its_weight() -> None:
    assert weighted(torch.tensor(6.0), weight=3).weight == 3.0
    assert weighted(torch.tensor(6.0), torch.tensor(3), coefficient=0.5) == Weighted(
        torch.tensor(6.0), 3.0, 0.5
    )
    with pytest.raises(LossError, match="a scalar without a weight"):
        weighted(torch.tensor(6.0))
    with pytest.raises(LossError, match=r"a scalar value but weights of shape \(2,\)"):
        weighted(torch.tensor(6.0), torch.ones(2))


@pytest.mark.parametrize("values", [3.0, None, [1.0], torch.tensor([1]), torch.tensor([True])])
def test_values_that_are_no_real_tensor_are_refused(values: Any) -> None:
    with pytest.raises(LossError, match="it needs a tensor of real numbers"):
        weighted(values)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (torch.tensor(1.0), r"bare tensor of shape \(\).*Write return samestep\.weighted"),
        (torch.ones(3), r"bare tensor of shape \(3,\)"),
        (None, "the loss returned a NoneType"),
        (1.0, "the loss returned a float"),
        ((torch.ones(1), 1), "the loss returned a tuple"),
        ({}, "an empty dict"),
        ({"a": torch.tensor(1.0)}, "loss term a is a tensor of shape"),
        ({"a": weighted(torch.ones(1)), "b": 2}, "loss term b is a int"),
    ],
)
def test_other_results_are_refused_with_the_reason(result: object, reason: str) -> None:
    with pytest.raises(LossError, match=reason):
        check_loss(result)


def train(loss: Any, **settings: Any) -> samestep.Result:
    torch.manual_seed(0)
    return samestep.train(
        nn.Linear(3, 1),
        DATASET,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batching=samestep.Batching(global_batch=6, micro_batch=2),
        steps=2,
        **settings,
    )


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: weighted(batch.sum(1)),
        lambda model, batch: weighted(model(batch).detach()),
        lambda model, batch: {"a": weighted(batch.sum(1))},
    ],
)
def test_a_loss_that_needs_no_gradient_is_refused(loss: Any) -> None:
    with pytest.raises(LossError, match="does not depend on any trainable parameter"):
        train(loss)


def test_a_bare_mean_is_refused_in_training() -> None:
    with pytest.raises(LossError, match="bare tensor"):
        train(lambda model, batch: model(batch).mean())


@pytest.mark.parametrize("weight", [-1.0, torch.nan])
@pytest.mark.parametrize("terms", [False, True])
def test_weights_that_mean_nothing_are_refused_in_training(weight: float, terms: bool) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Any:
        one = weighted(model(batch).squeeze(1), weight)
        return {"one": one, "other": weighted(model(batch))} if terms else one

    with pytest.raises(LossError, match="add up to"):
        train(loss)


def test_a_coefficient_scales_loss_and_gradient() -> None:
    def loss(factor: float) -> Any:
        return lambda model, batch: weighted(model(batch).squeeze(1) ** 2, coefficient=factor)

    once, twice = train(loss(1.0)).history[0], train(loss(2.0)).history[0]
    assert twice.loss == 2 * once.loss
    assert twice.grad_norm == 2 * once.grad_norm


def test_weights_of_any_size_give_the_same_mean() -> None:
    """Importance weights may be as small as they like: only their ratios count."""

    def loss(size: float) -> Any:
        # The weight alone is tiny: the sum of the losses is no float32 any more.
        return lambda model, batch: weighted(model(batch).squeeze(1) ** 2, torch.full((1,), size).double())

    tiny = train(loss(1e-50))
    assert all(bool(p.isfinite().all()) for p in tiny.model.parameters())
    small, usual = train(loss(2.0**-60)), train(loss(1.0))
    assert small.fingerprint == usual.fingerprint
