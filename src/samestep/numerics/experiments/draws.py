"""Experiments: random draws from a seed, and updates of parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from samestep.numerics.experiments.operation import Draw, Inputs, Operation


def _draw(name: str, run: Callable[[Tensor], Tensor], *shape: int) -> Operation:
    def seeded(inputs: Inputs) -> Tensor:
        torch.manual_seed(1)
        return run(inputs["x"])

    return Operation(name=name, inputs=lambda draw: {"x": draw.uniform(*(shape or (300, 1000)))}, run=seeded)


def _parameters(draw: Draw) -> dict[str, Tensor]:
    shapes = {"matrix": (300, 257), "vector": (257,), "scalar": ()}
    return {name: draw.normal(*shape) for name, shape in shapes.items()} | {
        f"gradient of {name}": draw.normal(*shape).detach() for name, shape in shapes.items()
    }


def _update(name: str, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Operation:
    def run(inputs: Inputs) -> tuple[Tensor, ...]:
        parameters = [value.detach().clone() for value in inputs.values() if value.requires_grad]
        optimizer = make(parameters)
        for scale in (1.0, 0.5):
            for place, parameter in enumerate(parameters):
                parameter.grad = list(inputs.values())[len(parameters) + place] * scale
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        return tuple(parameters)

    return Operation(name=name, inputs=_parameters, run=run)


OPERATIONS = (
    _draw("dropout", lambda x: F.dropout(x, 0.3)),
    _draw("bernoulli", torch.bernoulli),
    _draw("randn", torch.randn_like),
    _draw("rand", torch.rand_like),
    _draw("multinomial", lambda x: torch.multinomial(x.detach(), 5), 64, 500),
    _draw("randperm", lambda x: torch.randperm(x.numel(), device=x.device)),
    _draw("poisson", lambda x: torch.poisson(x.detach() * 3)),
    _draw("exponential_", lambda x: torch.empty_like(x).exponential_()),
    _draw("gumbel_softmax", F.gumbel_softmax, 64, 500),
    _draw("rrelu", lambda x: F.rrelu(x - 0.5, training=True)),
    _draw(
        "fractional_max_pool2d", lambda x: F.fractional_max_pool2d(x, 2, output_size=(13, 13)), 8, 16, 28, 28
    ),
    _draw("multinomial, with replacement", lambda x: torch.multinomial(x.detach(), 900, True), 64, 500),
    _update("SGD with momentum, two updates", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    _update("AdamW, two updates", lambda p: torch.optim.AdamW(p, foreach=False)),
    _update("AdamW foreach, two updates", lambda p: torch.optim.AdamW(p, foreach=True)),
    _update("AdamW fused, two updates", lambda p: torch.optim.AdamW(p, fused=True)),
)
