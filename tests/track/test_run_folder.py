"""The run folder keeps events apart from steps, and is never used twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep.errors import ConfigError
from samestep.events import Notice, RunEnded, RunStarted
from samestep.track.folder import EVENTS, LEDGER, RUN, RunFolder, read_fingerprint, refuse_used


def test_events_facts_and_fingerprint_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with RunFolder(folder) as keep:
        keep(RunStarted(world_size=2, steps=4, facts={"threads": 1}))
        keep(Notice(level="warning", message="careful"))
        assert read_fingerprint(folder) is None
        keep(RunEnded(step=4, update=4, fingerprint="ab" * 32))
    events = [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]
    assert [event["event"] for event in events] == ["RunStarted", "Notice", "RunEnded"]
    assert json.loads((folder / RUN).read_text()) == {"world_size": 2, "steps": 4, "threads": 1}
    assert read_fingerprint(folder) == "ab" * 32
    assert (folder / LEDGER).read_bytes() == b""


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    refuse_used(tmp_path)
    refuse_used(tmp_path / "new")
    with RunFolder(tmp_path):
        pass
    with pytest.raises(ConfigError, match="holds a run already"):
        refuse_used(tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        refuse_used(tmp_path / LEDGER)


def test_a_folder_without_events_has_no_fingerprint(tmp_path: Path) -> None:
    assert read_fingerprint(tmp_path) is None
