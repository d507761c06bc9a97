"""Two run folders: the first difference is found, and its level named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from samestep.checkpoint.state import save_state
from samestep.errors import ConfigError
from samestep.events import RunEnded, StepReport, TermReport
from samestep.track.folder import LEDGER, STATE, RunFolder
from samestep.verify.compare import compare_runs, describe
from samestep.verify.distance import Level


def report(step: int, **changes: object) -> StepReport:
    base = StepReport(
        step=step,
        update=step + 1,
        epoch=0,
        cursor=8 * (step + 1),
        samples=8,
        sample_hash=f"{step:016x}",
        micro_batches=4,
        weight=8.0,
        loss=2.0 - step / 8,
        grad_norm=1.0,
        learning_rate=0.1,
        applied=True,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def model(**changes: float) -> nn.Module:
    """Return a model with tied weights; a change adds to the first element of a tensor."""
    built = nn.Module()
    for name in ("z", "b", "a"):
        built.register_parameter(name, nn.Parameter(torch.arange(1.0, 5.0).view(2, 2)))
    built.register_parameter("tied", built.z)
    with torch.no_grad():
        for name, change in changes.items():
            getattr(built, name)[0, 1] += change
    return built


Keep = Callable[..., Path]


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    def keep(
        name: str, reports: list[StepReport], state: nn.Module | None = None, fingerprint: str = "ab"
    ) -> Path:
        with RunFolder(tmp_path / name) as folder:
            for one in reports:
                folder(one)
            folder(RunEnded(step=len(reports), update=len(reports), fingerprint=fingerprint))
        if state is not None:
            save_state(state, tmp_path / name / STATE)
        return tmp_path / name

    return keep


STEPS = [report(step) for step in range(4)]


def test_equal_runs_are_the_same_whatever_their_size(keep: Keep) -> None:
    first = keep("a", STEPS, model())
    second = keep("b", [replace(one, world_size=3, generation=1, seconds=2.0) for one in STEPS], model())
    found = compare_runs(first, second)
    assert (found.level, found.step, found.state, found.states) == (Level.SAME, None, None, (STATE,))
    text = "\n".join(describe(found))
    assert "level: same" in text
    assert "4 steps, all equal" in text
    assert "1 compared, all equal" in text


@pytest.mark.parametrize(
    ("change", "level"),
    [
        ({"loss": 1.75 * (1 + 1e-9)}, Level.ROUNDING),
        ({"loss": 1.75 * (1 + 1e-4)}, Level.CHANGED),
        ({"loss": float("nan")}, Level.CHANGED),
        ({"loss": None}, Level.CHANGED),
        ({"grad_norm": 1.0 + 1e-9}, Level.ROUNDING),
        ({"learning_rate": 0.1 * (1 + 1e-12)}, Level.CHANGED),
        ({"sample_hash": "1"}, Level.CHANGED),
        ({"weight": 9.0}, Level.CHANGED),
        ({"applied": False, "skipped": "overflow"}, Level.CHANGED),
        ({"terms": {"t": TermReport(loss=1.0, weight=1.0, contribution=1.0)}}, Level.CHANGED),
    ],
)
def test_the_first_differing_step_is_named(keep: Keep, change: dict[str, object], level: Level) -> None:
    other = [*STEPS[:2], replace(STEPS[2], **change), replace(STEPS[3], loss=1.6250000000000002)]  # type: ignore[arg-type]
    found = compare_runs(keep("a", STEPS), keep("b", other))
    assert found.step is not None
    assert (found.step.step, set(found.step.fields)) == (2, set(change))
    assert found.level is max(level, Level.ROUNDING)
    assert "first differing step: 2" in "\n".join(describe(found))


def test_terms_are_compared_one_by_one(keep: Keep) -> None:
    def steps(loss: float, weight: float = 1.0) -> list[StepReport]:
        return [report(0, terms={"t": TermReport(loss=loss, weight=weight, contribution=1.0)})]

    first = keep("a", steps(1.0))
    assert compare_runs(first, keep("b", steps(1.0 + 1e-9))).level is Level.ROUNDING
    assert compare_runs(first, keep("c", steps(1.5))).level is Level.CHANGED
    assert compare_runs(first, keep("d", steps(1.0, weight=2.0))).level is Level.CHANGED


def test_the_first_differing_tensor_is_named_in_the_order_of_the_model(keep: Keep) -> None:
    first = keep("a", STEPS, model())
    found = compare_runs(first, keep("b", STEPS, model(b=2**-21, a=2**-21), fingerprint="cd"))
    assert found.state is not None
    assert found.state.first is not None
    assert (found.state.first.name, found.state.num_tensors, found.state.first.index) == ("b", 2, (0, 1))
    assert (found.state.first.ulps, found.level) == (2, Level.ROUNDING)
    text = "\n".join(describe(found))
    assert "2 tensors differ, the first: b" in text
    assert "the first at [0, 1]: 2.0 in A, 2.000000476837158 in B, 2 ulp apart" in text
    found = compare_runs(first, keep("c", STEPS, model(z=1.0), fingerprint="cd"))
    assert found.state is not None
    assert (found.state.num_tensors, found.level) == (1, Level.CHANGED)  # a tied tensor counts once


def test_bits_that_differ_unmeasured_are_no_rounding(keep: Keep) -> None:
    first = keep("a", [report(0, digest="1")])
    assert compare_runs(first, keep("b", [report(0, digest="2")])).level is Level.CHANGED
    assert compare_runs(first, keep("c", [report(0, digest="1")], fingerprint="cd")).level is Level.CHANGED
    small = keep("d", [report(0, digest="2")], model(a=2**-21), fingerprint="cd")
    assert compare_runs(keep("e", [report(0, digest="1")], model()), small).level is Level.ROUNDING


def test_states_of_steps_come_before_the_last(keep: Keep) -> None:
    runs = [keep(name, STEPS, model()) for name in "ab"]
    for run, change in zip(runs, (0.0, 1.0), strict=True):
        save_state(model(), run / "states" / "step-000001.safetensors")
        save_state(model(b=change), run / "states" / "step-000002.safetensors")
    found = compare_runs(*runs)
    assert len(found.states) == 3
    assert found.state is not None
    assert found.state.state == "states/step-000002.safetensors"


def test_other_tensors_are_named(keep: Keep) -> None:
    other = model()
    other.a = nn.Parameter(torch.zeros(3))
    other.c = nn.Parameter(torch.zeros(3))
    found = compare_runs(keep("a", STEPS, model()), keep("b", STEPS, other))
    assert found.state is not None
    assert found.state.problems == ("a: (2, 2) torch.float32 in A, (3,) torch.float32 in B", "only in B: c")
    assert found.level is Level.CHANGED


def test_a_shorter_run_is_not_the_same(keep: Keep) -> None:
    found = compare_runs(keep("a", STEPS), keep("b", STEPS[:3]))
    assert (found.level, found.num_steps, found.step) == (Level.CHANGED, (4, 3), None)
    assert "4 steps in A, 3 in B" in "\n".join(describe(found))


def test_a_torn_line_is_said(keep: Keep) -> None:
    first, second = keep("a", STEPS), keep("b", STEPS)
    with (second / LEDGER).open("a") as file:
        file.write('{"st')
    found = compare_runs(first, second)
    assert found.level is Level.SAME
    assert "line 5: ignored" in "\n".join(describe(found))


def test_a_folder_without_a_run_is_refused(keep: Keep, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no ledger"):
        compare_runs(keep("a", STEPS), tmp_path / "none")
