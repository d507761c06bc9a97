"""The reference: its tables are what the code says."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
from generated import REFERENCE, made, written

import samestep
from samestep import errors
from samestep.track import folder, ranks, report
from samestep.verify.distance import Level

PAGE = REFERENCE.read_text()


def section(title: str) -> str:
    """Return the text under a heading, up to the next one."""
    return re.split(r"^#+ ", PAGE.partition(f"# {title}\n")[2], flags=re.MULTILINE)[0]


def rows(title: str) -> dict[str, list[str]]:
    """Return the first cell of each row of a section's tables, with the others."""
    lines = [line for line in section(title).splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {cell[0]: cell[1:] for cell in cells}


def names(title: str) -> list[str]:
    return [name for cell in rows(title) for name in re.findall(r"`(\w+)`", cell)]


def test_generated_parts_are_up_to_date() -> None:
    assert written(PAGE, made()) == PAGE, "run: python tests/docs/generated.py"


def test_every_public_name_is_listed() -> None:
    listed = PAGE.partition("## `train`")[0]
    assert set(re.findall(r"`(\w+)`", listed)) >= set(samestep.__all__)


@pytest.mark.parametrize(
    ("title", "function"), [("`train`", samestep.train), ("`Evaluation`", samestep.Evaluation)]
)
def test_arguments_and_their_defaults(title: str, function: object) -> None:
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    told = {name.strip("`"): cells[0].strip("`") for name, cells in rows(title).items()}
    empty = inspect.Parameter.empty
    assert told == {
        name: "needed" if parameter.default is empty else repr(parameter.default)
        for name, parameter in parameters.items()
    }


def test_a_session_takes_what_train_takes() -> None:
    parameters = inspect.signature(samestep.Session).parameters
    of_train = inspect.signature(samestep.train).parameters
    told = [
        name for cell in rows("`Session`") if "session." not in cell for name in re.findall(r"`(\w+)`", cell)
    ]
    assert sorted(told) == sorted(parameters)
    for name, parameter in parameters.items():
        assert parameter.default == of_train[name].default, name
    for member in re.findall(r"session\.(\w+)", section("`Session`")):
        assert member == "device" or hasattr(samestep.Session, member), member
    for method in ("setup", "batches"):
        (shown,) = re.findall(rf"session\.{method}\((.*?)\)`", section("`Session`"))
        wanted = list(inspect.signature(getattr(samestep.Session, method)).parameters)[1:]
        assert re.findall(r"(\w+)(?:=\w+)?(?:, |$)", shown) == wanted


@pytest.mark.parametrize("kind", [samestep.Result, samestep.StepReport])
def test_fields(kind: type) -> None:
    assert names(f"`{kind.__name__}`") == [field.name for field in dataclasses.fields(kind)]


def test_fields_of_the_other_events() -> None:
    text = section("Events") + section("`StepReport`")
    for kind in (
        samestep.RunStarted,
        samestep.Notice,
        samestep.Evaluated,
        samestep.RunEnded,
        samestep.TermReport,
    ):
        sentence = re.split(r";|\.\s", text.rpartition(f"`{kind.__name__}`")[2])[0]
        assert set(re.findall(r"`(\w+)`", sentence)) >= {field.name for field in dataclasses.fields(kind)}, (
            kind
        )


def test_every_schedule() -> None:
    shown = re.findall(r"^\| `schedules\.(\w+)\((.*?)\)`", PAGE, re.MULTILINE)
    assert sorted(name for name, _ in shown) == sorted(samestep.schedules.__all__)
    for name, arguments in shown:
        parameters = inspect.signature(getattr(samestep.schedules, name)).parameters.values()
        wanted = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
        assert arguments.split(", ") == wanted


def test_every_error_is_in_the_table() -> None:
    known = [name for name, kind in vars(errors).items() if isinstance(kind, type)]
    assert names("Errors") == known


def test_files_of_a_run_folder() -> None:
    files = {folder.LEDGER, folder.EVENTS, folder.RECIPE, folder.RUN, folder.STATE, report.REPORT}
    files |= {f"{folder.CHECKPOINTS}/", f"{ranks.RANKS}/"}
    assert {cell.strip("`") for cell in rows("Run folder")} == files


def test_levels() -> None:
    assert names("Levels of equality") == [level.word for level in Level]


def test_variables_of_launchers() -> None:
    assert {"SAMESTEP_LAUNCHER", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"} <= set(
        names("Variables")
    )
