"""Each rank's file: sums of a second, phases and resources, and little of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from told_runs import Told, phases, report

from samestep.errors import ConfigError
from samestep.events import Event, RunEnded
from samestep.track.ranks import RankFile


def lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ranks" / f"{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("phases_first", [True, False])
def test_steps_are_summed_over_a_second(tmp_path: Path, phases_first: bool) -> None:
    told = Told(now=0.0)
    with RankFile(tmp_path, 1, clock=told) as keep:
        for step in range(25):
            told.now += 0.25
            events: list[Event] = [
                report(step, 25, 3, told.chance, seconds=0.25),
                phases(step, 1, told.chance),
            ]
            for event in reversed(events) if phases_first else events:
                keep(event)
    found = lines(tmp_path, 1)
    assert 5 <= len(found) <= 8
    spans = [(line["first"], line["last"]) for line in found]
    assert [first for first, _ in spans] == [0, *(last + 1 for _, last in spans[:-1])]
    assert spans[-1][1] == 24
    for line in found:
        assert line["steps"] == line["last"] - line["first"] + 1
        assert line["samples"] == 64 * line["steps"]
        assert line["seconds"] == pytest.approx(0.25 * line["steps"])
        assert line["slowest"] == 0.25
        assert line["phases"]["update"] == pytest.approx(0.006 * line["steps"])
    assert sum(line["wall"] for line in found) == pytest.approx(25 * 0.25)


def test_a_million_fast_steps_leave_a_line_a_second(tmp_path: Path) -> None:
    told = Told(now=0.0)
    one = report(0, 10, 1, told.chance, seconds=0.001)
    with RankFile(tmp_path, 0, clock=told) as keep:
        for _ in range(5000):
            told.now += 0.001
            keep(one)
    assert len(lines(tmp_path)) <= 6


def test_the_end_of_a_run_writes_what_is_left_once(tmp_path: Path) -> None:
    told = Told(now=0.0)
    with RankFile(tmp_path, 0, clock=told) as keep:
        keep(report(0, 1, 1, told.chance))
        keep(RunEnded(step=1, update=1, fingerprint="ab"))
        assert len(lines(tmp_path)) == 1
    assert len(lines(tmp_path)) == 1


def test_a_run_without_steps_writes_nothing(tmp_path: Path) -> None:
    with RankFile(tmp_path, 0):
        pass
    assert lines(tmp_path) == []


def test_resources_are_those_of_this_process(tmp_path: Path) -> None:
    told = Told(now=0.0)
    with RankFile(tmp_path, 0) as keep:
        keep(report(0, 1, 1, told.chance))
    found = lines(tmp_path)[0]["resources"]
    assert found["memory_bytes"] > 1_000_000
    assert 0 <= found["machine_memory_percent"] <= 100
    assert found["sent_bytes"] >= 0
    assert "gpu" not in found


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("a file")
    with pytest.raises(ConfigError, match="rank 2 cannot write"):
        RankFile(tmp_path, 2)
