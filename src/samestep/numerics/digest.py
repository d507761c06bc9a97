"""The digest: a cheap 64-bit sum over tiles, whose parts ranks can add up in any order.

It serves to notice that two states differ, at every step if wished. It is no proof that they are equal:
that is what the fingerprint is for.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from samestep.numerics.seeds import derive

MASK = 2**64 - 1
COLUMNS = 64


def tile_digest(bits: Tensor, tile: int, weights: Tensor) -> int:
    """Sum one tile's 64-bit words, weighted by column, modulo 2**64.

    All is integer arithmetic modulo 2**64, so neither the order of addition nor the number of threads can
    matter. The words are summed twice, the second time shifted: a flip of the top bit, which vanishes in
    pairs from the plain sum, shows in the shifted one.
    """
    words = bits.view(-1, COLUMNS) if bits.numel() % COLUMNS == 0 else bits.view(-1, 1)
    plain = words.sum(0)
    shifted = (words >> 31).sum(0)
    mixed = (plain * weights[0, : len(plain)] + shifted * weights[1, : len(plain)]).sum()
    return (int(mixed) * (2 * derive(tile) + 1)) & MASK


def column_weights(device: torch.device) -> Tensor:
    """Return the fixed int64 weights of `tile_digest`, (2, COLUMNS)."""
    words = [derive(row, column) >> 1 for row in range(2) for column in range(COLUMNS)]
    return torch.tensor(words, dtype=torch.int64, device=device).view(2, COLUMNS)


@final
class Digest:
    """Add up the digests of tiles; the sum does not depend on who holds which tile."""

    def __init__(self, device: torch.device) -> None:
        self._weights = column_weights(device)
        self.value = 0

    def add_tiles(self, flat: Tensor, first_tile: int, tile: int, *, salt: int) -> None:
        """Take in a run of whole tiles; `salt` tells apart flats, so that they cannot be swapped unseen.

        `flat` is one-dimensional, of a real dtype; a tile's bytes must be a multiple of 8.
        """
        for number, part in enumerate(flat.view(-1, tile)):
            bits = part.view(torch.int64)
            place = derive(salt, first_tile + number)
            self.value = (self.value + tile_digest(bits, place, self._weights)) & MASK

    def add_number(self, value: int) -> None:
        """Take in another digest or number."""
        self.value = (self.value + value) & MASK

    def hex(self) -> str:
        """Return the sum as 16 hex digits."""
        return f"{self.value:016x}"
