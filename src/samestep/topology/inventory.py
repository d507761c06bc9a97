"""What a process can tell of itself and its machine, as plain data; torch is not imported for it."""

from __future__ import annotations

import os
import platform
import socket
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from samestep.topology.devices import cpu_quota, num_cpus
from samestep.topology.environment import INTERFACE, THREADS, Environment
from samestep.topology.machine import free_disk, free_memory, limits, machine_id, memory_limit, shared_memory
from samestep.topology.place import Place

PACKAGES = ("samestep", "torch", "numpy")


def inventory(environment: Environment, place: Place) -> dict[str, Any]:
    """Collect what training depends on: place, versions, cores, threads, network, memory, disk and limits."""
    return {
        "place": {
            "launcher": place.launcher,
            "reason": place.reason,
            "rank": place.rank,
            "world_size": place.world_size,
            "local_rank": place.local_rank,
            "local_world_size": place.local_world_size,
            "rendezvous": place.rendezvous,
            "job": place.job,
        },
        "machine": {"host": socket.gethostname(), "id": machine_id(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "cores": _cores(),
        "threads": environment.values([THREADS, "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"]),
        "interfaces": _interfaces(),
        "interface_of_the_user": environment.values([INTERFACE, "NCCL_SOCKET_IFNAME"]),
        "memory": {
            "total": psutil.virtual_memory().total,
            "available": free_memory(),
            "limit": memory_limit(),
        },
        "disks": {"folder": _disk(Path.cwd()), "temporary": _disk(Path(tempfile.gettempdir()))},
        "shared_memory": _shared(),
        "limits": limits(),
        "accelerators": accelerators_of_the_system(),
    }


def accelerators_of_the_system() -> int:
    """Count the NVIDIA devices that the system knows, whether or not the installed torch can use them."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cores() -> dict[str, Any]:
    affinity = len(os.sched_getaffinity(0)) if sys.platform == "linux" else None
    return {"machine": os.cpu_count(), "affinity": affinity, "quota": cpu_quota(), "usable": num_cpus()}


def _interfaces() -> list[dict[str, Any]]:
    states = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        {
            "name": name,
            "up": name in states and states[name].isup,
            "megabits_per_s": states[name].speed if name in states else 0,
            "addresses": [entry.address for entry in entries if entry.family in families],
        }
        for name, entries in sorted(psutil.net_if_addrs().items())
    ]


def _disk(folder: Path) -> dict[str, Any]:
    return {"path": str(folder), "free": free_disk(folder), "writable": os.access(folder, os.W_OK)}


def _shared() -> dict[str, int] | None:
    found = shared_memory()
    return None if found is None else {"total": found[0], "free": found[1]}
