"""The ledger keeps every bit, survives a torn line, and says what is damaged."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import ConfigError
from samestep.events import Notice, StepReport, TermReport
from samestep.track.ledger import (
    COMPARED,
    FIELDS,
    LedgerWriter,
    compared_values,
    ledger_line,
    parse_line,
    read_ledger,
)

REPORT = StepReport(
    step=3,
    update=4,
    epoch=0,
    cursor=128,
    samples=32,
    sample_hash="0123456789abcdef",
    micro_batches=8,
    weight=4096.0,
    loss=0.1,
    grad_norm=1.5,
    learning_rate=3e-4,
    applied=True,
    seconds=0.25,
)
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True)


def write(path: Path, *reports: StepReport) -> None:
    with LedgerWriter(path) as ledger:
        for report in reports:
            ledger(report)


def bits(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


def test_a_line_has_every_field_but_the_seconds_in_a_fixed_order(tmp_path: Path) -> None:
    write(tmp_path / "ledger.jsonl", REPORT)
    (line,) = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert tuple(json.loads(line)) == FIELDS
    assert "seconds" not in FIELDS
    assert set(FIELDS) - set(COMPARED) == {"world_size", "generation"}


@given(loss=ANY_FLOAT | st.none(), norm=ANY_FLOAT | st.none(), term=ANY_FLOAT)
def test_floats_are_read_back_bit_by_bit(loss: float | None, norm: float | None, term: float) -> None:
    terms = {"a": TermReport(loss=term, weight=1.0, contribution=-0.5)}
    report = replace(REPORT, loss=loss, grad_norm=norm, terms=terms)
    line = ledger_line(report)
    assert "NaN" not in line
    assert "Infinity" not in line
    found = parse_line(line.encode(), "here")
    for ours, theirs in [(loss, found.loss), (norm, found.grad_norm), (term, found.terms["a"].loss)]:
        assert theirs is None if ours is None else theirs is not None and bits(ours) == bits(theirs)


def test_infinities_and_nan_stand_as_words(tmp_path: Path) -> None:
    write(tmp_path / "l", replace(REPORT, loss=math.nan, grad_norm=-math.inf, loss_scale=math.inf))
    values = json.loads((tmp_path / "l").read_text())
    assert (values["loss"], values["grad_norm"], values["loss_scale"]) == ("nan", "-inf", "inf")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    reports = [replace(REPORT, step=step, digest="00" if step else None, applied=False) for step in range(3)]
    write(tmp_path / "deep" / "l", *reports)
    found = read_ledger(tmp_path / "deep" / "l")
    assert found.steps == [replace(report, seconds=0.0) for report in reports]
    assert found.torn is None


def test_other_events_are_passed_over(tmp_path: Path) -> None:
    with LedgerWriter(tmp_path / "l") as ledger:
        ledger(Notice(level="info", message="hello"))
    assert read_ledger(tmp_path / "l").steps == []


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_torn_last_line_is_ignored_said_and_cut_off(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "l"
    write(path, REPORT)
    path.write_bytes(path.read_bytes() + f"{ledger_line(REPORT)}\n".encode()[:-1][:kept])
    found = read_ledger(path)
    assert len(found.steps) == 1
    assert found.torn is not None
    assert "line 2" in found.torn
    write(path, replace(REPORT, step=4))
    assert [report.step for report in read_ledger(path).steps] == [3, 4]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "line 2: this line is damaged"),
        ("3", "line 2: expected an object"),
        ('{"step": 1}', "line 2: missing fields: applied, "),
        (ledger_line(REPORT).replace('"step"', '"stop"'), "unknown fields: stop"),
        (ledger_line(REPORT).replace('"terms": {}', '"terms": [1]'), "line 2: this line is damaged"),
        (ledger_line(REPORT).replace('"loss": 0.1', '"loss": "low"'), "line 2: this line is damaged"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "l"
    path.write_text(f"{ledger_line(REPORT)}\n{line}\n{ledger_line(REPORT)}\n")
    with pytest.raises(ConfigError, match=expected):
        read_ledger(path)


def test_a_missing_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no ledger"):
        read_ledger(tmp_path / "none")


def test_what_is_compared_are_the_bits() -> None:
    same = replace(REPORT, world_size=3, generation=2, seconds=9.0)
    assert compared_values(same) == compared_values(REPORT)
    for change in ({"loss": math.nextafter(0.1, 1.0)}, {"grad_norm": -0.0}, {"digest": "1"}, {"cursor": 5}):
        assert compared_values(replace(REPORT, **change)) != compared_values(REPORT)
    assert compared_values(replace(REPORT, loss=0.0)) != compared_values(replace(REPORT, loss=-0.0))
