"""The end of a step: measure the sum, decide once, divide once.

Note [divide once]: weights differ by rank, so dividing before the sum would weigh ranks, not tokens. The
weight, the loss scale and the clipping factor go into one divisor, applied in one pass to the finished sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from samestep.errors import LossError
from samestep.sync.layout import Layout
from samestep.sync.storage import GradientBuffer

_TINY, _HUGE = 1e-30, 1e30  # outside, squares in float32 may have lost digits: measure again in float64
_ROOM = 1e-6  # added to the norm when clipping, as torch.nn.utils.clip_grad_norm_ does


@final
class TileNorms:
    """The length of each tile of the gradient sum that this rank owns, in float64.

    Each tile is measured by one call on one tile, so that shape and alignment, and with them the bits, are
    the same whoever owns it.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._first_tile = layout.first_tiles()
        self._tiles: list[int] = []
        self._parts: list[Tensor] = []
        self._squares: list[Tensor] = []

    def inspect(self, flat: int, start: int, part: Tensor) -> None:
        """Measure whole tiles of a flat buffer, from element `start` on."""
        tile = self._layout.flats[flat].tile
        first = self._first_tile[flat] + start // tile
        for number, values in enumerate(part.view(-1, tile)):
            wide = values.float() if values.dtype == torch.bfloat16 else values
            self._tiles.append(first + number)
            self._parts.append(values)
            self._squares.append(torch.dot(wide, wide))

    def measured(self) -> list[tuple[int, float]]:
        """Return (tile, norm) of all tiles seen, and forget them."""
        squares = torch.stack([s.double() for s in self._squares]).tolist() if self._squares else []
        norms = [
            (tile, math.sqrt(square) if _TINY < square < _HUGE else _measure_again(values))
            for tile, square, values in zip(self._tiles, squares, self._parts, strict=True)
        ]
        self._tiles, self._parts, self._squares = [], [], []
        return norms


def _measure_again(values: Tensor) -> float:
    largest = float(values.abs().max())
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    scaled = values.double() / largest
    return largest * math.sqrt(float(torch.dot(scaled, scaled)))


def total_norm(tile_norms: Sequence[float]) -> float:
    """Join the norms of all tiles, in tile order: correctly rounded, so no order could change it."""
    largest = max(tile_norms, default=0.0)
    if any(math.isnan(norm) for norm in tile_norms):
        return math.nan
    if largest == 0.0 or math.isinf(largest):
        return largest
    return largest * math.sqrt(math.fsum((norm / largest) ** 2 for norm in tile_norms))


@dataclass(frozen=True, kw_only=True, slots=True)
class Settlement:
    """The decision on a step, the same on every rank."""

    divisor: float  # of the summed gradient: weight x loss scale / clipping factor
    grad_norm: float | None  # of the mean's gradient, before clipping
    skipped: str | None  # why the step is not applied
    finite: bool

    @property
    def applied(self) -> bool:
        """Whether the step changes the parameters."""
        return self.skipped is None


def settle(*, weight: float, summed_norm: float, multiplier: float, clip_norm: float | None) -> Settlement:
    """Decide on a step from its global weight and the norm of its gradient sum.

    Law: a pure function of numbers that are equal on every rank. Raises LossError for a weight that is
    negative or not a number.
    """
    if math.isnan(weight) or weight < 0 or math.isinf(weight):
        raise LossError(
            f"the weights of this global batch add up to {weight!r}. Weights are counts or importances: "
            "finite and not negative."
        )
    if weight == 0:
        return Settlement(divisor=1.0, grad_norm=None, skipped="weight zero", finite=True)
    divisor = weight * multiplier
    grad_norm = summed_norm / divisor
    if not math.isfinite(grad_norm):  # of the sum, or of the quotient by a tiny weight
        return Settlement(divisor=divisor, grad_norm=grad_norm, skipped="overflow", finite=False)
    if clip_norm is not None:
        factor = clip_norm / (grad_norm + _ROOM)
        if factor < 1:
            divisor /= factor
    return Settlement(divisor=divisor, grad_norm=grad_norm, skipped=None, finite=True)


def divide(gradient: GradientBuffer, ranges: Sequence[tuple[int, int, int]], divisor: float) -> list[Tensor]:
    """Divide the sum by its divisor over the given (flat, start, stop); see Note [divide once].

    Returns the flat buffers that hold the quotient: the sums' own, or float32 ones where sums are 16-bit.
    """
    settled = [
        flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat for flat in gradient.flats
    ]
    for flat, start, stop in ranges:
        for part in _parts(divisor, settled[flat].dtype):
            settled[flat][start:stop].div_(part)
    return settled


def _parts(divisor: float, dtype: torch.dtype) -> list[float]:
    """Split a divisor that the dtype cannot hold into equal factors that it can: nearly always just one."""
    limits = torch.finfo(dtype)
    count = 1
    if not 0 < divisor < math.inf:
        return [divisor]
    while not limits.tiny <= divisor ** (1 / count) <= limits.max:
        count *= 2
    return [divisor ** (1 / count)] * count if count > 1 else [divisor]
