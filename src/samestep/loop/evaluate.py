"""Evaluation: weighted sums over a data set, each sample once, with the same bits on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.data.assign import assign
from samestep.data.fetch import count_samples
from samestep.data.global_batch import MicroBatch
from samestep.data.loader import Loader
from samestep.errors import ConfigError, LossError
from samestep.loop.batches import to_device
from samestep.loop.weighted import LossResult, Weighted, check_loss
from samestep.numerics.fold import Fold, Node
from samestep.numerics.seeds import evaluation_seed, seed_micro_batch
from samestep.precision.policy import Precision
from samestep.sync.model_buffers import ModelBuffers

Metric = Callable[[nn.Module, Any], LossResult]
SINGLE = "metric"  # the name of a metric that returns one value


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What to measure, on which samples, and how often.

    `metric(model, batch)` gets one collated micro-batch, with the model in evaluation mode, and returns
    samestep.weighted(values, weight), or a dict of such values by name.
    """

    dataset: Any
    metric: Metric
    every: int | None = None  # steps between evaluations; None: after the last step only
    micro_batch: int = 32
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for counts that are not positive."""
        for name, count in (("every", self.every), ("micro_batch", self.micro_batch)):
            if count is not None and count < 1:
                raise ConfigError(f"evaluate.{name} is {count}; it must be 1 or more.")

    def due(self, step: int, *, is_last: bool) -> bool:
        """Say whether to evaluate after a step, counted from 0."""
        return is_last or (self.every is not None and (step + 1) % self.every == 0)


def evaluate(
    evaluation: Evaluation,
    model: nn.Module,
    transport: Transport,
    *,
    seed: int,
    precision: Precision,
    device: torch.device,
) -> dict[str, float]:
    """Collective. Return each metric's weighted mean over all samples.

    Micro-batches are cut by arithmetic and their sums folded in order, so neither the number of ranks nor
    the split matters. Each sample is seen exactly once. Every micro-batch finds the buffers and the modes as
    they were before, and so does the training afterwards. Raises LossError for a metric whose weight is zero.
    """
    num_samples = count_samples(evaluation.dataset)
    num_leaves = -(-num_samples // evaluation.micro_batch)
    if not num_leaves:
        raise ConfigError("the data set of the evaluation has no samples.")
    run = assign(num_leaves, [1.0] * transport.world_size)[transport.rank]
    sums: dict[str, Fold[complex]] = {}
    seed = evaluation_seed(seed)
    buffers = ModelBuffers(model, transport, besides=())
    loader = Loader(evaluation.dataset, seed=seed, collate_fn=evaluation.collate_fn)
    loaded = loader.load(_micro_batch(evaluation, index, num_samples) for index in run)
    for index in run:
        with transport.turn():
            batch = to_device(next(loaded), device)
            seed_micro_batch(seed, 0, index, device)
            try:
                with in_evaluation_mode(model), torch.no_grad(), precision.autocast(device):
                    result = check_loss(evaluation.metric(model, batch))
            finally:
                buffers.restore()
        for name, term in _named(result).items():
            # One number for two: the sum and the weight are added by the same tree.
            value = complex(float(term.total), term.weight)
            sums.setdefault(name, Fold(num_leaves)).add(Node(0, index), value)
    return _totals(sums, num_leaves, transport, device)


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and each module back in the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _micro_batch(evaluation: Evaluation, index: int, num_samples: int) -> MicroBatch:
    start = index * evaluation.micro_batch
    ids = np.arange(start, min(start + evaluation.micro_batch, num_samples), dtype=np.int64)
    return MicroBatch(step=0, index=index, ids=ids, epochs=np.zeros_like(ids))


def _named(result: LossResult) -> Mapping[str, Weighted]:
    return {SINGLE: result} if isinstance(result, Weighted) else result


def _totals(
    sums: Mapping[str, Fold[complex]], num_leaves: int, transport: Transport, device: torch.device
) -> dict[str, float]:
    message = {
        name: [[*node, value.real, value.imag] for node, value in folding.partial()]
        for name, folding in sums.items()
    }
    told = [json.loads(text) for text in gather_bytes(transport, json.dumps(message).encode(), device=device)]
    totals: dict[str, float] = {}
    for name in dict.fromkeys(name for part in told for name in part):
        folding: Fold[complex] = Fold(num_leaves)
        for part in told:
            for level, index, total, weight in part.get(name, []):
                folding.add(Node(level, index), complex(total, weight))
        if len(folding.partial()) != 1:
            raise LossError(f"metric {name} is missing in some micro-batches; return it for each of them.")
        total = folding.total()
        if not total.imag:
            raise LossError(f"the weights of metric {name} add up to zero: there is no mean.")
        totals[name] = total.real / total.imag
    return totals
