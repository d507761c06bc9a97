"""Ranks killed at random moments: the run goes on with others, in the bits of one that nobody disturbed."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from stops_on_processes import STEPS, killed, train

from samestep.checkpoint.reader import StoredCheckpoint
from samestep.checkpoint.shelf import Shelf
from samestep.errors import PeerLost
from samestep.testing.processes import run_processes
from samestep.track.ledger import compared_values, read_ledger

KILLS = 12


def visited(folder: Path) -> dict[int, list[int]]:
    """Return the sample ids of each step, as it was taken last."""
    lines = (folder / "visits").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


@pytest.mark.timeout(240)
def test_kill_9_at_random_steps_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    draw = Random(11)
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    expected = train(None, tmp_path / "one" / "run")
    run = tmp_path / "many" / "run"
    newest, kills = 0, 0
    while kills < KILLS:
        world_size = (3, 2)[kills % 2]
        who = range(world_size) if kills % 4 == 3 else [draw.randrange(world_size)]
        step, within = (None, draw.randint(1, 8)) if kills % 3 == 1 else (newest + draw.randint(0, 3), None)
        at = dict.fromkeys(who, (step, within))
        strategy = draw.choice(["replicate", "zero1"])
        with pytest.raises(PeerLost, match="SIGKILL"):
            run_processes(killed, world_size, str(run), strategy, at, timeout_s=100)
        kills += 1
        for place in Shelf(run / "checkpoints").whole():
            with StoredCheckpoint(place) as stored:
                stored.require_whole(sorted(stored.manifest.files))
        steps = [int(place.name.removeprefix("step-")) for place in Shelf(run / "checkpoints").whole()]
        assert max(steps, default=0) >= newest
        newest = max(steps, default=0)
    assert 0 < newest < STEPS
    fingerprints = run_processes(killed, 3, str(run), "zero1", {}, timeout_s=100)
    assert fingerprints == [expected.fingerprint] * 3
    ledgers = [read_ledger(tmp_path / name / "run" / "ledger.jsonl").steps for name in ("one", "many")]
    one, many = ([compared_values(report) for report in ledger] for ledger in ledgers)
    assert one == many
    assert visited(tmp_path / "one") == visited(tmp_path / "many")
    assert [place.name for place in (run / "checkpoints").iterdir() if place.name.startswith(".")] == []
