"""A small script of a user's, as each launcher starts it: it prints its place and the fingerprint."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import samestep
from samestep.cli.doctor import doctor
from samestep.topology.environment import Environment


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> samestep.Weighted:
    inputs, targets = batch
    return samestep.weighted(functional.mse_loss(model(inputs), targets, reduction="none").sum(1))


def fingerprint() -> str:
    """Collective. Train a small model; global batches of 7 in micro-batches of 2 suit no number of ranks."""
    torch.manual_seed(1)
    data = [(torch.randn(5), torch.randn(2)) for _ in range(23)]
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    return samestep.train(
        model,
        data,
        loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batching=samestep.Batching(global_batch=7, micro_batch=2),
        steps=5,
        timeout_s=100,
    ).fingerprint


def look(path: str) -> None:
    """Collective. Have the doctor look at the same ranks; what it prints on the first goes to a file."""
    with io.StringIO() as text, contextlib.redirect_stdout(text):
        with contextlib.suppress(SystemExit):
            doctor(as_json=True)
        if text.getvalue():
            Path(path).write_text(text.getvalue())


if __name__ == "__main__":
    place = Environment.current().place()
    told = (place.launcher, place.rank, place.world_size, place.local_rank, place.local_world_size)
    # One write: lines of several ranks must not mix.
    sys.stdout.write("|".join(map(str, (*told, fingerprint()))) + "\n")
    if sys.argv[1:]:
        look(sys.argv[1])
