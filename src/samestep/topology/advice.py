"""What stands in the way of training, told as sentences with the command that changes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from samestep.topology.environment import INTERFACE, THREADS

GIB = 2**30
LEAST_SHARED = GIB
LEAST_FILES = 4096
LEAST_PROCESSES = 2048
LEAST_DISK = 5 * GIB
LEAST_MEMORY = GIB  # for each rank of the machine: torch alone takes a quarter of it
MOST_SKEW_S = 1.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One sentence, with the command that changes what it tells."""

    fatal: bool  # training is impossible until it is followed
    text: str


def advise(facts: Mapping[str, Any]) -> Iterator[Advice]:
    """Yield what should be changed for the rank that `inventory.inventory` described.

    To its facts belong "devices" (the visible accelerators), "interface" (the chosen one), "is_loopback" and
    "torch_error" (None, or why torch cannot be imported).
    """
    yield from _torch(facts)
    yield from _ranks(facts)
    yield from _network(facts)
    yield from _memory(facts)
    yield from _disks(facts)
    yield from _limits(facts)


def advise_together(ranks: list[Mapping[str, Any]]) -> Iterator[Advice]:
    """Yield what should be changed because of unlike ranks."""
    for name in ("python", "torch", "samestep"):
        found = {str(facts["versions"][name]): facts["place"]["rank"] for facts in ranks}
        if len(found) > 1:
            told = ", ".join(f"{version} on rank {rank}" for version, rank in sorted(found.items()))
            yield Advice(
                fatal=name == "torch",
                text=f"The ranks have unlike versions of {name} ({told}): their bits would differ. Install "
                f"one on all machines: pip install {name}==VERSION.",
            )


def advise_clock(rank: int, host: str, ahead_s: float) -> Iterator[Advice]:
    """Yield what to do where the clock of a rank's machine differs from that of rank 0."""
    if abs(ahead_s) > MOST_SKEW_S:
        way = "ahead of" if ahead_s > 0 else "behind"
        yield Advice(
            fatal=False,
            text=f"The clock of {host} (rank {rank}) is {abs(ahead_s):.1f} s {way} that of rank 0, so times "
            "in logs cannot be compared. Set it: sudo chronyc makestep (or sudo timedatectl set-ntp true).",
        )


def _torch(facts: Mapping[str, Any]) -> Iterator[Advice]:
    version = str(facts["versions"]["torch"])
    if facts["torch_error"] is not None:
        yield Advice(
            fatal=True,
            text=f"torch cannot be imported ({facts['torch_error']}). Install it: pip install torch.",
        )
    elif facts["accelerators"] and not facts["devices"]:
        if version.endswith("+cpu"):
            how = "torch is a build without CUDA. Install one with it: pip install --force-reinstall torch"
        else:
            how = "torch sees none of them. Look at CUDA_VISIBLE_DEVICES and at the driver: nvidia-smi"
        yield Advice(fatal=False, text=f"This machine has {facts['accelerators']} NVIDIA devices, but {how}.")


def _ranks(facts: Mapping[str, Any]) -> Iterator[Advice]:
    here, devices, usable = (
        facts["place"]["local_world_size"],
        len(facts["devices"]),
        facts["cores"]["usable"],
    )
    threads = facts["threads"].get(THREADS, "")
    if devices and here > devices:
        yield Advice(
            fatal=True,
            text=f"{here} ranks run on this machine, but it has {devices} devices, and NCCL needs one for "
            f"each rank. Start at most {devices} ranks on it: samestep run --workers {devices}.",
        )
    if not devices and here > usable:
        yield Advice(
            fatal=False,
            text=f"{here} ranks share {usable} usable cores of this machine and wait for one another. Start "
            f"at most {usable} ranks on it: samestep run --workers {usable}.",
        )
    if threads.isdecimal() and here * int(threads) > max(usable, here):
        yield Advice(
            fatal=False,
            text=f"{THREADS} is {threads}, and {here} ranks with so many threads are more than the {usable} "
            f"usable cores. Set it: export {THREADS}={max(1, usable // here)}.",
        )


def _network(facts: Mapping[str, Any]) -> Iterator[Advice]:
    several = facts["place"]["local_world_size"] < facts["place"]["world_size"]
    if several and facts["is_loopback"]:
        others = [
            interface["name"]
            for interface in facts["interfaces"]
            if interface["up"] and interface["addresses"] and interface["name"] != facts["interface"]
        ]
        yield Advice(
            fatal=True,
            text=f"The ranks run on several machines, but {INTERFACE} leads to {facts['interface']}, which "
            "other machines never reach. Name the right one: export "
            f"{INTERFACE}={'|'.join(others) or 'eth0'}.",
        )


def _memory(facts: Mapping[str, Any]) -> Iterator[Advice]:
    here = facts["place"]["local_world_size"]
    if facts["memory"]["available"] < here * LEAST_MEMORY:
        yield Advice(
            fatal=False,
            text=f"Only {facts['memory']['available'] / GIB:.1f} GiB of memory are free for {here} ranks. "
            "See what takes it: ps aux --sort=-rss | head.",
        )
    shared = facts["shared_memory"]
    if shared is not None and shared["total"] < LEAST_SHARED:
        yield Advice(
            fatal=False,
            text=f"/dev/shm has {shared['total'] / GIB:.2f} GiB; loader workers and NCCL need more. Enlarge "
            "it: docker run --shm-size=8g, or sudo mount -o remount,size=8g /dev/shm.",
        )


def _disks(facts: Mapping[str, Any]) -> Iterator[Advice]:
    folder, temporary = facts["disks"]["folder"], facts["disks"]["temporary"]
    if not folder["writable"] or folder["free"] < LEAST_DISK:
        why = "may not be written" if not folder["writable"] else f"has {folder['free'] / GIB:.1f} GiB free"
        yield Advice(
            fatal=False,
            text=f"The current folder {folder['path']} {why}. Keep runs elsewhere: samestep train "
            "RECIPE.yaml --folder /another/disk/run.",
        )
    if not temporary["writable"] or temporary["free"] < GIB:
        why = "may not be written" if not temporary["writable"] else "is almost full"
        yield Advice(
            fatal=not temporary["writable"],
            text=f"The folder for temporary files {temporary['path']} {why}. Name another: export "
            "TMPDIR=/another/disk.",
        )


def _limits(facts: Mapping[str, Any]) -> Iterator[Advice]:
    limits = facts["limits"]
    if limits["nofile"] is not None and limits["nofile"] < LEAST_FILES:
        yield Advice(
            fatal=False,
            text=f"A process may open {limits['nofile']} files; loader workers and ranks need a descriptor "
            "for each tensor and peer. Raise it: ulimit -n 65536.",
        )
    if limits["nproc"] is not None and limits["nproc"] < LEAST_PROCESSES:
        yield Advice(
            fatal=False,
            text=f"A user may have {limits['nproc']} processes and threads, which ranks and loader workers "
            "use up. Raise it: ulimit -u 65536.",
        )
    if facts["devices"] and limits["memlock"] is not None and facts["place"]["world_size"] > 1:
        yield Advice(
            fatal=False,
            text=f"A process may lock {limits['memlock'] // 1024} KiB of memory, too little for RDMA between "
            "machines. Raise it: ulimit -l unlimited.",
        )
