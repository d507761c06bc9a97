"""A small script of a user's, as each launcher starts it: it prints its place and the fingerprint."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional

import samestep
from samestep.topology.environment import Environment


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> samestep.Weighted:
    inputs, targets = batch
    return samestep.weighted(functional.mse_loss(model(inputs), targets, reduction="none").sum(1))


torch.manual_seed(1)
data = [(torch.randn(5), torch.randn(2)) for _ in range(23)]
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
result = samestep.train(
    model,
    data,
    loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batching=samestep.Batching(global_batch=7, micro_batch=2),
    steps=5,
    timeout_s=60,
)
place = Environment.current().place()
where = f"{place.launcher}|{place.rank}|{place.world_size}|{place.local_rank}|{place.local_world_size}"
sys.stdout.write(f"{where}|{result.fingerprint}\n")
