"""What the file of one rank says: phases in sum and by slice, resources over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

from samestep.track.curve import Curve
from samestep.track.lines import LineReader
from samestep.track.stragglers import Slices

BYTES_PER_WINDOW: Final = ("sent_bytes", "received_bytes", "read_bytes", "written_bytes")
RESOURCES: Final = ("cpu_percent", "memory_bytes", "machine_cpu_percent", "machine_memory_percent")


@final
class RankRecord:
    """The sums and curves of one rank's file; `update` reads what has come since the last call."""

    def __init__(self, path: Path) -> None:
        self._reader = LineReader(path)
        self._begin()

    def _begin(self) -> None:
        self.steps = 0
        self.seconds = 0.0  # of steps
        self.wall = 0.0  # between the lines: with evaluations and all else
        self.slowest = 0.0
        self.last_time = 0.0
        self.phases: dict[str, float] = {}
        self.slices = Slices()
        self.speed = Curve()  # samples per second
        self.resources: dict[str, Curve] = {}

    @property
    def damaged(self) -> int:
        """Lines that could not be read."""
        return self._reader.damaged

    def update(self) -> None:
        """Read what is new."""
        if self._reader.begun_anew():
            self._begin()
        for _, line in self._reader.read():
            try:
                self._add(line)
            except (KeyError, TypeError, ValueError, AttributeError):  # whole JSON, but not a line of ours
                self._reader.damaged += 1

    def _add(self, line: Mapping[str, Any]) -> None:
        first, last, steps = int(line["first"]), int(line["last"]), int(line["steps"])
        seconds, wall, samples = float(line["seconds"]), float(line["wall"]), int(line["samples"])
        phases = {str(name): float(value) for name, value in line["phases"].items()}
        self.steps += steps
        self.seconds += seconds
        self.wall += wall
        self.slowest = max(self.slowest, float(line["slowest"]))
        self.last_time = max(self.last_time, float(line["time"]))
        for name, value in phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + value
        if steps and first <= last:
            self.slices.add(first, last, steps, phases)
        if seconds > 0:
            self.speed.add(last, samples / seconds)
        for name, value in _readings(line["resources"], wall).items():
            self.resources.setdefault(name, Curve()).add(last, value)


def _readings(resources: Mapping[str, Any], wall: float) -> dict[str, float]:
    found = {name: float(resources[name]) for name in RESOURCES if name in resources}
    for name in BYTES_PER_WINDOW:
        if name in resources and wall > 0:
            found[f"{name}_per_second"] = float(resources[name]) / wall
    for name, value in (resources.get("gpu") or {}).items():
        found[f"gpu_{name}"] = float(value)
    return found
