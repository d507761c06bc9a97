"""What ranks must have in common: made equal where there are values to copy, refused by name elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from samestep.comm.transport import Transport
from samestep.errors import Disagreement
from samestep.numerics.fingerprint import fingerprint
from samestep.sync.agreement import make_model_equal, require_equal
from samestep.testing.threads import run_threads

CPU = torch.device("cpu")


class Zoo(nn.Module):
    """Tensors of kinds that a copy might get wrong."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.wide = nn.Parameter(torch.randn(3, generator=draw, dtype=torch.float64))
        self.brain = nn.Parameter(torch.randn(3, generator=draw).bfloat16())
        self.spin = nn.Parameter(torch.randn(3, generator=draw, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(3, 2, generator=draw).t())
        self.frozen = nn.Parameter(torch.randn((), generator=draw), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0))
        self.register_buffer("flags", torch.rand(5, generator=draw) > 0.5)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("features", torch.randn(2, generator=draw), persistent=False)
        self.same = nn.Parameter(torch.ones(2))


def everything(model: nn.Module) -> str:
    return fingerprint([*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_other_values_are_made_those_of_the_first_rank(world_size: int) -> None:
    def work(transport: Transport) -> tuple[list[str], str]:
        model = Zoo(transport.rank)
        strides = model.turned.stride()
        names = make_model_equal(model, transport, device=CPU)
        assert model.turned.stride() == strides
        return names, everything(model)

    wanted = everything(Zoo(0))
    told = ["wide", "brain", "spin", "turned", "frozen", "flags", "count", "features"]
    for names, ended in run_threads(work, world_size):
        assert ended == wanted
        assert set(names) == (set(told) if world_size > 1 else set())
        assert "same" not in names


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda rank: nn.Linear(2, 3 + rank // 2), r"weight \(3, 2\) float32 on rank 0, but weight \(4, 2\)"),
        (lambda rank: nn.Linear(2, 3, bias=rank < 2), "number of parameters and buffers: 2 on rank 0, but 1"),
        (
            lambda rank: nn.Linear(2, 3, dtype=torch.float64 if rank == 2 else torch.float32),
            "float32 on rank 0, but .* float64 on rank 2",
        ),
        (
            lambda rank: nn.ModuleDict({"head" if rank == 2 else "top": nn.Linear(2, 3)}),
            "top.weight .* on rank 0, but head.weight",
        ),
    ],
)
def test_another_shape_name_dtype_or_number_is_refused_on_every_rank(
    make: Callable[[int], nn.Module], named: str
) -> None:
    def work(transport: Transport) -> str:
        model = make(transport.rank)
        with pytest.raises(Disagreement, match=named) as caught:
            make_model_equal(model, transport, device=CPU)
        return str(caught.value)

    told = run_threads(work, 3)
    assert len(set(told)) == 1
    assert "rank 2" in told[0]


def test_facts_are_compared_by_name() -> None:
    def work(transport: Transport) -> str:
        require_equal(transport, {"the seed": 1, "the size": 0.1}, device=CPU)
        require_equal(transport, {}, device=CPU)
        with pytest.raises(Disagreement) as caught:
            require_equal(transport, {"the seed": 1, "the size": transport.rank // 2}, device=CPU)
        return str(caught.value)

    for text in run_threads(work, 4):
        assert text.startswith("the size: 0 on rank 0, but 1 on rank 2.")


def test_a_fact_that_one_rank_does_not_know_is_told() -> None:
    def work(transport: Transport) -> str:
        facts = {"the seed": 1} if transport.rank != 1 else {}
        with pytest.raises(Disagreement) as caught:
            require_equal(transport, facts, device=CPU)
        return str(caught.value)

    for text in run_threads(work, 3):
        assert text.startswith("the seed: 1 on rank 0, but nothing on rank 1.")
