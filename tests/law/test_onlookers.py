"""Evaluations, averages and callbacks look on: a run ends in the bits that it has without them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
import torch
from law_runs import Ended, run

import samestep
from samestep.callbacks.callback import Callback, RunControl
from samestep.callbacks.evaluations import BestCheckpoint, EarlyStopping
from samestep.callbacks.spikes import SpikeWatch
from samestep.comm.transport import Transport
from samestep.optim.ema import EMA
from samestep.testing.threads import run_threads
from samestep.testing.workloads import WORKLOADS


class Reading(Callback):
    """Reads all that there is to read, on every rank, and draws besides."""

    ranks: ClassVar[Literal["all", "first"]] = "all"

    def on_step(self, report: samestep.StepReport, run: RunControl) -> None:
        assert len(run.ids) == report.samples
        assert run.step == report.step
        assert sum(float(p.detach().double().sum()) for p in run.model.parameters()) < float("inf")


def watched(transport: Transport, workload: str, precision: str, strategy: str) -> Ended:
    load = WORKLOADS[workload]()
    rows: list[int] = []

    def metric(model: torch.nn.Module, batch: Any) -> samestep.Weighted:
        values, weights = load.values(model, batch)
        return samestep.weighted(values.float(), weights)

    def predict(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        first = batch[0]
        with torch.no_grad():
            return {
                "size": model(first).float().abs().reshape(len(first), -1).sum(1),
                "rows": [1] * len(first),
            }

    def count(rows: list[int], size: torch.Tensor) -> float:
        return float(size.sum()) * sum(rows)

    evaluation = samestep.Evaluation(
        dataset=load.dataset,
        collate_fn=load.collate_fn,
        metric=metric,
        predict=predict,
        gathered={"count": count},
        every=2,
        micro_batch=8,
    )
    callbacks = [
        Reading(),
        lambda event: rows.append(1),
        SpikeWatch(),
        EarlyStopping("ema/metric", patience=50),
        BestCheckpoint("ema/count"),
    ]
    return run(
        transport,
        workload,
        precision,
        "adamw",
        strategy,
        ema=EMA(decay=0.9, warmup=True, buffers="average"),
        evaluate=evaluation,
        callbacks=callbacks,
    )


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_looks_on_moves_no_bit(workload: str, precision: str) -> None:
    (alone,) = run_threads(lambda t: run(t, workload, precision, "adamw", "replicate"), 1)
    for world_size, strategy in ((1, "replicate"), (3, "zero1")):
        ended = run_threads(lambda t, s=strategy: watched(t, workload, precision, s), world_size)
        assert ended == [alone] * world_size
