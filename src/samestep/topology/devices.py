"""What this machine computes with: its accelerators, or the processors it may use.

torch is imported inside functions here: it costs seconds, and the process which only starts ranks does not
need it where the installed build has no accelerators.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.topology.environment import Place

if TYPE_CHECKING:
    import torch


def num_cpus() -> int:
    """Count the processors this process may use: its affinity mask, cut by the quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.floor(quota)))


def num_cuda() -> int:
    """Count the CUDA (or ROCm) devices that are visible to this process."""
    if metadata.version("torch").endswith("+cpu"):
        return 0
    import torch

    return torch.cuda.device_count()


def num_devices() -> int:
    """Count the devices of this machine: its accelerators, or where it has none its processors.

    This is the number of ranks of a run whose size the user left open: on processors ranks, not threads,
    fill the cores.
    """
    return num_cuda() or num_cpus()


def device_of(place: Place) -> torch.device:
    """Return the device of the rank at `place`: a CUDA device where there is one, else the CPU.

    The index is the local rank modulo the visible devices, because some launchers show each rank only its
    own device, and because more ranks than devices are allowed.
    """
    import torch

    visible = num_cuda()
    return torch.device("cuda", place.local_rank % visible) if visible else torch.device("cpu")


def cpu_quota(
    groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Return the processors' worth of time that control groups allow this process, or None for no limit.

    Both versions of control groups are read, and every parent's limit counts. Inside a container the path
    may name folders that only the host sees; the mounted root then holds the limit.
    """
    limits = [limit for folder in _group_folders(groups, mounted) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _group_folders(groups: Path, mounted: Path) -> Iterator[Path]:
    if not groups.is_file():
        return
    for line in groups.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = mounted
        elif "cpu" in controllers.split(","):
            root = mounted / ("cpu" if (mounted / "cpu").is_dir() else controllers)
        else:
            continue
        folder = root / path.lstrip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(root))


def _limit(folder: Path) -> float | None:
    if (second := folder / "cpu.max").is_file():
        quota, period = second.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    if (first := folder / "cpu.cfs_quota_us").is_file():
        microseconds = int(first.read_text())
        return microseconds / int((folder / "cpu.cfs_period_us").read_text()) if microseconds > 0 else None
    return None
