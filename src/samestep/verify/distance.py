"""How far apart two tensors are: in bits, in units of the last place, and as a level of equality."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_COUNTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # those with a last place
# The largest relative deviation that counts as rounding. Half precision has none: one unit in its last place
# is more than any of the limits.
_LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6}


class Level(IntEnum):
    """How equal two runs are, from best to worst."""

    SAME = 0  # equal bits
    ROUNDING = 1  # equal mathematics: relative deviation below 1e-12 in float64, 1e-6 in float32
    CHANGED = 2  # other mathematics

    @property
    def word(self) -> str:
        """Return the name that users see."""
        return self.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """Where two tensors of one name differ, and how far."""

    name: str
    level: Level
    num_elements: int
    num_different: int  # elements with other bits
    index: tuple[int, ...]  # of the first different element
    first: object  # its value in run A: a number, or a complex one
    second: object  # and in run B
    ulps: int | None  # units in the last place between them; None where there is no such distance
    deviation: float | None  # of the whole tensor, relative to its largest element; None for no numbers


def compare_tensors(name: str, first: Tensor, second: Tensor) -> TensorDifference | None:
    """Compare two tensors of equal shape and dtype by their bits; None where all are equal.

    -0.0 and 0.0 have different bits and a distance of 0.
    """
    if first.numel() == 0 or torch.equal(_bits(first), _bits(second)):
        return None
    different = (_bits(first) != _bits(second)).any(1)
    at = int(different.to(torch.uint8).argmax())  # the first of the largest, which is the first difference
    ours, theirs = first.reshape(-1)[at], second.reshape(-1)[at]
    deviation = _deviation(first, second)
    limit = _LIMITS.get(first.real.dtype if first.is_complex() else first.dtype)
    rounding = deviation is not None and limit is not None and deviation < limit
    return TensorDifference(
        name=name,
        level=Level.ROUNDING if rounding else Level.CHANGED,
        num_elements=first.numel(),
        num_different=int(different.sum()),
        index=tuple(int(part) for part in torch.unravel_index(torch.tensor(at), first.shape)),
        first=ours.item(),
        second=theirs.item(),
        ulps=ulps(ours, theirs),
        deviation=deviation,
    )


def ulps(first: Tensor, second: Tensor) -> int | None:
    """Return how many steps from number to next number lie between two scalars of one float dtype.

    None where either is NaN, and for dtypes without a last place. Infinity is one step after the largest
    number. A complex number is as far as the farther of its parts.
    """
    if first.is_complex():
        parts = [ulps(first.real, second.real), ulps(first.imag, second.imag)]
        return None if None in parts else max(part for part in parts if part is not None)
    if first.dtype not in _COUNTED or bool(first.isnan()) or bool(second.isnan()):
        return None
    return abs(_place(first) - _place(second))


def _place(number: Tensor) -> int:
    """Return the place of a number on the line of all numbers of its dtype; both zeros are at 0."""
    bits = int(_bits(number))
    # Floats are sign and magnitude: of the negative ones, the integer's low bits count away from zero.
    return bits if bits >= 0 else -(bits + 2 ** (8 * number.element_size() - 1))


def _deviation(first: Tensor, second: Tensor) -> float | None:
    if not (first.is_floating_point() or first.is_complex()):
        return None
    wide = torch.complex128 if first.is_complex() else torch.float64
    ours, theirs = first.reshape(-1).to(wide), second.reshape(-1).to(wide)
    finite = ours.isfinite()
    # Two NaNs are as good as equal, whatever their payload; an infinity against anything else is no rounding.
    special, other = ours[~finite], theirs[~finite]
    if not bool(((special == other) | (special.isnan() & other.isnan())).all()):
        return math.inf
    if not bool(theirs[finite].isfinite().all()):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    largest = float(ours[finite].abs().amax())
    apart = float((ours - theirs)[finite].abs().amax())
    return apart / largest if largest else (math.inf if apart else 0.0)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits as integers, (elements, parts): one part, or two where an element is complex."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.reshape(-1).view(_INTEGERS[plain.element_size()]).reshape(tensor.numel(), -1)
