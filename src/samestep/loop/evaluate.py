"""Evaluation: each sample of a data set once, with the same bits on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

import numpy as np
import torch
from torch import nn

from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.config.arguments import require_callable
from samestep.data.assign import assign
from samestep.data.fetch import count_samples
from samestep.data.global_batch import MicroBatch
from samestep.data.loader import Loader
from samestep.errors import ConfigError, LossError
from samestep.loop.averaging import Averaging
from samestep.loop.batches import to_device
from samestep.loop.metrics import Accumulating, Gathered, GatheredMetric
from samestep.loop.metrics_rows import Rows
from samestep.loop.weighted import LossResult, Weighted, check_loss
from samestep.numerics.fold import Fold, Node
from samestep.numerics.seeds import evaluation_seed, seed_micro_batch
from samestep.precision.policy import Precision
from samestep.sync.model_buffers import ModelBuffers

Metric: TypeAlias = Callable[[nn.Module, Any], LossResult]
Predict: TypeAlias = Callable[[nn.Module, Any], Mapping[str, Any]]
SINGLE = "metric"  # the name of a metric that returns one value
AVERAGED = "ema/"  # before the names of metrics of the averaged weights


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What to measure, on which samples, and how often.

    `metric(model, batch)` gets one collated micro-batch, with the model in evaluation mode, and returns
    samestep.weighted(values, weight), or a dict of such values by name: for all that is a mean.

    What needs all predictions together (AUC, F1, BLEU) goes through `predict(model, batch)`, which returns
    rows by name, one per sample: tensors, arrays, or lists of what JSON can hold. `gathered` holds functions
    of all rows in sample order, which are asked for by their names and lie on the CPU, or objects with
    update, compute and reset, as torchmetrics has them. They run on the first rank, whose memory must hold
    the rows of the whole data set, and within `timeout_s`.

    `weights` says of which weights: the raw ones, the averages ("ema", under names that begin with ema/), or
    both where the run keeps averages. Each is a pass over the data; so are `metric` and `predict`.
    """

    dataset: Any
    metric: Metric | None = None
    predict: Predict | None = None
    gathered: Mapping[str, GatheredMetric] = field(default_factory=dict)
    weights: Literal["raw", "ema", "both"] = "both"
    every: int | None = None  # steps between evaluations; None: after the last step only
    micro_batch: int = 32
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for settings that measure nothing, or never."""
        for name, count in (("every", self.every), ("micro_batch", self.micro_batch)):
            if count is not None and count < 1:
                raise ConfigError(f"evaluate.{name} is {count}; it must be 1 or more.")
        if self.weights not in ("raw", "ema", "both"):
            raise ConfigError(f"evaluate.weights is {self.weights!r}. Use 'raw', 'ema' or 'both'.")
        if self.metric is None and not self.gathered:
            raise ConfigError("evaluate measures nothing. Give metric=, or predict= together with gathered=.")
        if bool(self.gathered) != (self.predict is not None):
            raise ConfigError(
                "evaluate.predict makes the rows that evaluate.gathered is made of: give both or neither."
            )
        for name, metric in self.gathered.items():
            if isinstance(metric, type) or not isinstance(metric, Accumulating):
                use = "it is given the rows by name, all of them in sample order"
                require_callable(f"evaluate.gathered[{name!r}]", metric, use=use)
            if isinstance(metric, type):
                raise ConfigError(f"evaluate.gathered[{name!r}] is a class. Give {metric.__name__}(...).")

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
    averaging: Averaging | None = None,
) -> dict[str, float]:
    """Collective. Return each metric over all samples, those of the averaged weights under ema/ names.

    Micro-batches are cut by arithmetic, their sums folded and their rows gathered in order, so neither the
    number of ranks nor the split matters. Each sample is seen exactly once. Every micro-batch finds the
    buffers and the modes as they were before, and so does the training afterwards. Raises LossError for a
    metric whose weight is zero, or that fails.
    """
    if evaluation.weights == "ema" and averaging is None:
        raise ConfigError("evaluate.weights is 'ema', but the run keeps no averages. Give ema=0.999, say.")

    def measured() -> dict[str, float]:
        return _Pass(evaluation, model, transport, seed=seed, precision=precision, device=device).run()

    metrics: dict[str, float] = {}
    if evaluation.weights != "ema":
        metrics |= measured()
    if evaluation.weights != "raw" and averaging is not None:
        with averaging.applied():
            metrics |= {f"{AVERAGED}{name}": value for name, value in measured().items()}
    return metrics


@final
class _Pass:
    """One pass over the data, with the weights that the model holds."""

    def __init__(
        self,
        evaluation: Evaluation,
        model: nn.Module,
        transport: Transport,
        *,
        seed: int,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self._evaluation = evaluation
        self._model = model
        self._transport = transport
        self._seed = evaluation_seed(seed)
        self._precision = precision
        self._device = device
        self._buffers = ModelBuffers(model, transport, besides=())

    def run(self) -> dict[str, float]:
        """Collective. Return all metrics."""
        evaluation, transport = self._evaluation, self._transport
        num_samples = count_samples(evaluation.dataset)
        num_leaves = -(-num_samples // evaluation.micro_batch)
        if not num_leaves:
            raise ConfigError("the data set of the evaluation has no samples.")
        run = assign(num_leaves, [1.0] * transport.world_size)[transport.rank]
        sums: dict[str, Fold[complex]] = {}
        rows = Rows(transport, device=self._device)
        loader = Loader(evaluation.dataset, seed=self._seed, collate_fn=evaluation.collate_fn)
        loaded = loader.load(_micro_batch(evaluation, index, num_samples) for index in run)
        for index in run:
            with transport.turn():
                batch = to_device(next(loaded), self._device)
                if evaluation.metric is not None:
                    result = check_loss(self._forward(evaluation.metric, batch, index))
                    for name, term in _named(result).items():
                        # One number for two: the sum and the weight are added by the same tree.
                        value = complex(float(term.total), term.weight)
                        sums.setdefault(name, Fold(num_leaves)).add(Node(0, index), value)
                if evaluation.predict is not None:
                    micro = _micro_batch(evaluation, index, num_samples)
                    rows.add(index, len(micro.ids), self._forward(evaluation.predict, batch, index))
        metrics = _totals(sums, num_leaves, transport, self._device)
        gathered = self._of_all(rows, num_leaves) if evaluation.predict is not None else {}
        if twice := sorted(set(metrics) & set(gathered)):
            raise ConfigError(
                f"evaluate has the metric {twice[0]} twice: metric= returns it, and gathered= holds it."
            )
        return metrics | gathered

    def _forward(self, function: Callable[[nn.Module, Any], Any], batch: Any, index: int) -> Any:
        seed_micro_batch(self._seed, 0, index, self._device)
        try:
            with in_evaluation_mode(self._model), torch.no_grad(), self._precision.autocast(self._device):
                return function(self._model, batch)
        finally:
            self._buffers.restore()

    def _of_all(self, rows: Rows, num_leaves: int) -> dict[str, float]:
        """Collective. Return the metrics that are computed from all rows."""
        evaluation = self._evaluation
        computing = Gathered(
            evaluation.gathered, self._transport, rows_at_once=evaluation.micro_batch, device=self._device
        )
        gathered = rows.gathered()
        with self._transport.turn() if gathered is not None else nullcontext():
            # A metric may draw (a bootstrap does): the same numbers each time, and none of training's.
            seed_micro_batch(self._seed, 0, num_leaves, self._device)
            told = computing.values(gathered)
        return computing.shared(told)


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
    """Collective. Return the weighted mean of each metric."""
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
