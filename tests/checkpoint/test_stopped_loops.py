"""A loop of one's own over epochs, stopped anywhere, goes on in the epoch where it stood."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from small_runs import DATA, loss, make_model

import samestep
from samestep.comm.transport import Transport
from samestep.testing.threads import run_threads

EPOCHS = 4
BATCHING = samestep.Batching(global_batch=12, micro_batch=2)  # 4 steps in an epoch, the last a short one


def loop(
    transport: Transport, folder: Path | None, stop: tuple[int, int] | None = None, every: int | None = None
) -> tuple[str, list[tuple[int, int, tuple[int, ...]]]]:
    """Train for some epochs, one call of `batches` each; `stop` is a rank and after which step it asks."""
    seen: list[tuple[int, int, tuple[int, ...]]] = []
    checkpoint = samestep.Checkpointing(folder=folder, every=every) if folder else None
    with samestep.Session(transport=transport, ema=0.5, checkpoint=checkpoint) as session:
        with transport.turn():
            torch.manual_seed(0)
            model = make_model()
        session.setup(model, lambda params: torch.optim.AdamW(params, lr=0.05))
        for epoch in range(EPOCHS):
            for batch in session.batches(DATA, BATCHING, epochs=1):
                for micro in batch:
                    with micro.collect() as record:
                        record(loss(model, micro.data))
                report = session.step(batch)
                seen.append((report.step, epoch, tuple(batch.plan.ids.tolist())))
                if stop == (session.rank, report.step):
                    session.stop()
        return session.fingerprint(), seen


def take(world_size: int, *arguments: Any) -> tuple[str, list[tuple[int, int, tuple[int, ...]]]]:
    return run_threads(lambda transport: loop(transport, *arguments), world_size)[0]


@pytest.mark.parametrize("seed", range(3))
def test_it_goes_on_in_the_epoch_where_it_stood(seed: int, tmp_path: Path) -> None:
    draw = Random(seed)
    expected = take(1, None)
    assert [step for step, *_ in expected[1]] == list(range(4 * EPOCHS))
    seen: dict[int, Any] = {}
    stops = 0
    while True:
        world_size = (3, 1, 2)[stops % 3]
        begin = max(seen, default=-1) + 1
        stop = (draw.randrange(world_size), begin + draw.randint(0, 2))
        found, steps = take(world_size, tmp_path, stop, draw.choice([None, 2]))
        assert steps[0][0] == begin
        assert len(steps) == min(stop[1] + 2, 4 * EPOCHS) - begin
        seen |= {step: (step, *rest) for step, *rest in steps}
        if len(seen) == 4 * EPOCHS:
            break
        stops += 1
    assert stops >= 4
    assert found == expected[0]
    assert list(seen.values()) == expected[1]
