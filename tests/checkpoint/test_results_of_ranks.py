"""What `train` returns after a resume: the same on every rank, the steps before it included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import samestep
from samestep.comm.transport import Transport
from samestep.testing.threads import run_threads


def train(folder: Path, steps: int, world_size: int) -> list[samestep.Result]:
    def run(transport: Transport) -> samestep.Result:
        with transport.turn():
            torch.manual_seed(0)
            model = nn.Linear(4, 1)
        return samestep.train(
            model,
            torch.randn(12, 4, generator=torch.Generator().manual_seed(0)),
            lambda model, batch: samestep.weighted(model(batch).square().flatten()),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            batching=samestep.Batching(global_batch=6, micro_batch=2),
            steps=steps,
            checkpoint=samestep.Checkpointing(every=2),
            folder=folder,
            transport=transport,
        )

    return run_threads(run, world_size)


def test_every_rank_has_the_whole_history(tmp_path: Path) -> None:
    for steps, world_size in ((3, 2), (5, 3), (5, 2)):  # the last one finds nothing left to do
        results = train(tmp_path / "run", steps, world_size)
        first = [replace(report, seconds=0.0) for report in results[0].history]
        assert [report.step for report in first] == list(range(steps))
        for result in results:
            assert [replace(report, seconds=0.0) for report in result.history] == first
            assert (result.loss, result.step, result.applied) == (first[-1].loss, steps, steps)
