"""`samestep doctor`: what it found and why, in text and in JSON; the exit code is the verdict."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from samestep.cli import doctor as command
from samestep.cli.app import app
from samestep.errors import ClusterError, ConfigError
from samestep.topology.advice import Advice
from samestep.topology.environment import Environment

CONTRADICTION = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
}
SECTIONS = ["launcher", "machine", "network", "advice"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(Environment, "current", classmethod(lambda cls: cls.read({})))
    return monkeypatch


def doctor(**options: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        command.doctor(**{"as_json": False, "links": False, "timeout_s": 5.0, **options})
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_plain_look(alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == SECTIONS
    text = "\n".join(lines)
    for word in (
        "no launcher's variables are set",
        "rank 0 of 1",
        "torch ",
        "usable of",
        "/dev/shm",
        "nofile",
    ):
        assert word in text


def test_json_has_the_same(alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"ranks", "links", "advice"}
    (facts,) = told["ranks"]
    assert facts["place"]["launcher"] == "none"
    assert facts["candidates"] == []
    assert {"python", "torch", "samestep"} <= set(facts["versions"])


def test_what_makes_training_impossible_is_exit_code_1(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone.setattr(command, "advise", lambda facts: [Advice(fatal=True, text="Buy another machine.")])
    assert doctor() == 1
    assert "  must: Buy another machine." in capsys.readouterr().out


def test_ranks_that_cannot_meet_are_told_with_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    monkeypatch.setattr(Environment, "current", classmethod(lambda cls: cls.read(variables)))

    def fail(*_: object, **__: object) -> None:
        raise ClusterError("rank 1 did not come.")

    monkeypatch.setattr(command, "_with_others", fail)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert doctor() == 1
    text = capsys.readouterr().out
    assert "must: The ranks cannot be joined: rank 1 did not come." in text
    assert "variables of torch" in text


def test_a_contradiction_shows_the_candidates_and_is_an_error_of_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Environment, "current", classmethod(lambda cls: cls.read(CONTRADICTION)))
    with pytest.raises(ConfigError, match="Both OMPI_COMM_WORLD_RANK and MPI_LOCALRANKID are set"):
        command.doctor()
    rows = capsys.readouterr().out
    assert "Open MPI" in rows
    assert "contradicts" in rows


def test_advice_for_several_ranks_is_said_once(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(command, "advise", lambda facts: [Advice(fatal=False, text="Raise it.")])
    facts = {"versions": dict.fromkeys(("python", "torch", "samestep"), "1"), "machine": {"host": "h"}}
    ranks = [{**facts, "place": {"rank": rank}} for rank in range(3)]
    links = {"links": [{"rank": 1, "clock_ahead_s": 3.0}, {"rank": 2, "clock_ahead_s": 0.0}]}
    first, clock = command._all_advice(ranks, links)
    assert first.text == "rank 0, 1, 2: Raise it."
    assert "The clock of h (rank 1) is 3.0 s ahead of" in clock.text


def test_it_is_a_command(alone: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["doctor", "--no-links", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["advice"] is not None


def test_without_torch_the_rest_is_told(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone.setitem(sys.modules, "torch", None)
    assert doctor(links=True) == 1
    text = capsys.readouterr().out
    assert "must: torch cannot be imported" in text
    assert "pip install torch" in text
    assert "usable of" in text
