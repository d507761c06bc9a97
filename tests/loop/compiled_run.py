"""What each process of the tests of torch.compile runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import samestep
from samestep.comm.connect import connect
from samestep.testing.workloads import Drawn
from samestep.topology.environment import Place


def train_compiled(place: Place, backend: str | None) -> tuple[str, list[float | None]]:
    """Train a small model with dropout and running statistics; return how it ended."""
    transport = connect(place, device=torch.device("cpu"), timeout_s=200)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 1)
    )
    if backend is not None:
        model = torch.compile(model, backend=backend, dynamic=False)

    def loss(model: nn.Module, batch: Tensor) -> samestep.Weighted:
        return samestep.weighted((model(batch).squeeze(1) - 1.0) ** 2)

    result = samestep.train(
        model,
        Drawn(24, lambda g: torch.randn(3, generator=g)),
        loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        batching=samestep.Batching(global_batch=8, micro_batch=2),
        steps=3,
        digest_every=1,
        transport=transport,
        timeout_s=200,
    )
    transport.ballot(torch.zeros(1, dtype=torch.int64))
    transport.close()
    return result.fingerprint, [report.loss for report in result.history]
