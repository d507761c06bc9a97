"""One small run that works, and what a user may do wrong to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import samestep
from samestep.comm.transport import Transport
from samestep.testing.threads import run_threads


class Data:
    """Rows of four numbers and a target."""

    def __init__(self, num_samples: int = 24) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        row = torch.arange(4.0) * (index + 1) / 10
        return row, row.sum() / 3


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))


def errors_of(model: nn.Module, batch: Any) -> Tensor:
    rows, targets = batch
    values: Tensor = (model(rows)[:, 0] - targets) ** 2
    return values


def loss(model: nn.Module, batch: Any) -> samestep.Weighted:
    return samestep.weighted(errors_of(model, batch))


def train(transport: Transport | None = None, **changes: Any) -> samestep.Result:
    """Train three steps; `changes` replace arguments of samestep.train, `make_model` the model's maker."""
    with transport.turn() if transport else nullcontext():
        torch.manual_seed(0)
        model = changes.pop("make_model", make_model)()
    arguments: dict[str, Any] = {
        "dataset": Data(),
        "loss": loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "batching": samestep.Batching(global_batch=12, micro_batch=2),
        "steps": 3,
        "transport": transport,
        **changes,
    }
    return samestep.train(model, **arguments)


def train_each(make: Callable[[int], dict[str, Any]], world_size: int = 3) -> list[samestep.Result]:
    """Train on ranks that are threads, each with the changes that `make(rank)` returns."""
    return run_threads(lambda transport: train(transport, **make(transport.rank)), world_size, timeout_s=20)


def fingerprints(make: Callable[[], dict[str, Any]]) -> list[str]:
    """Return what runs of 1, 2 and 3 ranks end with, each made anew."""
    alone = [train(**make()).fingerprint]
    return alone + [train_each(lambda _: make(), size)[0].fingerprint for size in (2, 3)]
