"""Mixtures of sources by weight: which source stands at a place is arithmetic.

The places of a mixture are cut into blocks of one size, in which every source has its number of places, in
proportion to its weight and at least one; a keyed permutation says which. So the number of places of a
source before any place of the mixture is known at once, and with it the place in the source's own walk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from samestep.config.arguments import require_positive
from samestep.data.fetch import MapDataset, count_samples
from samestep.data.order import Order, Placing
from samestep.data.passes import Pass
from samestep.data.stream import Streamed, is_stream
from samestep.errors import ConfigError
from samestep.numerics.seeds import derive

_LONGEST_BLOCK: Final = 4096


def shares(weights: Sequence[float]) -> list[int]:
    """Return how many places of a block each source has.

    Exact where a block of up to 4096 places can be; else the nearest parts of 4096, one at least.

    >>> shares([0.7, 0.3]), shares([1, 1, 2])
    ([7, 3], [1, 1, 2])
    """
    for number, weight in enumerate(weights):
        require_positive(f"the weight of source {number}", weight)
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact, Fraction(0))
    parts = [weight / total for weight in exact]
    length = math.lcm(*(part.denominator for part in parts))
    if length > _LONGEST_BLOCK:
        return [max(1, round(part * _LONGEST_BLOCK)) for part in parts]
    return [int(part * length) for part in parts]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Say which source stands at a place of a mixture, and at which place of its own walk that is."""

    counts: tuple[int, ...]  # places of each source in a block
    seed: int
    _edges: NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Find where each source's part of a block ends."""
        object.__setattr__(self, "_edges", np.cumsum(np.array(self.counts, dtype=np.int64)))

    def find(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source at each place, and the place in that source's walk over all its epochs."""
        length = sum(self.counts)
        blocks, inside = np.divmod(places, length)
        slots = Order(num_samples=length, seed=derive(self.seed, length)).ids(blocks, inside)
        sources = np.searchsorted(self._edges, slots, side="right").astype(np.int64)
        counts = np.array(self.counts, dtype=np.int64)[sources]
        first = self._edges[sources] - counts
        return sources, blocks * counts + slots - first


@final
class Mixture:
    """Several map-style data sets as one, mixed by weight.

    Sample i is sample i of the sources joined end to end; training visits them in another way. An epoch of
    the mixture has as many places as the sources have samples together, shared out by weight; each source is
    walked in its own order, each sample once in each epoch of its own, on and on over the mixture's epochs.
    So a source with a small weight lasts for several epochs of the mixture, and one with a large weight is
    walked several times in one. In an evaluation each sample counts once.

    Raises ConfigError for sources that are no map-style data sets, and weights that are not positive.
    """

    def __init__(self, sources: Sequence[MapDataset[Any]], weights: Sequence[float]) -> None:
        _require_pairs(sources, weights)
        self._sources = list(sources)
        self._lengths = [count_samples(source) for source in sources]
        self._starts = [sum(self._lengths[:number]) for number in range(len(self._lengths) + 1)]
        if 0 in self._lengths:
            raise ConfigError(f"source {self._lengths.index(0)} of the mixture has no samples.")
        self.shares = tuple(shares(weights))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a mixture of {len(self)} samples")
        source = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._sources[source][index - self._starts[source]]

    def placing(self, *, seed: int, shuffle: bool) -> Placing:
        """Return the order in which training visits the samples; `shuffle` is that of each source."""
        orders = [
            Order(num_samples=length, seed=derive(seed, number), shuffle=shuffle)
            for number, length in enumerate(self._lengths)
        ]
        return _MixedOrder(
            blocks=Blocks(counts=self.shares, seed=seed), orders=orders, starts=self._starts[:-1]
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _MixedOrder:
    blocks: Blocks
    orders: Sequence[Order]
    starts: Sequence[int]

    def visits(
        self, epochs: NDArray[np.int64], places: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ids, and the epoch of each sample's own source."""
        per_epoch = sum(order.num_samples for order in self.orders)
        sources, walked = self.blocks.find(epochs * per_epoch + places)
        ids, visits = np.empty_like(places), np.empty_like(places)
        for number, order in enumerate(self.orders):
            here = sources == number
            own_epochs, own_places = np.divmod(walked[here], order.num_samples)
            ids[here] = self.starts[number] + order.ids(own_epochs, own_places)
            visits[here] = own_epochs
        return ids, visits


@final
class StreamMixture:
    """Several streams as one, mixed by weight; it has no end, so train for a number of steps.

    Each source is read in its own order, and begun anew when a pass of it is over. Where the run goes on,
    each source is opened where it stood.
    """

    def __init__(self, sources: Sequence[Streamed], weights: Sequence[float], *, seed: int = 0) -> None:
        _require_pairs(sources, weights)
        for number, source in enumerate(sources):
            if not is_stream(source):
                raise ConfigError(
                    f"source {number} of the mixture is a {type(source).__name__}, and no stream. Mix "
                    "map-style data sets with samestep.data.Mixture."
                )
        self._sources = list(sources)
        self._seed = seed
        self._blocks = Blocks(counts=tuple(shares(weights)), seed=seed)
        self._next: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        state, self._next = self._next, None
        return _Mixing(self._sources, self._blocks, self._seed, state)

    def load_state(self, state: dict[str, Any]) -> None:
        """Let the next pass go on from a state of its iterator."""
        self._next = state


@final
class _Mixing:
    """Reads the sources of a mixture in turn; its state is where each of them stands."""

    def __init__(
        self, sources: Sequence[Streamed], blocks: Blocks, seed: int, state: dict[str, Any] | None
    ) -> None:
        self._sources, self._blocks, self._seed = sources, blocks, seed
        self._place = state["place"] if state else 0
        at = state["sources"] if state else [(0, 0, None)] * len(sources)
        self._passes = [self._open(number, *opened) for number, opened in enumerate(at)]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        number = self._advance()
        if not self._passes[number].has_more():
            self._passes[number] = self._open(number, self._passes[number].epoch + 1, 0, None)
            if not self._passes[number].has_more():
                raise ConfigError(f"source {number} of the mixture has no samples.")
        return self._passes[number].take()

    def state(self) -> dict[str, Any]:
        """Return where each source stands."""
        return {
            "place": self._place,
            "sources": [[one.epoch, one.place, one.state()] for one in self._passes],
        }

    def _advance(self) -> int:
        sources, _ = self._blocks.find(np.array([self._place], dtype=np.int64))
        self._place += 1
        return int(sources[0])

    def _open(self, number: int, epoch: int, place: int, source: Any) -> Pass:
        seed = derive(self._seed, number)
        return Pass(self._sources[number], seed=seed, epoch=epoch, place=place, source=source)


def _require_pairs(sources: Sequence[object], weights: Sequence[float]) -> None:
    if not sources or len(sources) != len(weights):
        raise ConfigError(
            f"a mixture of {len(sources)} sources was given {len(weights)} weights. Give one for each."
        )
