"""A stream whose samples are mixed within blocks, found again at any place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np

from samestep.config.arguments import require_count
from samestep.data.order import Order
from samestep.data.passes import Pass
from samestep.data.stream import Streamed, is_stream
from samestep.errors import ConfigError
from samestep.numerics.seeds import Purpose, derive


@final
class Shuffled:
    """A stream in another order in each pass: blocks of `block` samples, each in a drawn order of its own.

    A sample stays within its block, so mix coarsely beforehand. Every rank holds a block in memory. A place
    is found by passing over the blocks before it, as cheaply as the stream allows.
    """

    def __init__(self, stream: Streamed, *, block: int, seed: int = 0) -> None:
        if not is_stream(stream):
            raise ConfigError(
                f"Shuffled was given a {type(stream).__name__}, and no stream. Map-style data are shuffled "
                "by batching.shuffle."
            )
        require_count("block", block, least=1)
        self._stream, self._block, self._seed = stream, block, seed
        self._epoch = 0
        self._place = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the order of a pass."""
        self._epoch = epoch

    def seek(self, place: int) -> None:
        """Let the next pass begin at a place."""
        self._place = place

    def __iter__(self) -> Iterator[Any]:
        place, self._place = self._place, 0
        number, inside = divmod(place, self._block)
        source = Pass(self._stream, seed=self._seed, epoch=self._epoch, place=number * self._block)
        return _mixed(source, number, inside, block=self._block, seed=derive(self._seed, Purpose.ORDER))


def _mixed(source: Pass, number: int, inside: int, *, block: int, seed: int) -> Iterator[Any]:
    epoch = source.epoch
    while source.has_more():
        held = [source.take() for _ in range(block) if source.has_more()]
        order = Order(num_samples=len(held), seed=derive(seed, epoch))
        places = np.arange(len(held), dtype=np.int64)
        for place in order.ids(np.full_like(places, number), places)[inside:].tolist():
            yield held[place]
        number, inside = number + 1, 0
