"""One short run of each kind, and what must be equal between runs of the same kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import samestep
from samestep.comm.transport import Transport
from samestep.testing.workloads import WORKLOADS

OPTIMIZERS: dict[str, Callable[[list[Parameter]], Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    # Its step normalises by the size of the whole parameter: no part of one can be updated alone.
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}
PRECISIONS = ("fp32", "bf16", "fp16")
STRATEGIES = ("replicate", "zero1")
# All but those that say where a run took place.
LEDGER_FIELDS = [
    name for name in samestep.StepReport.__slots__ if name not in ("world_size", "generation", "seconds")
]
KINDS = [(w, p, o) for w in WORKLOADS for p in PRECISIONS for o in OPTIMIZERS]


@dataclass(frozen=True)
class Ended:
    """What a run ended with: two runs are the same when these are equal."""

    fingerprint: str
    ledger: tuple[tuple[str, ...], ...]


def run(
    transport: Transport | None,
    workload: str,
    precision: Any,
    optimizer: str,
    strategy: str,
    **settings: Any,
) -> Ended:
    """Train a few steps, across the end of an epoch, and clip."""
    load = WORKLOADS[workload]()
    with transport.turn() if transport else nullcontext():
        torch.manual_seed(0)
        model = load.make_model()

    def loss(model: torch.nn.Module, batch: Any) -> samestep.Weighted:
        values, weights = load.values(model, batch)
        return samestep.weighted(values, weights)

    arguments: dict[str, Any] = {
        "batching": samestep.Batching(global_batch=12, micro_batch=2),
        "steps": 5,
        "clip_norm": 1.0,
        "digest_every": 2,
    }
    result = samestep.train(
        model,
        load.dataset,
        loss,
        optimizer=OPTIMIZERS[optimizer],
        collate_fn=load.collate_fn,
        precision=precision,
        strategy=strategy,
        transport=transport,
        schedule=samestep.schedules.warmup_cosine(updates=5, warmup=2),
        **{**arguments, **settings},
    )
    return Ended(result.fingerprint, ledger_of(result.history))


def ledger_of(history: list[samestep.StepReport]) -> tuple[tuple[str, ...], ...]:
    """Return all fields of all steps as exact text, but for those that say where the run took place."""
    return tuple(tuple(repr(getattr(report, name)) for name in LEDGER_FIELDS) for report in history)


def is_trained(ended: Ended) -> bool:
    """Say whether the losses are numbers and change: a run that does nothing proves nothing."""
    at = LEDGER_FIELDS.index("loss")
    losses = [line[at] for line in ended.ledger]
    return len(set(losses)) > 1 and not any(math.isnan(float(loss)) for loss in losses)
