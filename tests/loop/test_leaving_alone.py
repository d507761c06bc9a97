"""A rank that leaves by a SystemExit of its own: it waits for nobody, and the others hear of it."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import samestep
from samestep.comm.transport import Transport
from samestep.testing.threads import run_threads


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_others_do_not_wait_for_it(code: int) -> None:
    lost: list[int] = []

    def run(transport: Transport) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> samestep.Weighted:
            if transport.rank == 1:
                raise SystemExit(code)
            return samestep.weighted(model(batch).square().flatten())

        with transport.turn():
            torch.manual_seed(0)
            model = nn.Linear(4, 1)
        try:
            samestep.train(
                model,
                torch.randn(12, 4),
                loss,
                optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
                batching=samestep.Batching(global_batch=6, micro_batch=2),
                steps=3,
                transport=transport,
            )
        except samestep.PeerLost:
            lost.append(transport.rank)
            raise

    began = time.monotonic()
    with pytest.raises(SystemExit):
        run_threads(run, 3)
    assert sorted(lost) == [0, 2]
    assert time.monotonic() - began < 30  # far below the limit of a wait
