"""Which ranks stay well above the others, in computing or in loading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, final

MOST_SLICES: Final = 64  # of the run's steps
WELL_ABOVE: Final = 1.25  # times the median of the other ranks
ROOM: Final = 1.1  # above what an uneven share of micro-batches explains
STAYS: Final = 0.6  # of the slices of the run in which both were at work
NOTICEABLE: Final = 0.02  # of the step's time: what is less is not worth a word
FEWEST_SLICES: Final = 3
COMPARED: Final = {"computing": ("forward", "backward"), "data": ("data",)}


@final
class Slices:
    """Seconds per phase of one rank, by equal slices of the run's steps."""

    def __init__(self) -> None:
        self.width = 1
        self.steps: dict[int, float] = {}
        self.phases: dict[int, dict[str, float]] = {}

    def add(self, first: int, last: int, steps: int, phases: Mapping[str, float]) -> None:
        """Spread the sums over `first`..`last` evenly over the slices that these steps touch."""
        while last // self.width >= MOST_SLICES:
            self.widen(self.width * 2)
        length = last - first + 1
        for number in range(first // self.width, last // self.width + 1):
            start, end = number * self.width, (number + 1) * self.width
            share = (min(end, last + 1) - max(start, first)) / length
            self._put(number, steps * share, {name: value * share for name, value in phases.items()})

    def widen(self, width: int) -> None:
        """Make the slices wider: a power of two times as wide as they are."""
        old_steps, old_phases, factor = self.steps, self.phases, width // self.width
        self.width, self.steps, self.phases = width, {}, {}
        for number, steps in old_steps.items():
            self._put(number // factor, steps, old_phases[number])

    def _put(self, number: int, steps: float, phases: Mapping[str, float]) -> None:
        self.steps[number] = self.steps.get(number, 0.0) + steps
        sums = self.phases.setdefault(number, {})
        for name, value in phases.items():
            sums[name] = sums.get(name, 0.0) + value

    def per_step(self, names: Iterable[str]) -> dict[int, float]:
        """Return slice -> seconds of these phases in one step."""
        return {
            number: sum(self.phases[number].get(name, 0.0) for name in names) / steps
            for number, steps in self.steps.items()
            if steps > 0
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank whose time per step stays well above that of the others."""

    rank: int
    phase: str
    seconds: float  # per step
    others: float  # the median of the other ranks
    share: float  # of the slices in which it was well above

    def written(self) -> dict[str, Any]:
        """Return the numbers for the page."""
        return {
            "rank": self.rank,
            "phase": self.phase,
            "seconds": self.seconds,
            "others": self.others,
            "share": self.share,
        }


def find_stragglers(ranks: Mapping[int, Slices], *, uneven: float = 1.0) -> list[Straggler]:
    """Return the ranks that stay well above, slowest first.

    `uneven` is by how much the largest share of micro-batches exceeds the smallest one: so much more
    computing is no fault of a rank's.
    """
    if len(ranks) < 2:
        return []
    width = max(slices.width for slices in ranks.values())
    for slices in ranks.values():
        if slices.width < width:
            slices.widen(width)
    found: list[Straggler] = []
    every = {
        rank: slices.per_step({n for p in slices.phases.values() for n in p})
        for rank, slices in ranks.items()
    }
    for phase, names in COMPARED.items():
        seconds = {rank: slices.per_step(names) for rank, slices in ranks.items()}
        limit = max(WELL_ABOVE, ROOM * uneven) if phase == "computing" else WELL_ABOVE
        for rank in ranks:
            straggler = _judge(rank, phase, seconds, every[rank], limit)
            if straggler is not None:
                found.append(straggler)
    return sorted(found, key=lambda straggler: straggler.others - straggler.seconds)


def _judge(
    rank: int,
    phase: str,
    seconds: Mapping[int, Mapping[int, float]],
    whole: Mapping[int, float],
    limit: float,
) -> Straggler | None:
    own: list[float] = []
    theirs: list[float] = []
    for number, value in seconds[rank].items():
        others = [values[number] for other, values in seconds.items() if other != rank and number in values]
        if others:
            own.append(value)
            theirs.append(median(others))
    if len(own) < FEWEST_SLICES:
        return None
    above = sum(mine > limit * other for mine, other in zip(own, theirs, strict=True)) / len(own)
    mine, other = sum(own) / len(own), sum(theirs) / len(theirs)
    step = sum(whole.values()) / max(1, len(whole))
    if above < STAYS or mine <= limit * other or mine - other < NOTICEABLE * step:
        return None
    return Straggler(rank=rank, phase=phase, seconds=mine, others=other, share=above)
