"""What one experiment is made of: named inputs, and a function of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Inputs: TypeAlias = Mapping[str, Tensor]
Outputs: TypeAlias = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One torch operation at shapes of training, with everything that its result depends on."""

    name: str
    inputs: Callable[[Draw], dict[str, Tensor]]
    run: Callable[[Inputs], Outputs]
    rows: tuple[str, ...] = ()  # inputs whose dim 0 counts samples; () where rows mix or there are none


class Draw:
    """Make inputs from one seed, always on the CPU, so that every device is given the same bits."""

    def __init__(self, name: str) -> None:
        self._generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Return normal values that require a gradient."""
        values = torch.randn(shape, generator=self._generator) * scale
        return values.to(dtype).requires_grad_()

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return values between `low` and `high` that require a gradient."""
        values = torch.rand(shape, generator=self._generator) * (high - low) + low
        return values.requires_grad_()

    def ids(self, limit: int, *shape: int) -> Tensor:
        """Return ids 0..limit-1; with more ids than `limit` they repeat."""
        return torch.randint(limit, shape, generator=self._generator)
