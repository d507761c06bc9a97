"""What each process of the memory tests holds at the end of a step."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

import samestep
from samestep.comm.connect import connect
from samestep.testing.workloads import Drawn
from samestep.topology.environment import Place, settle_interface

WIDTH = 512


def bytes_held() -> int:
    """Add up the memory of all tensors that Python knows of, each storage once."""
    gc.collect()
    found = [o for o in gc.get_objects() if isinstance(o, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(storages.values())


def hold(place: Place, strategy: str, leaves_per_rank: int) -> dict[str, float]:
    """Train two steps; return in copies of the model what is held besides the optimizer state, and that."""
    settle_interface(place)
    before = bytes_held()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)])
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held: dict[str, float] = {}

    def measure(event: samestep.Event) -> None:
        if isinstance(event, samestep.StepReport):
            state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
            state_bytes = sum(t.numel() * t.element_size() for t in state)
            held["state"] = state_bytes / model_bytes
            held["rest"] = (bytes_held() - before - state_bytes) / model_bytes

    def loss(model: nn.Module, batch: Any) -> samestep.Weighted:
        return samestep.weighted(model(batch).square().mean(1))

    samestep.train(
        model,
        Drawn(64, lambda generator: torch.randn(WIDTH, generator=generator)),
        loss,
        optimizer=optimizer,
        batching=samestep.Batching(global_batch=leaves_per_rank * place.world_size, micro_batch=1),
        steps=2,
        strategy=strategy,
        callbacks=[measure],
        transport=connect(place, device=torch.device("cpu"), timeout_s=60),
    )
    return held
