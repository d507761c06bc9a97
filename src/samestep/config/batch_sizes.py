"""How many samples a step has, by update: a table, so that it can be stored, compared and resumed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import final

from samestep.config.arguments import require_count
from samestep.errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The global batch of each update.

    Law: a pure function of the number of applied updates, so a skipped step has the same size again.
    """

    table: tuple[tuple[int, int], ...]  # (first update, samples), by rising update; the first is update 0

    def __post_init__(self) -> None:
        """Raise ConfigError for a table that does not say the size of every update."""
        if not self.table:
            raise ConfigError("batch_size: the table is empty. Give {0: 32, 1000: 64}: update -> samples.")
        for update, size in self.table:
            require_count("batch_size: the update", update, least=0)
            require_count(f"batch_size: the global batch from update {update} on", size, least=1)
        updates = [update for update, _ in self.table]
        if updates != sorted(set(updates)):
            raise ConfigError(f"batch_size: the updates {updates} do not rise.")
        if updates[0] != 0:
            raise ConfigError(
                f"batch_size: the table begins at update {updates[0]}. Say how many samples the first "
                "updates have: {0: 32, ...}."
            )

    def __call__(self, update: int) -> int:
        """Return the samples of the step that may become this update, counted from 0."""
        require_count("update", update, least=0)
        return self.table[bisect_right(self.table, update, key=lambda entry: entry[0]) - 1][1]

    @property
    def largest(self) -> int:
        """The largest global batch."""
        return max(size for _, size in self.table)

    @property
    def smallest(self) -> int:
        """The smallest global batch."""
        return min(size for _, size in self.table)


def batch_size(sizes: Mapping[int, int] | Callable[[int], int], *, updates: int | None = None) -> BatchSizes:
    """Return a schedule of the global batch by update.

    `sizes` maps the first update of each stretch to its samples, or is a function of the update; a function
    is asked for each of the first `updates` updates, once, and its last value stays. Raises ConfigError.

    >>> [batch_size({0: 32, 1000: 64})(update) for update in (0, 999, 1000, 5000)]
    [32, 32, 64, 64]
    >>> batch_size(lambda update: 8 * 2 ** (update // 2), updates=5).table
    ((0, 8), (2, 16), (4, 32))
    """
    if isinstance(sizes, Mapping):
        return BatchSizes(tuple(sorted(sizes.items(), key=_by_update)))
    if not callable(sizes):
        raise ConfigError(
            f"batch_size got a {type(sizes).__name__}. Give a table {{0: 32, 1000: 64}}, or a function of "
            "the update together with updates=."
        )
    if updates is None:
        raise ConfigError("batch_size got a function: say with updates= for how many updates to ask it.")
    require_count("updates", updates, least=1)
    table: list[tuple[int, int]] = []
    for update in range(updates):
        size = sizes(update)
        if not table or table[-1][1] != size:
            table.append((update, size))
    return BatchSizes(tuple(table))


def _by_update(entry: tuple[object, object]) -> int:
    update = entry[0]
    if isinstance(update, bool) or not isinstance(update, Integral):
        raise ConfigError(f"batch_size: {update!r} is no update. Give whole numbers: {{0: 32, 1000: 64}}.")
    return int(update)
