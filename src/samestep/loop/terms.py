"""Several loss terms: their names, and their global weights, counted before the first backward pass."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.errors import Disagreement, LossError
from samestep.loop.batches import LoadedBatch, Weights
from samestep.loop.engine import Engine
from samestep.loop.weighted import Weighted, check_loss
from samestep.numerics.fold import Fold, Node

LossFunction = Callable[[nn.Module, Any], object]


def agree_on_terms(names: Sequence[str] | None, transport: Transport, *, device: torch.device) -> list[str]:
    """Collective. Return the names of the loss terms: none for a single loss.

    `names` is what this rank saw, None where it had no micro-batch. Raises Disagreement, on every rank,
    where ranks saw different terms.
    """
    message = json.dumps(None if names is None else list(names)).encode()
    seen = [json.loads(told) for told in gather_bytes(transport, message, device=device)]
    known = [(rank, told) for rank, told in enumerate(seen) if told is not None]
    if not known:
        return []
    first_rank, first = known[0]
    for rank, told in known[1:]:
        if set(told) != set(first):
            raise Disagreement(
                f"the loss is {_kind(first)} on rank {first_rank}, but {_kind(told)} on rank {rank}. "
                "It must return the same terms for every micro-batch."
            )
    return [str(name) for name in first]


def _kind(names: Sequence[str]) -> str:
    return f"a dict of {', '.join(names)}" if names else "a single value"


@final
class TermWeights:
    """The weights of a step's loss terms, folded in micro-batch order over all ranks."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._leaves: dict[int, dict[str, float]] = {}

    def add(self, index: int, weights: Mapping[str, float]) -> None:
        """Take in the weights of one micro-batch of this rank."""
        if set(weights) != set(self._names):
            raise LossError(
                f"micro-batch {index} has weights for {', '.join(weights) or 'no term'}, but the loss terms "
                f"are {', '.join(self._names)}."
            )
        self._leaves[index] = {name: float(weights[name]) for name in self._names}

    def total(self, transport: Transport, num_leaves: int, *, device: torch.device) -> dict[str, float]:
        """Collective. Return the global weight of each term; LossError for one that means nothing."""
        message = json.dumps(self._leaves).encode()
        leaves: dict[str, dict[str, float]] = {}
        for told in gather_bytes(transport, message, device=device):
            leaves.update(json.loads(told))
        totals: dict[str, float] = {}
        for name in self._names:
            folding: Fold[float] = Fold(num_leaves)
            for index, weights in leaves.items():
                folding.add(Node(0, int(index)), weights[name])
            totals[name] = folding.total()
            if not 0 <= totals[name] < math.inf:
                raise LossError(
                    f"the weights of loss term {name} in this global batch add up to {totals[name]!r}. "
                    "Weights are counts or importances: finite and not negative."
                )
        return totals


@final
class Terms:
    """What the loss of a session returns, and how the weights of several terms come to be known.

    Either a function gives them from the data, or they are counted by a forward pass without gradients
    before the real one. Whether there are terms at all is agreed on in the first step.
    """

    def __init__(self, engine: Engine, transport: Transport, *, device: torch.device) -> None:
        self._engine = engine
        self._transport = transport
        self._device = device
        self._names: list[str] | None = None  # empty for a single loss
        self.come_from_data = False  # a function gives the weights

    @property
    def are_known(self) -> bool:
        """Whether the ranks have agreed on what the loss returns."""
        return self._names is not None

    @property
    def must_be_counted(self) -> bool:
        """Whether the weights of several loss terms are still to be counted for each batch."""
        return bool(self._names) and not self.come_from_data

    def agree(self, names: Sequence[str] | None) -> list[str]:
        """Collective. Tell the other ranks which loss terms came here, None where none did."""
        self._names = agree_on_terms(names, self._transport, device=self._device)
        return self._names

    def weigh(self, batch: LoadedBatch, weights: Weights) -> dict[str, float]:
        """Collective. Return the global weight of each term, from the data alone."""
        batch.load_all()
        told = {micro.index: weights(micro.data) for micro in batch}
        if self._names is None:
            self.agree(list(next(iter(told.values()))) if told else None)
        counted = TermWeights(self._names or [])
        for index, named in told.items():
            counted.add(index, named)
        return counted.total(self._transport, batch.plan.num_micro_batches, device=self._device)

    def count(self, batch: LoadedBatch, loss: LossFunction) -> None:
        """Collective. Count the global weights by a pass without gradients, and begin the step anew."""
        self._engine.progress.require_quiet("the count of loss weights")
        batch.load_all()
        counted = TermWeights(self._names or [])
        for micro in batch:
            with micro.counting():
                result = check_loss(loss(self._engine.model, micro.data))
            named = {"": result} if isinstance(result, Weighted) else result
            counted.add(micro.index, {name: term.weight for name, term in named.items()})
        num_leaves = batch.plan.num_micro_batches
        self._engine.restart(counted.total(self._transport, num_leaves, device=self._device))
