"""The gradient-noise scale of whole runs: the same bits on any ranks, and nothing of the run is moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.comm.transport import Transport
from samestep.loop.noise import GradientNoise
from samestep.testing.threads import run_threads
from samestep.testing.workloads import mlp_with_dropout


def several(model: nn.Module, batch: Any) -> dict[str, samestep.Weighted]:
    values, weights = mlp_with_dropout().values(model, batch)
    return {"a": samestep.weighted(values, weights), "b": samestep.weighted(values.square(), coefficient=0.1)}


def run(
    transport: Transport,
    strategy: str,
    *,
    measures: bool = True,
    precision: str = "fp32",
    terms: bool = False,
) -> tuple[str, list[GradientNoise | None]]:
    load = mlp_with_dropout()
    with transport.turn():
        torch.manual_seed(0)
        model = load.make_model()
    found: list[GradientNoise | None] = []
    session = samestep.Session(transport=transport, strategy=strategy, precision=precision, clip_norm=0.1)
    single = lambda model, batch: samestep.weighted(*load.values(model, batch))  # noqa: E731
    weights = lambda batch: {"a": float(batch[2].sum()), "b": float(batch[1].numel() / 3)}  # noqa: E731
    with session:
        session.setup(model, lambda params: torch.optim.SGD(params, lr=0.05))
        engine = session._engine
        if measures:
            engine.measure_noise()
        batching = samestep.Batching(global_batch=10, micro_batch=3)
        asked = session.batches(load.dataset, batching, steps=5, weights=weights if terms else None)
        for batch in asked:
            for micro in batch:
                with micro.collect() as record:
                    record((several if terms else single)(model, micro.data))
            session.step(batch)
            found.append(engine.noise)
        return session.fingerprint(), found


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_it_has_the_same_bits_on_any_ranks_and_moves_none(precision: str) -> None:
    (plain,) = run_threads(lambda t: run(t, "replicate", measures=False, precision=precision), 1)
    (alone,) = run_threads(lambda t: run(t, "replicate", precision=precision), 1)
    assert alone[0] == plain[0]
    assert plain[1] == [None] * 5
    measured = [noise for noise in alone[1] if noise is not None]
    assert all(noise.trace > 0 for noise in measured)
    assert len(measured) == 5 if precision == "fp32" else 0 < len(measured) < 5  # overflows have none
    for world_size, strategy in ((2, "zero1"), (3, "replicate"), (5, "zero1")):
        ended = run_threads(lambda t, s=strategy: run(t, s, precision=precision), world_size)
        assert ended == [alone] * world_size


def test_several_loss_terms_are_measured_by_samples() -> None:
    (alone,) = run_threads(lambda t: run(t, "replicate", terms=True), 1)
    assert all(noise is not None and noise.weight == noise.samples for noise in alone[1])
    assert run_threads(lambda t: run(t, "zero1", terms=True), 3) == [alone] * 3
