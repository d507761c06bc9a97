"""What the report says of a run, whatever became of it, from the folder's files alone."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from told_runs import FINGERPRINT, Told, leg, report, tell

from samestep.cli.report import report as report_command
from samestep.errors import ConfigError
from samestep.events import Event, Notice, RunEnded, RunStarted, StepReport, Stopping
from samestep.track.folder import EVENTS, LEDGER, RECIPE, RUN, RunFolder
from samestep.track.ledger import COMPARED, LedgerDigest, ledger_line
from samestep.track.page_data import page_data
from samestep.track.ranks import RankFile
from samestep.track.record import RunRecord
from samestep.track.report import REPORT, Report, render, write_report

NOW = Told().now + 3600


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was stopped, resumed and ended."""
    return tell(tmp_path_factory.mktemp("runs") / "done", steps=400, stop=240)


def data_of(folder: Path, *, now: float = NOW) -> dict[str, Any]:
    record = RunRecord(folder)
    record.update()
    return page_data(record, every=5.0, now=now)


def data_in(page: Path) -> dict[str, Any]:
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert found
    values = json.loads(found[1])
    assert isinstance(values, dict)
    return values


def chart(data: dict[str, Any], title: str) -> dict[str, Any]:
    (found,) = [one for one in data["charts"] if one["title"].startswith(title)]
    return found


def test_the_headline_says_how_it_went(done: Path) -> None:
    data = data_of(done)
    assert (data["state"], data["running"], data["fingerprint"]) == ("done", False, FINGERPRINT)
    tiles = {tile["label"]: tile for tile in data["tiles"]}
    assert tiles["Steps"]["value"] == "400"
    assert tiles["Steps"]["note"] == "of 400, 1 skipped"
    assert tiles["Ranks"]["value"] == "2"
    assert data["problems"] == []


def test_every_promised_curve_is_there(done: Path) -> None:
    data = data_of(done)
    for title in (
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Evaluation: accuracy",
        "Loss scale",
    ):
        assert [one for one in data["charts"] if one["title"].startswith(title)], title
    assert [one["name"] for one in chart(data, "Loss terms")["series"]] == ["cross_entropy", "z_loss"]
    assert [one["name"] for one in chart(data, "Checkpoints")["series"]] == ["stall", "write"]
    assert len(chart(data, "CPU of the rank")["series"]) == 3
    assert chart(data, "GPU in use")["unit"] == "%"
    assert chart(data, "Gradient norm")["series"][0]["summary"]["first_not_finite"] == 3
    assert data["span"] == [0, 399]


def test_phases_and_stragglers_stand_by_rank(done: Path) -> None:
    ranks = data_of(done)["ranks"]
    assert [row["rank"] for row in ranks["rows"]] == [0, 1, 2]
    assert [row["steps"] for row in ranks["rows"]] == [400, 400, 240]
    assert ranks["order"][:4] == ["data", "forward", "backward", "communication"]
    assert ranks["rows"][0]["phases"]["update"] == pytest.approx(0.006)
    assert [(one["rank"], one["phase"]) for one in ranks["stragglers"]] == [(2, "computing")]


def test_stops_resumes_checkpoints_and_warnings_are_told(tmp_path: Path) -> None:
    data = data_of(tell(tmp_path / "run", steps=1700, stop=1000))
    texts = {event["kind"]: event["text"] for event in data["events"]}
    assert texts["Stopping"] == "stopping after step 1000: SIGTERM"
    assert texts["Resumed"].startswith(
        "resumed at step 1000 from checkpoints/step-00001000, written by 3 ranks"
    )
    assert "stall 0.03 s, written in 0.42 s" in texts["CheckpointSaved"]
    assert "No space left" in texts["CheckpointFailed"]
    assert (
        texts["Quarantined"]
        == "quarantined after step 1613: 3 samples (10233, 481, 77120): loss 41.2 is a spike"
    )
    kinds = {mark["kind"] for mark in data["marks"]}
    assert kinds == {"Resumed", "Stopping", "CheckpointFailed", "Quarantined"}
    warnings = {event["kind"] for event in data["events"] if event["warning"]}
    assert warnings == {"Notice", "CheckpointFailed", "Quarantined", "Resumed"}


@pytest.mark.parametrize(
    ("end", "later", "state"),
    [
        ("done", 10_000.0, "done"),
        ("running", 10.0, "running"),
        ("running", 10_000.0, "silent"),
        ("failed", 10.0, "failed"),
        ("stopped", 10.0, "stopped"),
    ],
)
def test_the_state_is_that_of_the_last_start(tmp_path: Path, end: str, later: float, state: str) -> None:
    told = Told()
    if end == "stopped":
        leg(tmp_path, told, range(20), 40, 2, end="stopped")
    else:
        tell(tmp_path, steps=40, stop=20, end=end, told=told)
    data = data_of(tmp_path, now=told.now + later)
    assert data["state"] == state
    whys = {"failed": "RuntimeError: rank 1 was lost: <signal 9>", "stopped": "SIGTERM"}
    assert data["why"] == whys.get(end, data["why"])


def test_a_run_that_is_asked_to_stop_is_running_until_it_has_stopped(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as keep:
        keep(RunStarted(world_size=1, steps=9, facts={}))
        keep(Stopping(step=3, reason="SIGTERM"))
        data = data_of(tmp_path, now=time.time())
        assert (data["state"], data["why"]) == ("running", "stopping: SIGTERM")


def test_a_stop_that_ends_in_order_is_a_stop(tmp_path: Path) -> None:
    leg(tmp_path, Told(), range(20), 40, 1, end="stopped")
    with RunFolder(tmp_path) as keep:
        keep(RunEnded(step=20, update=20, fingerprint="ab"))
    data = data_of(tmp_path)
    assert (data["state"], data["why"], data["fingerprint"]) == ("stopped", "SIGTERM", "ab")


def test_a_killed_run_is_read_up_to_its_torn_lines(done: Path, tmp_path: Path) -> None:
    for name in (LEDGER, EVENTS, "ranks/0.jsonl", "ranks/1.jsonl"):
        content = (done / name).read_bytes()
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content[: len(content) * 2 // 3])
    (tmp_path / RUN).write_text('{"world_si')
    page = write_report(tmp_path)
    data = data_in(page)
    assert data["problems"] == []
    assert 200 < data["digest"]["lines"] < 300
    assert data["recipe"] is None


def test_damaged_lines_are_told(done: Path, tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_bytes(b'garbage\n{"step": "x"}\n' + (done / LEDGER).read_bytes())
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "0.jsonl").write_bytes(
        b'{"first": 0}\n' + (done / "ranks" / "0.jsonl").read_bytes()
    )
    (tmp_path / EVENTS).write_text('{"event": "Stopping"}\n{"event": "Later", "step": 3, "what": [1]}\n')
    data = data_of(tmp_path)
    assert data["problems"] == [
        f"{LEDGER}: 1 damaged lines were passed over.",
        "ranks/0.jsonl: 1 damaged lines were passed over.",
    ]
    assert [event["text"] for event in data["events"]] == ["{}", '{"step": 3, "what": [1]}']


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(tmp_path)


def test_the_command_prints_where_the_page_is(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_command(done)
    assert capsys.readouterr().out == f"{done / REPORT}\n"
    assert data_in(done / REPORT)["title"] == "done"


def test_reading_in_pieces_gives_what_reading_at_once_gives(done: Path, tmp_path: Path) -> None:
    names = (LEDGER, EVENTS, "ranks/0.jsonl", "ranks/1.jsonl", "ranks/2.jsonl")
    (tmp_path / "ranks").mkdir()
    (tmp_path / RUN).write_bytes((done / RUN).read_bytes())
    (tmp_path / RECIPE).write_bytes((done / RECIPE).read_bytes())
    record = RunRecord(tmp_path)
    for tenth in range(1, 11):
        for name in names:
            content = (done / name).read_bytes()
            (tmp_path / name).write_bytes(content[: len(content) * tenth // 10])
        record.update()
    whole = RunRecord(done)
    whole.update()
    pieces, at_once = (page_data(one, every=5.0, now=NOW) for one in (record, whole))
    different = {"title", "reproduce"}  # the folder's name
    assert {k: v for k, v in pieces.items() if k not in different} == {
        k: v for k, v in at_once.items() if k not in different
    }


def test_nothing_of_a_run_is_markup(tmp_path: Path) -> None:
    attack = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> %SCRIPT% %DATA% \u2028'
    with RunFolder(tmp_path / "a<b>&'") as keep:
        keep(RunStarted(world_size=1, steps=1, facts={attack: {attack: attack}}))
        keep(Notice(level="warning", message=attack))
    (tmp_path / "a<b>&'" / RECIPE).write_text(attack)
    page = write_report(tmp_path / "a<b>&'")
    text = page.read_text()
    assert "<img" not in text
    assert text.count("<script") == text.count("</script>") == 2
    assert "<title>a&lt;b&gt;&amp;&#x27;:" in text
    assert data_in(page)["recipe"] == attack


def test_the_digest_can_be_made_with_the_command_that_is_shown(done: Path) -> None:
    found = data_of(done)["digest"]
    made = subprocess.run(
        ["bash", "-c", found["command"]], cwd=done, capture_output=True, text=True, timeout=30, check=True
    )
    assert made.stdout.split()[0] == found["value"]
    assert found["lines"] == 400


def test_the_digest_sees_what_is_compared_and_nothing_else() -> None:
    def digest(*reports: StepReport) -> str:
        made = LedgerDigest()
        for one in reports:
            made.add(ledger_line(one).encode())
        return made.hexdigest()

    told = Told()
    first, second = (report(step, 2, 3, told.chance) for step in range(2))
    whole = digest(first, second)
    assert digest(*(replace(one, world_size=1, generation=4) for one in (first, second))) == whole
    for name in COMPARED:
        assert digest(first, replace(second, **{name: "other"})) != whole, name
    assert digest(first) != whole


def test_a_ledger_that_was_cut_at_a_resume_is_read_anew(done: Path, tmp_path: Path) -> None:
    lines = (done / LEDGER).read_bytes().splitlines(keepends=True)
    (tmp_path / LEDGER).write_bytes(b"".join(lines[:300]))
    record = RunRecord(tmp_path)
    record.update()
    (tmp_path / LEDGER).write_bytes(b"".join(lines[:250]))
    record.update()
    assert record.span == [0, 249]
    (tmp_path / LEDGER).write_bytes(b"".join(lines))
    record.update()
    assert page_data(record, every=5.0, now=NOW)["digest"] == data_of(done)["digest"]


def test_commands_reproduce_the_run(done: Path, tmp_path: Path) -> None:
    commands = data_of(done)["reproduce"]["commands"]
    assert commands[0] == f"samestep train {done}/recipe.yaml --workers 2 --folder {done}-again"
    assert commands[1] == f"samestep compare {done} {done}-again"
    assert commands[2] == f"samestep verify {done}/recipe.yaml --workers 1,2,3 --steps 20"
    with RunFolder(tmp_path / "python") as keep:
        keep(RunStarted(world_size=4, steps=None, facts={}))
    from_python = data_of(tmp_path / "python")["reproduce"]
    assert from_python["commands"][0] == "samestep run --workers 4 SCRIPT.py"
    assert "any number of ranks" in from_python["notes"][0]
    (tmp_path / "python" / RECIPE).write_text("schedule: {name: wsd, decay: 3}\n")
    assert "--steps" not in data_of(tmp_path / "python")["reproduce"]["commands"][2]


def test_many_curves_of_a_long_run_make_a_small_page(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    told = Told()
    one = json.loads(ledger_line(report(0, 10, 3, told.chance)))
    for step in range(1500):
        one |= {"step": step, "loss": told.chance.random(), "grad_norm": told.chance.random()}
        one["terms"] = {f"t{number}": {"loss": told.chance.random()} for number in range(30)}
        record._add_step(b"", one)
    assert len(render(page_data(record, every=5.0, now=NOW))) < 2_000_000


def test_a_page_is_drawn_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    told = Told(now=0.0)
    pages: list[int] = []
    with Report(tmp_path, every=5.0, clock=told) as keep:
        keep(RunStarted(world_size=1, steps=100, facts={}))
        for step in range(100):
            told.now += 0.25
            (tmp_path / REPORT).unlink(missing_ok=True)
            keep(report(step, 100, 1, told.chance))
            if (tmp_path / REPORT).exists():
                pages.append(step)
        (tmp_path / REPORT).unlink(missing_ok=True)
    assert pages == [19, 39, 59, 79, 99]
    assert (tmp_path / REPORT).is_file()
    assert not list(tmp_path.glob("*.part"))


def test_drawing_takes_a_small_share_of_the_time(tmp_path: Path) -> None:
    told = Told(now=0.0)

    def slow() -> float:
        told.now += 1.0  # each look at the clock takes a second, and so does each page
        return told.now

    keep = Report(tmp_path, every=5.0, clock=slow)
    keep.draw()
    assert keep._next - told.now == pytest.approx(50.0)


def test_a_page_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    (tmp_path / REPORT).mkdir()
    (tmp_path / REPORT / "file").touch()
    with Report(tmp_path, warn=warnings.append) as keep:
        keep.draw()
        keep.draw()
    assert len(warnings) == 1
    assert "report.html cannot be written" in warnings[0]


@contextmanager
def kept(folder: Path) -> Iterator[Callable[[Event], None]]:
    """Keep a run as its first rank does: the report is told last, and closed last."""
    with Report(folder) as page, RunFolder(folder) as files, RankFile(folder, 0) as rank:

        def tell_all(event: Event) -> None:
            files(event)
            rank(event)
            page(event)

        yield tell_all


def test_the_last_page_has_all_that_was_kept(tmp_path: Path) -> None:
    with kept(tmp_path) as keep:
        keep(RunStarted(world_size=2, steps=1, facts={}))
        keep(report(0, 1, 2, Told().chance))
        keep(RunEnded(step=1, update=1, fingerprint="ab"))
    assert {path.name for path in tmp_path.iterdir()} == {LEDGER, EVENTS, RUN, "ranks", REPORT}
    data = data_in(tmp_path / REPORT)
    assert (data["state"], data["digest"]["lines"], len(data["ranks"]["rows"])) == ("done", 1, 1)


@pytest.mark.parametrize(
    ("error", "state", "why"),
    [
        (OSError("the data is gone"), "failed", "OSError: the data is gone"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt"),
        (SystemExit(3), "stopped", "exit code 3"),
    ],
)
def test_a_run_that_does_not_reach_its_end_leaves_a_page_that_says_so(
    tmp_path: Path, error: BaseException, state: str, why: str
) -> None:
    with pytest.raises(type(error)), kept(tmp_path) as keep:
        keep(RunStarted(world_size=1, steps=1, facts={}))
        assert data_in(tmp_path / REPORT)["state"] == "running"
        raise error
    data = data_in(tmp_path / REPORT)
    assert (data["state"], data["why"]) == (state, why)
