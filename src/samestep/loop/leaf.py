"""From what a loss returned to a backward pass, and the sums of a step's losses and weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import numpy as np
import torch
from torch import Tensor

from samestep.errors import LossError
from samestep.events import TermReport
from samestep.loop.ballot import NUM_COLUMNS, Sums
from samestep.loop.phase_clock import PhaseClock
from samestep.loop.weighted import LossResult, Weighted, check_loss, require_gradient
from samestep.numerics.fold import Fold, Node

_WEIGHTS_AGREE = 1e-5  # relative: float32 sums of many weights differ by less, a forgotten sample by more


class NeedsWeightsError(LossError):
    """Several loss terms came, but their global weights were not counted before."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(
            f"the loss has several terms ({', '.join(names)}), each divided by its own global weight, which "
            "must be known before the first backward pass. In a loop of your own, give session.batches(..., "
            "weights=function): function(batch) returns the weight of each term by name, from the data alone."
        )
        self.names = names


@final
class LossSums:
    """The loss sums and weights of one step's micro-batches, folded in micro-batch order.

    A single loss is divided once, after the sum. Several terms are each divided by their global weights,
    `divisors`, before they are added up, because one backward pass serves them all.
    """

    def __init__(self, num_leaves: int, divisors: Mapping[str, float], *, multiplier: float) -> None:
        self.fold: Fold[Sums] = Fold(num_leaves)
        self.multiplier = multiplier
        self.bad_leaf: int | None = None
        self.num_added = 0
        self.weights: dict[int, float] = {}  # by micro-batch of this rank: of the first loss term
        self._divisors = dict(divisors)

    @property
    def num_terms(self) -> int:
        """How many loss terms there are."""
        return max(1, len(self._divisors))

    @property
    def are_divided(self) -> bool:
        """Whether micro-batches are divided by the global weights before they are added up."""
        return bool(self._divisors)

    def objective(self, index: int, result: LossResult) -> Tensor | None:
        """Take in one micro-batch; return what to differentiate, None where no weight is counted."""
        terms = self._terms(result)
        row = np.zeros((self.num_terms, NUM_COLUMNS), dtype=np.float64)
        parts: list[Tensor] = []
        for position, (name, term) in enumerate(terms.items()):
            row[position, 1] = term.weight
            divisor = self._divisors.get(name, 1.0)
            if not term.weight or not divisor:
                continue
            total = float(term.total.detach())
            row[position] = total, term.weight, term.coefficient * total
            if not math.isfinite(row[position, 0]) and self.bad_leaf is None:
                self.bad_leaf = index
            factor = term.coefficient * self.multiplier / divisor
            if term.total.requires_grad:
                parts.append(term.total if factor == 1.0 else term.total * factor)
        self.fold.add(Node(0, index), row)
        self.weights[index] = float(row[0, 1])
        self.num_added += 1
        if any(term.weight for term in terms.values()):
            require_gradient(result)
        return torch.stack(parts).sum() if len(parts) > 1 else (parts[0] if parts else None)

    def divisor(self, sums: Sums) -> float:
        """Return what the summed gradient is divided by: 0 where nothing was counted."""
        if not self._divisors:
            return float(sums[0, 1])
        return 1.0 if any(self._divisors.values()) else 0.0

    def require_counted(self, sums: Sums, step: int) -> None:
        """Raise LossError where the weights that the loss returned are not those that it was divided by."""
        for (name, divisor), (_, weight, _) in zip(self._divisors.items(), sums, strict=False):
            # A user's function may add the same weights in another order, or in float32.
            if not math.isclose(divisor, weight, rel_tol=_WEIGHTS_AGREE):
                raise LossError(
                    f"step {step}: loss term {name} was divided by {divisor:g}, the weights counted before, "
                    f"but the loss itself returned weights of {float(weight):g} in all. Let the function "
                    "given as weights= return for each micro-batch the sum of the weights that the loss "
                    "gives to samestep.weighted, or leave weights= out."
                )

    def loss(self, sums: Sums) -> float | None:
        """Return the global loss: each term's mean times its coefficient."""
        if not self._divisors:
            _, weight, scaled = sums[0]
            return float(scaled) / float(weight) if weight else None
        counted = [float(scaled) / float(weight) for _, weight, scaled in sums if weight]
        return math.fsum(counted) if counted else None

    def terms(self, sums: Sums) -> dict[str, TermReport]:
        """Return the report of each named term."""
        return {
            name: TermReport(
                loss=float(loss) / float(weight) if weight else math.nan,
                weight=float(weight),
                contribution=float(scaled) / float(weight) if weight else 0.0,
            )
            for name, (loss, weight, scaled) in zip(self._divisors, sums, strict=False)
        }

    def _terms(self, result: LossResult) -> dict[str, Weighted]:
        if isinstance(result, Weighted):
            if self._divisors:
                raise LossError(
                    f"the loss returned one value, but the terms {', '.join(self._divisors)} before. It must "
                    "return the same terms for every micro-batch."
                )
            return {"": result}
        if not self._divisors and self.num_added:
            raise LossError(
                f"the loss returned the terms {', '.join(map(str, result))}, but a single value before. It "
                "must return the same terms for every micro-batch."
            )
        if not self._divisors:
            raise NeedsWeightsError([str(name) for name in result])
        if set(result) != set(self._divisors):
            raise LossError(
                f"the loss returned the terms {', '.join(result)}, but the weights counted before are of "
                f"{', '.join(self._divisors)}. It must return the same terms for every micro-batch."
            )
        return {name: result[name] for name in self._divisors}


@final
class LeafLoss:
    """Called with what the loss returned: counts it and runs the backward pass."""

    def __init__(self, sums: LossSums, index: int, clock: PhaseClock) -> None:
        self._sums = sums
        self._index = index
        self._clock = clock
        self._recorded = False

    def __call__(self, result: object) -> None:
        """Record the loss of this micro-batch, once, and differentiate it."""
        if self._recorded:
            raise LossError(
                f"micro-batch {self._index} recorded its loss twice. Record one loss in each collect block; "
                "several terms go into one dict."
            )
        objective = self._sums.objective(self._index, check_loss(result))
        self._recorded = True
        if objective is not None:
            # Autocast covers the forward pass only: the backward pass follows its dtypes by itself.
            with self._clock.during("backward"), torch.autocast(objective.device.type, enabled=False):
                objective.backward()  # type: ignore[no-untyped-call]

    def require_recorded(self) -> None:
        """Raise LossError where the block ended without a loss."""
        if not self._recorded:
            raise LossError(
                f"micro-batch {self._index} recorded no loss. Inside the block of micro.collect() call "
                "record(loss(model, micro.data))."
            )
