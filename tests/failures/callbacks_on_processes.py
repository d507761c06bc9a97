"""Callbacks that fail on one rank: on ranks of any kind."""

from __future__ import annotations

import threading
from typing import Any, ClassVar, Literal

import torch
from torch import nn

import samestep
from samestep.callbacks.callback import Callback, RunControl
from samestep.comm.connect import connect
from samestep.comm.transport import Transport
from samestep.testing.workloads import Drawn
from samestep.topology.environment import Place

TIMEOUT_S = 6.0


class Failing(Callback):
    """Fails on rank 1 in step 1."""

    ranks: ClassVar[Literal["all", "first"]] = "all"

    def __init__(self, how: str) -> None:
        self.how = how

    def on_step(self, report: samestep.StepReport, run: RunControl) -> None:
        if run.rank == 1 and report.step == 1:
            if self.how == "raises":
                raise ValueError("it broke")
            threading.Event().wait(600)


def train(transport: Transport, *callbacks: Any, **changes: Any) -> samestep.Result:
    def loss(model: nn.Module, batch: Any) -> samestep.Weighted:
        return samestep.weighted((model(batch[0])[:, 0] - batch[1]) ** 2)

    with transport.turn():
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
    data = Drawn(40, lambda g: (torch.randn(3, generator=g), torch.randn((), generator=g)))
    arguments: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05),
        "batching": samestep.Batching(global_batch=8, micro_batch=2),
        "steps": 12,
        "timeout_s": TIMEOUT_S,
    }
    return samestep.train(
        model, data, loss, callbacks=callbacks, transport=transport, **{**arguments, **changes}
    )


def fail(place: Place, how: str) -> None:
    """Train as one process of several, with a callback that fails on one of them."""
    train(connect(place, device=torch.device("cpu"), timeout_s=TIMEOUT_S), Failing(how))
