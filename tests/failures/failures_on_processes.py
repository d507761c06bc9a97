"""What ranks that are processes do in the tests: a rank that dies or falls silent in the middle of a step."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from failures_inputs import Data, loss, make_model
from torch import nn

import samestep
from samestep.comm.connect import connect
from samestep.topology.environment import Place


def train_and(place: Place, what: str, timeout_s: float) -> str:
    """Train as a rank; in step 1, rank 1 does `what` while the others are in the step already."""
    torch.manual_seed(0)
    transport = connect(place, device=torch.device("cpu"), timeout_s=timeout_s)
    seen: list[int] = []

    def falling(model: nn.Module, batch: Any) -> samestep.Weighted:
        seen.append(len(seen))
        if place.rank == 1 and len(seen) == 3:
            fall(what)
        return loss(model, batch)

    result = samestep.train(
        make_model(),
        Data(),
        falling,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        batching=samestep.Batching(global_batch=12, micro_batch=2),
        steps=3,
        transport=transport,
    )
    return result.fingerprint


def fall(what: str) -> None:
    """End or stop this process without a word."""
    if what == "nothing":
        return
    if what == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)
