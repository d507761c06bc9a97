"""What a loss returns: a sum and a weight, never a mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from samestep.errors import LossError


@dataclass(frozen=True, slots=True)
class Weighted:
    """One loss term of one micro-batch."""

    total: Tensor  # scalar with a gradient: the sum of value x weight
    weight: float  # the sum of the weights, exact: counts, or float64
    coefficient: float = 1.0


LossResult: TypeAlias = Weighted | Mapping[str, Weighted]


def weighted(values: Tensor, weight: Tensor | float | None = None, *, coefficient: float = 1.0) -> Weighted:
    """Sum the losses of a micro-batch, each times its weight, and count the weights.

    `values` holds one loss per sample, token or pixel, of any shape. `weight` broadcasts to it: None counts
    each value as 1, a bool mask counts the true ones, real numbers weigh. Values of weight zero are left
    out even where they are infinite or NaN. The step divides by the weight of the whole global batch.
    `coefficient` scales a term against other terms.

    A scalar `values` is taken for a sum that was made already, and then needs its `weight`. Raises
    LossError for values without a gradient's dtype or weights that do not fit.
    """
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise LossError(f"weighted() got {_kind(values)} as values; it needs a tensor of real numbers.")
    if values.dtype in (torch.float16, torch.bfloat16):
        # A 16-bit sum stops growing at a few hundred tokens, and the loss scale may be beyond its range.
        values = values.float()
    if values.dim() == 0:
        return Weighted(values, _given_weight(weight), coefficient)
    if weight is None:
        return Weighted(values.sum(), float(values.numel()), coefficient)
    weights = torch.as_tensor(weight, device=values.device).detach()
    try:
        weights = weights.expand_as(values)
    except RuntimeError as error:
        raise LossError(
            f"weighted() got values of shape {tuple(values.shape)} and weights of shape "
            f"{tuple(weights.shape)}; the weights must broadcast to the values."
        ) from error
    # Not value x 0: the loss at a padded place may be infinite, and infinity x 0 is NaN.
    kept = torch.where(weights != 0, values, torch.zeros((), dtype=values.dtype, device=values.device))
    counted = weights.sum(dtype=torch.int64 if not weights.is_floating_point() else torch.float64)
    if weights.dtype == torch.bool:
        return Weighted(kept.sum(), float(counted), coefficient)
    return Weighted((kept * weights.to(values.dtype)).sum(), float(counted), coefficient)


def _given_weight(weight: Tensor | float | None) -> float:
    if weight is None:
        raise LossError(
            "weighted() got a scalar without a weight. A mean over a micro-batch is a wrong gradient when "
            "micro-batches differ: pass one loss per sample (reduction='none'), or the sum of the losses "
            "(reduction='sum') with weight= the number of samples or counted tokens in it."
        )
    if isinstance(weight, Tensor) and weight.dim() > 0:
        raise LossError(
            f"weighted() got a scalar value but weights of shape {tuple(weight.shape)}. Pass the sum's "
            "weight as one number, or one value for each weight."
        )
    return float(weight)


def check_loss(result: object) -> LossResult:
    """Return what a loss function returned, or raise LossError with the reason and the fix."""
    if isinstance(result, Weighted):
        return _check_term(result, "the loss")
    if isinstance(result, Mapping):
        if not result:
            raise LossError("the loss returned an empty dict; it needs at least one term.")
        return {str(name): _check_term(term, f"loss term {name}") for name, term in result.items()}
    if isinstance(result, Tensor):
        raise LossError(
            f"the loss returned a bare tensor of shape {tuple(result.shape)}. If it is a mean, ranks and "
            "micro-batches with unequal counts would weigh wrongly; samestep needs the sum and its weight. "
            "Write return samestep.weighted(losses) with one loss per sample (reduction='none'), or "
            "samestep.weighted(loss_sum, weight=count) with reduction='sum'."
        )
    raise LossError(
        f"the loss returned {_kind(result)}. Return samestep.weighted(values, weight=...), or a dict of "
        "names to such values."
    )


def _check_term(term: object, what: str) -> Weighted:
    if not isinstance(term, Weighted):
        raise LossError(f"{what} is {_kind(term)}; it must be samestep.weighted(values, weight=...).")
    return term


def require_gradient(result: LossResult) -> None:
    """Raise LossError where no term depends on a parameter, although gradients are on."""
    terms = [result] if isinstance(result, Weighted) else list(result.values())
    if not any(term.total.requires_grad for term in terms):
        raise LossError(
            "the loss does not depend on any trainable parameter: its result has no gradient. Are all "
            "parameters frozen, or was the loss computed under torch.no_grad(), .detach() or .item()?"
        )


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"
