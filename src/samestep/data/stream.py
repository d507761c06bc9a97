"""Streams: data that are read in their order, and what a stream may offer so that reading costs less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset

from samestep.errors import ConfigError


@runtime_checkable
class Streamed(Protocol):
    """A stream: each `iter` of it is one pass, from the first sample on.

    Law: every rank must see the same samples in the same order, and so must a run that goes on. Before each
    sample PyTorch's, numpy's and Python's generators are seeded by (seed, pass, place), so what a stream
    draws from them is the same everywhere. A stream with `__len__` gives just so many samples in each pass.
    """

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass."""


@runtime_checkable
class Skips(Protocol):
    """Optional, of the iterator: it passes over samples at less cost than giving them."""

    def skip(self, count: int, /) -> int:
        """Pass over up to `count` samples; return how many there were, fewer at the end of the pass."""


@runtime_checkable
class Seeks(Protocol):
    """Optional, of the stream: the next `iter`, and no later one, begins at a place of its pass."""

    def seek(self, place: int, /) -> None:
        """Let the next pass begin at a place, counted from 0."""


@runtime_checkable
class Remembers(Protocol):
    """Optional, of the iterator: its own state, stored with checkpoints."""

    def state(self) -> Any:
        """Return the state after the last sample, as JSON."""


@runtime_checkable
class Recalls(Protocol):
    """Optional, of the stream: the next `iter`, and no later one, goes on from a state of its iterator."""

    def load_state(self, state: Any, /) -> None:
        """Take up a state."""


@runtime_checkable
class CountsPasses(Protocol):
    """Optional, of the stream: it may be another one in each pass."""

    def set_epoch(self, epoch: int, /) -> None:
        """Prepare for a pass, counted from 0."""


@runtime_checkable
class _Indexed(Protocol):
    def __getitem__(self, index: int, /) -> Any: ...


def is_stream(dataset: object) -> bool:
    """Say whether a data set is read as a stream. Raises ConfigError for one that can be read only once."""
    if isinstance(dataset, Iterator):
        raise ConfigError(
            f"the data set is a {type(dataset).__name__}, which has no length and can be read only once. "
            "Give an object whose __iter__ begins a new pass, or a map-style data set."
        )
    if isinstance(dataset, IterableDataset):
        return True
    return isinstance(dataset, Iterable) and not isinstance(dataset, _Indexed)


def length_of(stream: object) -> int | None:
    """Return how many samples a pass promises to have, where it does."""
    if not isinstance(stream, Sized):
        return None
    try:
        return len(stream)
    except (TypeError, NotImplementedError):
        return None
