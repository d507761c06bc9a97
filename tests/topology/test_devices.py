"""Devices: processors under affinity and quota, and the device of a local rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from samestep.topology import devices
from samestep.topology.environment import Place


def quota(tmp_path: Path, groups: str, files: dict[str, str]) -> float | None:
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return devices.cpu_quota(tmp_path / "groups", tmp_path / "mounted")


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/only/the/host/sees/it\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n"}, None),
        (
            "5:memory:/m\n4:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            3.0,
        ),
        (
            "4:cpu,cpuacct:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        ("", {}, None),
    ],
)
def test_quota(tmp_path: Path, groups: str, files: dict[str, str], expected: float | None) -> None:
    assert quota(tmp_path, groups, files) == expected


def test_no_control_groups_means_no_limit(tmp_path: Path) -> None:
    assert devices.cpu_quota(tmp_path / "nothing", tmp_path) is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 3), (0.5, 1), (2.9, 2), (8.0, 3)])
def test_processors_are_those_allowed(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 2, 5}, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(devices, "cpu_quota", lambda: quota)
    assert devices.num_cpus() == expected


def test_all_devices_are_accelerators_or_else_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_cpus", lambda: 5)
    monkeypatch.setattr(devices, "num_cuda", lambda: 0)
    assert devices.num_devices() == 5
    monkeypatch.setattr(devices, "num_cuda", lambda: 2)
    assert devices.num_devices() == 2


def test_a_local_rank_takes_its_device_modulo_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [Place(local_rank=rank, local_world_size=4, reason="test") for rank in range(4)]
    monkeypatch.setattr(devices, "num_cuda", lambda: 3)
    assert [devices.device_of(place) for place in places] == [
        torch.device("cuda", index) for index in (0, 1, 2, 0)
    ]
    monkeypatch.setattr(devices, "num_cuda", lambda: 0)
    assert {devices.device_of(place) for place in places} == {torch.device("cpu")}


def test_the_count_of_cuda_devices_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.num_cuda() == torch.cuda.device_count()
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "2.13.0+cpu")
    assert devices.num_cuda() == 0
