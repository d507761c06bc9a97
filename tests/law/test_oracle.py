"""Gradients against a plain loop over the whole batch in float64, and steps against a plain training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import samestep
from samestep.comm.transport import Transport
from samestep.testing.threads import run_threads

WIDTH = 5


class Ragged:
    """Samples of 1 to 7 rows, in float64, each row with a weight of its own; some weigh nothing at all."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        rows = int(torch.randint(1, 8, (), generator=draw))
        kept = torch.rand(rows, generator=draw, dtype=torch.float64)
        weights = torch.where(kept < 0.3, 0.0, kept) if index % 5 else torch.zeros(rows).double()
        return (
            torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64),
            torch.randn(rows, generator=draw, dtype=torch.float64),
            weights,
        )


def collate(samples: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*samples, strict=True)]


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def values(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, targets, _ = batch
    result: Tensor = (model(inputs).squeeze(-1) - targets) ** 2
    return result


def train(transport: Transport, num_samples: int, **settings: Any) -> samestep.Result:
    with transport.turn():
        model = make_model()
    return samestep.train(
        model,
        Ragged(num_samples),
        lambda model, batch: samestep.weighted(values(model, batch), batch[2]),
        collate_fn=collate,
        transport=transport,
        **settings,
    )


def plain(num_samples: int, global_batches: list[list[int]], make: Callable[..., Any]) -> nn.Module:
    model = make_model()
    optimizer = make(model.parameters())
    data = Ragged(num_samples)
    for ids in global_batches:
        batch = collate([data[i] for i in ids])
        optimizer.zero_grad()
        if batch[2].sum() > 0:
            ((values(model, batch) * batch[2]).sum() / batch[2].sum()).backward()
            optimizer.step()
    return model


def off_by(model: nn.Module, wanted: nn.Module, start: nn.Module) -> float:
    """Largest deviation of a parameter over the largest move of any parameter."""
    models = (model, wanted, start)
    triples = list(zip(*([p.detach() for p in m.parameters()] for m in models), strict=True))
    move = max(float((w - s).abs().max()) for _, w, s in triples)
    deviation = max(float((g - w).abs().max()) for g, w, _ in triples)
    return deviation / move if move else deviation


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    world_size=st.integers(1, 6),
    global_batch=st.integers(1, 13),
    micro_batch=st.integers(1, 13),
    num_samples=st.integers(1, 17),
    strategy=st.sampled_from(["replicate", "zero1"]),
    last=st.sampled_from(["keep", "wrap"]),
)
def test_gradients_are_those_of_the_whole_batch(
    world_size: int, global_batch: int, micro_batch: int, num_samples: int, strategy: str, last: str
) -> None:
    batching = samestep.Batching(
        global_batch=global_batch, micro_batch=min(micro_batch, global_batch), last=last, shuffle=False
    )
    optimizer = lambda params: torch.optim.SGD(params, lr=0.01)  # noqa: E731
    results = run_threads(
        lambda t: train(t, num_samples, batching=batching, epochs=2, optimizer=optimizer, strategy=strategy),
        world_size,
    )
    stream = [i % num_samples for i in range(2 * num_samples)]
    if last == "wrap":
        batches = [stream[i : i + global_batch] for i in range(0, len(stream), global_batch)]
    else:
        epoch = list(range(num_samples))
        batches = [epoch[i : i + global_batch] for i in range(0, num_samples, global_batch)] * 2
    wanted = plain(num_samples, batches, optimizer)
    assert len({result.fingerprint for result in results}) == 1
    # Rounding: another order of additions than the whole batch's, in float64.
    assert off_by(results[0].model, wanted, make_model()) < 1e-12


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_float32_stays_within_rounding_of_a_plain_loop(optimizer: type[torch.optim.Optimizer]) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return optimizer(params, lr=1e-2)

    batching = samestep.Batching(global_batch=8, micro_batch=2, shuffle=False)
    (result,) = run_threads(
        lambda t: train(t, 16, batching=batching, epochs=3, optimizer=make, clip_norm=None), 1
    )
    wanted = plain(16, [list(range(8)), list(range(8, 16))] * 3, make)
    assert off_by(result.model, wanted, make_model()) < 1e-12  # float64 here too: Adam divides by a root


def test_a_step_without_weight_is_skipped_and_recorded() -> None:
    batching = samestep.Batching(global_batch=1, shuffle=False)  # samples 0, 5, 10, ... weigh nothing

    def run(transport: Transport) -> samestep.Result:
        return train(
            transport,
            6,
            batching=batching,
            epochs=1,
            optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
            schedule=lambda update: 1.0 / (1 + update),
        )

    for result in [r for world_size in (1, 2, 3) for r in run_threads(run, world_size)]:
        reports = result.history
        assert [report.applied for report in reports] == [report.weight > 0 for report in reports]
        assert not reports[0].applied
        assert reports[0].skipped == "weight zero"
        assert reports[0].loss is None
        assert reports[0].grad_norm is None
        assert not reports[5].applied
        applied = [report for report in reports if report.applied]
        assert [r.learning_rate for r in applied] == [0.1 / (1 + k) for k in range(len(applied))]
        assert all(bool(p.isfinite().all()) for p in result.model.parameters())
