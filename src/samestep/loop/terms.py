"""Several loss terms: their names, and their global weights, counted before the first backward pass."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import final

import torch

from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.errors import Disagreement, LossError
from samestep.numerics.fold import Fold, Node


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
