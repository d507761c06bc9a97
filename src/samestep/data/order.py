"""The order of the samples in an epoch: a keyed permutation that is computed, not stored.

Any place of any epoch is found at once, in memory that does not grow with the data set, so a run resumes in
the middle of an epoch without replaying it. A small data set is sorted by one random word per sample. A
large one lies on a grid of nearly as many rows as columns, whose coordinates a Feistel network shifts in
turn, each by a keyed hash of the other; a cell beyond the last sample is sent through again until it falls
on a sample (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). The grid has at most one row
too many, so that hardly any cell walks twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from samestep.errors import ConfigError
from samestep.numerics.seeds import Purpose, derive, derive_each

MAX_SAMPLES: Final = 2**40
SORTED_UP_TO: Final = 1024  # a network is biased on tiny grids, and no faster than sorting up to here
# From 1,025 samples on, 400,000 epochs show the bias of 3 rounds at once, of 5 hardly, of 6 not at all.
_ROUNDS: Final = 8
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_HALF: Final = np.uint64(32)
_ONE: Final = np.uint64(1)


class Placing(Protocol):
    """An order of samples. An epoch has as many places as the data set has samples."""

    def visits(
        self, epochs: NDArray[np.int64], places: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the samples at places of epochs, and for each which visit of that sample it is, from 0."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Say which sample stands at which place of which epoch.

    Law: within an epoch each of the samples 0..num_samples-1 stands at one place. The order depends on
    (num_samples, seed, epoch) alone; without shuffling, a sample's place is its id.

    >>> Order(num_samples=5, seed=0, shuffle=False).ids(np.array([7, 7]), np.array([3, 4]))
    array([3, 4])
    """

    num_samples: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        """Refuse sizes that have no order."""
        if self.num_samples < 1:
            raise ConfigError(
                f"the data set has no samples (their number is {self.num_samples}), and training needs at "
                "least one. Check its path, and the filter it was made with."
            )
        if self.num_samples > MAX_SAMPLES:
            raise ConfigError(
                f"the data set has {self.num_samples} samples, and at most {MAX_SAMPLES} can be put in "
                "order. Let one sample be a group of records."
            )

    def visits(
        self, epochs: NDArray[np.int64], places: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids, and the epochs: a sample is visited once in each."""
        return self.ids(epochs, places), epochs

    def ids(self, epochs: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample ids at places 0..num_samples-1 of the given epochs (two arrays of one length)."""
        if not self.shuffle or places.size == 0:
            return places.copy()
        one_epoch = bool((epochs == epochs[0]).all())
        if self.num_samples <= SORTED_UP_TO:
            each, row = (epochs[:1], 0) if one_epoch else np.unique(epochs, return_inverse=True)
            ids: NDArray[np.int64] = self._sorted(each)[row, places]
            return ids
        return self._walked(epochs[:1] if one_epoch else epochs, places)

    def _sorted(self, epochs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the whole order of each epoch, shape (epochs, num_samples)."""
        words = derive_each(self._keys(epochs)[:, None], np.arange(self.num_samples, dtype=np.uint64))
        orders: NDArray[np.int64] = words.argsort(axis=1, kind="stable").astype(np.int64, copy=False)
        return orders

    def _walked(self, epochs: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids at the places, of their epochs or of the only one."""
        keys = derive_each(self._keys(epochs), np.arange(_ROUNDS, dtype=np.uint64)[:, None])
        cells = self._shift(places.astype(np.uint64), keys)
        beyond = np.flatnonzero(cells >= self.num_samples)
        while beyond.size:
            again = self._shift(cells[beyond], keys if len(epochs) == 1 else keys[:, beyond])
            cells[beyond] = again
            beyond = beyond[again >= self.num_samples]
        return cells.astype(np.int64)

    def _keys(self, epochs: NDArray[np.int64]) -> NDArray[np.uint64]:
        return derive_each(derive(self.seed, Purpose.ORDER), epochs.astype(np.uint64))

    def _shift(self, cells: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Permute the cells of the grid, each by its column of keys."""
        num_rows = math.isqrt(self.num_samples - 1) + 1
        rows, columns = np.uint64(num_rows), np.uint64(-(-self.num_samples // num_rows))
        row: NDArray[np.uint64] = cells // columns
        column: NDArray[np.uint64] = cells % columns
        for turn, key in enumerate(keys):
            if turn % 2 == 0:
                row += _hash(column, key)
                row %= rows
            else:
                column += _hash(row, key)
                column %= columns
        row *= columns
        row += column
        return row


def _hash(coordinate: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 63 mixed bits: one less than 64, so that adding a coordinate does not overflow."""
    mixed = coordinate ^ key
    mixed *= _FIRST
    mixed ^= mixed >> _HALF
    mixed *= _SECOND
    mixed >>= _ONE
    return mixed
