"""What is known of optimizers: which may run on parts of parameters, and which may mix parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.optim.elementwise import ELEMENTWISE, couples_parameters, is_elementwise
from samestep.testing.threads import run_threads
from samestep.testing.workloads import Drawn


class GlobalNorm(torch.optim.SGD):
    """Divides all gradients by their common norm: no rank can do that with a part of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / norm, alpha=0.1)


class Signs(torch.optim.SGD):
    """Moves each element by the sign of its gradient."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=0.01)


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_parts_of_a_parameter_get_the_bits_of_the_whole(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    start, cut = torch.randn(1000), 448  # a multiple of the alignment of tiles
    whole = nn.Parameter(start.clone())
    parts = [nn.Parameter(start[:cut].clone()), nn.Parameter(start[cut:].clone())]
    optimizers = [kind([whole]), kind([parts[0]]), kind([parts[1]])]
    for _ in range(5):
        gradient = torch.randn(1000)
        whole.grad, parts[0].grad, parts[1].grad = gradient, gradient[:cut].clone(), gradient[cut:].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole.detach(), torch.cat([part.detach() for part in parts]))


def train(strategy: str, kind: Any, said: list[str], transport: Any) -> str:
    def listen(event: samestep.Event) -> None:
        if isinstance(event, samestep.Notice):
            said.append(event.message)

    def loss(model: nn.Module, batch: Tensor) -> samestep.Weighted:
        return samestep.weighted(model(batch).square().sum(1))

    with transport.turn():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3))
    return samestep.train(
        model,
        Drawn(12, lambda generator: torch.randn(4, generator=generator)),
        loss,
        optimizer=lambda params: kind(params, lr=0.1),
        batching=samestep.Batching(global_batch=6, micro_batch=1),
        steps=3,
        strategy=strategy,
        callbacks=[listen],
        transport=transport,
    ).fingerprint


def test_an_optimizer_that_may_mix_parameters_is_named_under_zero1() -> None:
    assert couples_parameters(GlobalNorm([nn.Parameter(torch.ones(1))], lr=0.1))
    said: list[str] = []
    run_threads(lambda t: train("zero1", GlobalNorm, said, t), 2)
    assert any("GlobalNorm is not known to update each parameter by itself" in text for text in said)
    said.clear()
    ended = {f for n in (1, 2, 3) for f in run_threads(lambda t: train("replicate", GlobalNorm, said, t), n)}
    assert len(ended) == 1
    assert not said


def test_a_class_says_of_itself_that_it_is_elementwise() -> None:
    assert is_elementwise(Signs([nn.Parameter(torch.ones(1))], lr=0.1))
    said: list[str] = []
    strategies = ("replicate", "zero1")
    ended = {
        f
        for s in strategies
        for n in (1, 2, 3)
        for f in run_threads(lambda t, s=s: train(s, Signs, said, t), n)
    }
    assert len(ended) == 1
    assert not said
