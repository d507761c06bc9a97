"""Advice: each sentence comes where it helps, names the values, and holds the command."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from samestep.topology.advice import GIB, advise, advise_clock, advise_together
from samestep.topology.environment import Environment, Place
from samestep.topology.inventory import inventory

HEALTHY: dict[str, Any] = {
    "place": {"rank": 0, "world_size": 2, "local_rank": 0, "local_world_size": 2},
    "machine": {"host": "h0"},
    "versions": {"python": "3.11.7", "torch": "2.13.0", "samestep": "0.1"},
    "devices": ["cuda:0 H200, 140 GiB", "cuda:1 H200, 140 GiB"],
    "accelerators": 2,
    "torch_error": None,
    "cores": {"machine": 8, "affinity": 8, "quota": None, "usable": 8},
    "threads": {"OMP_NUM_THREADS": "4"},
    "interfaces": [
        {"name": "lo", "up": True, "addresses": ["127.0.0.1"]},
        {"name": "ib0", "up": True, "addresses": ["10.0.0.1"]},
        {"name": "eth1", "up": False, "addresses": []},
    ],
    "interface": "ib0",
    "is_loopback": False,
    "memory": {"total": 64 * GIB, "available": 32 * GIB, "limit": None},
    "disks": {
        "folder": {"path": "/home", "free": 100 * GIB, "writable": True},
        "temporary": {"path": "/tmp", "free": 100 * GIB, "writable": True},
    },
    "shared_memory": {"total": 8 * GIB, "free": 8 * GIB},
    "limits": {"nofile": 65536, "nproc": None, "memlock": None, "core": 0},
}


def changed(**changes: Any) -> dict[str, Any]:
    """Return the healthy facts with values replaced; "a__b" is key b of a."""
    facts = copy.deepcopy(HEALTHY)
    for name, value in changes.items():
        *above, last = name.split("__")
        inner = facts
        for key in above:
            inner = inner[key]
        inner[last] = value
    return facts


def test_where_all_is_well_nothing_is_said() -> None:
    assert list(advise(HEALTHY)) == []
    assert list(advise_together([HEALTHY, HEALTHY])) == []
    assert list(advise_clock(1, "h1", 0.9)) == []


@pytest.mark.parametrize(
    ("facts", "fatal", "says", "command"),
    [
        (
            changed(shared_memory={"total": GIB // 16, "free": 0}),
            False,
            "/dev/shm has 0.06 GiB",
            "--shm-size=8g",
        ),
        (changed(limits__nofile=1024), False, "may open 1024 files", "ulimit -n 65536"),
        (changed(limits__nproc=500), False, "may have 500 processes", "ulimit -u 65536"),
        (changed(limits__memlock=65536), False, "lock 64 KiB", "ulimit -l unlimited"),
        (
            changed(place__world_size=4, interface="lo", is_loopback=True),
            True,
            "several machines, but GLOO_SOCKET_IFNAME leads to lo",
            "export GLOO_SOCKET_IFNAME=ib0.",
        ),
        (
            changed(threads={"OMP_NUM_THREADS": "8"}),
            False,
            "OMP_NUM_THREADS is 8",
            "export OMP_NUM_THREADS=4",
        ),
        (
            changed(devices=["cuda:0"]),
            True,
            "2 ranks run on this machine, but it has 1 devices",
            "--workers 1",
        ),
        (
            changed(devices=[], accelerators=0, threads={}, cores__usable=1),
            False,
            "2 ranks share 1 usable cores",
            "--workers 1",
        ),
        (
            changed(devices=[], versions__torch="2.13.0+cpu"),
            False,
            "has 2 NVIDIA devices, but torch is a build without CUDA",
            "pip install",
        ),
        (changed(devices=[]), False, "torch sees none of them", "nvidia-smi"),
        (changed(torch_error="no libcudart"), True, "cannot be imported (no libcudart)", "pip install torch"),
        (changed(memory__available=GIB), False, "Only 1.0 GiB of memory are free for 2 ranks", "ps aux"),
        (changed(disks__folder__free=GIB), False, "/home has 1.0 GiB free", "--folder /another/disk/run"),
        (changed(disks__folder__writable=False), False, "/home may not be written", "--folder"),
        (changed(disks__temporary__free=0), False, "/tmp is almost full", "export TMPDIR="),
        (changed(disks__temporary__writable=False), True, "/tmp may not be written", "export TMPDIR="),
    ],
)
def test_each_advice(facts: dict[str, Any], fatal: bool, says: str, command: str) -> None:
    (item,) = advise(facts)
    assert item.fatal == fatal
    assert says in item.text
    assert command in item.text


def test_unlike_ranks_and_clocks() -> None:
    other = changed(versions__torch="2.14.0", place__rank=1)
    (item,) = advise_together([HEALTHY, other])
    assert item.fatal
    assert "torch (2.13.0 on rank 0, 2.14.0 on rank 1)" in item.text
    (item,) = advise_clock(3, "h3", -2.51)
    assert not item.fatal
    assert "clock of h3 (rank 3) is 2.5 s behind" in item.text
    assert "chronyc makestep" in item.text


def test_the_inventory_has_all_that_is_asked_of_it() -> None:
    """Its keys are those of the facts above; what only torch knows is added by the command."""
    found = inventory(Environment.read({"OMP_NUM_THREADS": "2"}), Place(reason="a test"))
    known = {"devices", "torch_error", "interface", "is_loopback"}
    assert set(HEALTHY) - known <= set(found)
    for name in ("place", "cores", "memory", "limits", "versions"):
        assert set(HEALTHY[name]) <= set(found[name])
    assert found["threads"] == {"OMP_NUM_THREADS": "2"}
    facts = {**found, "devices": [], "torch_error": None, "interface": None, "is_loopback": False}
    assert all(item.text for item in advise(facts))
