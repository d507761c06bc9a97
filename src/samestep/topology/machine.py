"""Which machine this is, and what it has besides devices: memory, disk, clock and limits."""

from __future__ import annotations

import resource
import shutil
import socket
from pathlib import Path

import psutil

BOOT = Path("/proc/sys/kernel/random/boot_id")
SHARED = Path("/dev/shm")
LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
    "core": resource.RLIMIT_CORE,
}


def machine_id() -> str:
    """Name this machine so that no two of a run have one name: host names alone may repeat.

    Containers of one machine share its boot and differ by host name; they count as machines of their own, as
    each sees its own devices.
    """
    boot = BOOT.read_text().strip() if BOOT.is_file() else str(psutil.boot_time())
    return f"{socket.gethostname()}/{boot}"


def locality(machines: list[str], rank: int) -> tuple[int, int]:
    """Return the local rank and the local world size of a rank, from the machine of each rank.

    >>> locality(["a", "b", "a", "a"], 2)
    (1, 3)
    """
    alike = [other for other, machine in enumerate(machines) if machine == machines[rank]]
    return alike.index(rank), len(alike)


def free_memory() -> int:
    """Return the bytes of memory that can be had without swapping."""
    return int(psutil.virtual_memory().available)


def memory_limit(
    groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the bytes of memory that control groups allow this process, or None for no limit."""
    if not groups.is_file():
        return None
    paths = [line.split(":", 2)[2] for line in groups.read_text().splitlines() if line.startswith("0::")]
    folders = [mounted / path.lstrip("/") for path in paths]
    chain = [parent for folder in folders for parent in (folder, *folder.parents)]
    texts = [(folder / "memory.max") for folder in chain if folder.is_relative_to(mounted)]
    values = [path.read_text().strip() for path in texts if path.is_file()]
    return min((int(value) for value in values if value != "max"), default=None)


def free_disk(folder: Path) -> int:
    """Return the bytes that are free where a folder lies."""
    return shutil.disk_usage(folder).free


def shared_memory() -> tuple[int, int] | None:
    """Return the size of /dev/shm and what is free of it, in bytes; None where there is none."""
    if not SHARED.is_dir():
        return None
    usage = shutil.disk_usage(SHARED)
    return usage.total, usage.free


def limits() -> dict[str, int | None]:
    """Return the limits of this process that matter to training, as `ulimit` gives them; None: no limit."""
    found = {name: resource.getrlimit(number)[0] for name, number in LIMITS.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in found.items()}
