"""The exponential moving average of the weights: its settings, and the one formula by which it moves.

Note [the move]: average <- round(round(keep x average) + round((1 - keep) x value)), each rounding to the
average's dtype. These are three operations of one rounding each. A fused form (lerp, addcmul) rounds
otherwise in the vectorised part of a kernel than in its remainder, so that the bits would depend on how the
parameters are cut into tiles, and with that on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Final, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from samestep.config.settings import Settings
from samestep.errors import ConfigError

_PART: Final = 1 << 20  # elements moved in one go: bounds the memory for the product


class EMA(Settings):
    """An exponential moving average of the weights, which follows the applied updates.

    It starts from the parameters as they are at the set-up. A skipped step does not move it.
    """

    decay: float | Callable[[int], float] = Field(
        default=0.999,
        description="what is kept of the average in each move: a number in [0, 1), or a function of the "
        "number of moves before",
    )
    warmup: bool = Field(
        default=False,
        description="keep less at first: min(decay, (1 + moves) / (10 + moves))",
    )
    every: int = Field(default=1, ge=1, description="updates between two moves")
    buffers: Literal["copy", "average"] = Field(
        default="copy",
        description="running statistics beside averaged weights: the model's own as they are, or averaged "
        "like the weights (integer buffers are always the model's own)",
    )

    @model_validator(mode="after")
    def _keeps_a_part(self) -> Self:
        if not callable(self.decay) and not 0 <= self.decay < 1:
            raise ValueError(
                f"ema.decay is {self.decay!r}. Give a number in [0, 1), such as 0.999, or a function of the "
                "number of moves."
            )
        return self

    def decay_at(self, moves: int) -> float:
        """Return what is kept of the average when it has moved `moves` times before.

        >>> [round(EMA(decay=0.5, warmup=True).decay_at(moves), 3) for moves in (0, 1, 100)]
        [0.1, 0.182, 0.5]
        """
        decay = self.decay(moves) if callable(self.decay) else self.decay
        if not _is_share(decay):
            raise ConfigError(f"ema.decay returned {decay!r} after {moves} moves; it must be in [0, 1].")
        kept = float(decay)
        return min(kept, (1 + moves) / (10 + moves)) if self.warmup else kept

    def due(self, update: int) -> bool:
        """Say whether the average moves after `update` applied updates."""
        return update % self.every == 0


def resolve_ema(value: float | EMA | None) -> EMA | None:
    """Turn the short form, a decay alone, into settings. Raises ConfigError."""
    if value is None or isinstance(value, EMA):
        return value
    if not _is_number(value):
        raise ConfigError(f"ema is {value!r}. Give a decay such as 0.999, or samestep.EMA(decay=...).")
    return EMA(decay=float(value))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_share(value: object) -> bool:
    return _is_number(value) and 0 <= float(value) <= 1  # type: ignore[arg-type]


def average_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which real values are averaged: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def move(average: Tensor, value: Tensor, decay: float) -> None:
    """Move an average, in place, towards a value of the same shape: see Note [the move].

    Law: every element moves by itself, with the same bits however the tensors are cut.
    """
    flat, values = average.view(-1), value.reshape(-1)
    for start in range(0, flat.numel(), _PART):
        part = slice(start, start + _PART)
        gain = values[part].to(flat.dtype) * (1.0 - decay)
        flat[part].mul_(decay).add_(gain)
