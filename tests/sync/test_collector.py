"""The collector: one sum per parameter, however the gradients come."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from samestep.errors import LossError
from samestep.numerics.fold import fold
from samestep.sync.collector import Collector
from samestep.sync.layout import Bucket, lay_out
from samestep.sync.partial_sums import plan_ordered


def make(
    *parameters: Parameter, sums: torch.dtype | None = None, bucket: int = 64
) -> tuple[Collector, list[Bucket]]:
    named = [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]
    layout = lay_out(named, world_size=1, whole=False, sums=sums, bucket=bucket)
    return Collector(layout, list(parameters)), list(layout.buckets)


def collect(collector: Collector, losses: list[Tensor], ready: list[int] | None = None) -> Tensor:
    """Differentiate one loss per leaf and return the sum of the first parameter's gradients."""
    plan = plan_ordered(range(len(losses)), len(losses))
    collector.begin(plan, lambda bucket: ready.append(bucket.index) if ready is not None else None)
    for leaf, loss in enumerate(losses):
        with collector.leaf(leaf):
            loss.backward()
    return collector.buffers[plan.result].views[0]


@settings(max_examples=40, deadline=None)
@given(num_leaves=st.integers(1, 12), scale=st.sampled_from([1e-45, 1e-42, 1e-38, 1.0]))
@pytest.mark.parametrize("sums", [None, torch.bfloat16])
def test_no_negative_zero_enters_a_sum(num_leaves: int, scale: float, sums: torch.dtype | None) -> None:
    """Else it would matter whether the zeros of an unused parameter are added."""
    p = Parameter(torch.zeros(2))
    collector, _ = make(p, sums=sums)
    total = collect(collector, [(p * torch.tensor([-0.0, -scale])).sum() for _ in range(num_leaves)])
    zero = total == 0
    assert not bool(torch.signbit(total[zero]).any())


def test_parameters_that_are_not_used_have_zeros_and_are_not_marked() -> None:
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    collector, _ = make(p, q)
    for _ in range(2):  # what the first step left must not stay
        collect(collector, [p.sum(), p.sum()])
        assert list(collector.used) == [1, 0]
        assert torch.equal(collector.buffers[0].views[1], torch.zeros(3))
        collect(collector, [q.sum()])
        assert list(collector.used) == [0, 1]
        assert torch.equal(collector.buffers[0].views[0], torch.zeros(3))


def test_a_bucket_is_ready_as_soon_as_its_last_gradient_is_there() -> None:
    p, q = Parameter(torch.ones(64)), Parameter(torch.ones(64))
    collector, buckets = make(p, q)
    assert len(buckets) == 2
    collect(collector, [p.sum() + q.sum()])  # the first leaf is watched
    order: list[str] = []

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            order.append("first parameter's backward")
            return gradient

    plan = plan_ordered(range(2), 2)
    collector.begin(plan, lambda bucket: order.append(f"bucket of {bucket.slots}"))
    for leaf in range(2):
        with collector.leaf(leaf):
            hidden = Mark.apply(p * 1.0)
            (hidden * q).sum().backward()
    assert order == [
        "first parameter's backward",
        "bucket of (1,)",
        "first parameter's backward",
        "bucket of (0,)",
    ]
    assert torch.equal(collector.buffers[0].views[1], torch.full((64,), 2.0))


def test_reentrant_recomputation_sums_whole_leaves() -> None:
    """A parameter used in two nested passes gets its gradient in two parts, and the tree stays the same."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(5, 3, generator=generator, requires_grad=True) for _ in range(6)]
    p = Parameter(torch.randn(3, 3, generator=generator))

    def twice(x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(y @ p), x, use_reentrant=True)
        return x.sum()

    leaves = []
    for x in inputs:
        p.grad = None
        twice(x).backward()
        leaves.append(p.grad.clone() + 0.0)
    collector, _ = make(p)
    for _ in range(2):
        assert torch.equal(collect(collector, [twice(x) for x in inputs]), fold(leaves))


def test_parts_that_come_only_later_are_refused_by_name() -> None:
    p = Parameter(torch.ones(3))
    collector, _ = make(p)
    collect(collector, [p.sum()])
    x = torch.ones(3, requires_grad=True)
    nested = checkpoint(
        lambda y: y * p, checkpoint(lambda y: y * p, x, use_reentrant=True), use_reentrant=True
    )
    with pytest.raises(LossError, match="parameter p0 got its gradient in two parts"):
        collect(collector, [nested.sum()])


def test_sparse_gradients_become_dense() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    collector, _ = make(table.weight)
    total = collect(collector, [table(torch.tensor([1, 1, 3])).sum() for _ in range(3)])
    assert total.sum(1).tolist() == [0, 12, 0, 6, 0]


def test_gradients_in_very_many_parts() -> None:
    """A recurrent loop of nested passes: more parts than a byte counts."""
    p = Parameter(torch.ones(3))
    collector, _ = make(p)

    def nested() -> Tensor:
        x = torch.ones(3, requires_grad=True)
        for _ in range(300):
            x = checkpoint(lambda y: y + p, x, use_reentrant=True)
        return x.sum()

    for _ in range(2):
        assert torch.equal(collect(collector, [nested(), nested()]), torch.full((3,), 600.0))
        assert list(collector.used) == [1]


def test_a_gradient_made_outside_a_leaf_is_refused_by_name_while_a_step_is_begun() -> None:
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    collector, _ = make(p, q)
    collect(collector, [p.sum(), p.sum()])
    with pytest.raises(LossError, match=r"parameter p1 got a gradient outside of micro\.collect"):
        q.sum().backward()
    with pytest.raises(LossError, match=r"parameter p1 got a gradient outside"), collector.leaf(0):
        pass  # it is there although it was refused
    collector.end()
    q.grad = None
    q.sum().backward()
    assert q.grad is not None  # between the steps, gradients are the user's own
    assert torch.equal(collect(collector, [p.sum() * 2]), torch.full((3,), 2.0))
    assert list(collector.used) == [1, 0]


def test_a_gradient_that_was_set_by_hand_counts_where_backward_passes_only() -> None:
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    collector, _ = make(p, q)
    for _ in range(2):
        collector.begin(plan_ordered(range(2), 2), lambda bucket: None)
        for leaf in range(2):
            with collector.leaf(leaf):
                p.grad, q.grad = torch.ones(3), torch.ones(3)
                p.sum().backward()
        assert torch.equal(collector.buffers[0].views[0], torch.full((3,), 4.0))
        assert torch.equal(collector.buffers[0].views[1], torch.zeros(3))
        assert list(collector.used) == [1, 0]


def test_a_leaf_that_breaks_off_leaves_nothing_at_work() -> None:
    p = Parameter(torch.ones(3))
    collector, _ = make(p)
    collector.begin(plan_ordered(range(1), 1), lambda bucket: None)
    with pytest.raises(KeyError), collector.leaf(0):
        p.sum().backward()
        raise KeyError
    assert p.grad is None
    collector.end()
    collector.close()
    assert torch.equal(collect(collector, [p.sum() * 0]), torch.zeros(3))
