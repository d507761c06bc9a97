"""Machines by name and boot, local ranks by who shares one, and limits as the system tells them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.topology import machine


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_local_ranks_count_each_machine_once_through(machines: list[str]) -> None:
    places = [machine.locality(machines, rank) for rank in range(len(machines))]
    for name in set(machines):
        ranks = [rank for rank, other in enumerate(machines) if other == name]
        assert [places[rank] for rank in ranks] == [(index, len(ranks)) for index in range(len(ranks))]


def test_a_machine_is_named_by_host_and_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine.machine_id()
    assert machine.machine_id() == here
    monkeypatch.setattr("socket.gethostname", lambda: "a container of it")
    assert machine.machine_id() != here


def test_limits_are_those_of_the_process() -> None:
    found = machine.limits()
    assert set(found) == {"nofile", "nproc", "memlock", "core"}
    assert found["nofile"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert all(value is None or value >= 0 for value in found.values())


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"a/memory.max": "max\n"}, None),
        ({"a/b/memory.max": "500\n", "a/memory.max": "400\n", "memory.max": "max\n"}, 400),
    ],
)
def test_every_parent_limits_memory(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    (tmp_path / "groups").write_text("0::/a/b\n")
    (tmp_path / "mounted").mkdir()
    for name, text in files.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert machine.memory_limit(tmp_path / "groups", tmp_path / "mounted") == expected
    assert machine.memory_limit(tmp_path / "none", tmp_path) is None


def test_memory_and_disk_are_seen(tmp_path: Path) -> None:
    assert machine.free_memory() > 0
    assert machine.free_disk(tmp_path) > 0
    shared = machine.shared_memory()
    assert shared is None or shared[0] >= shared[1]
