"""The console shows each thing once, and the last step always."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

from samestep.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Event,
    Notice,
    Phases,
    Quarantined,
    Resumed,
    RunEnded,
    RunStarted,
    StepReport,
    Stopping,
)
from samestep.track.console import Console, clock_time


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int, loss: float | None = 2.5, skipped: str | None = None) -> StepReport:
    return StepReport(
        step=number,
        update=number + 1,
        epoch=0,
        cursor=32 * (number + 1),
        samples=32,
        sample_hash="0",
        micro_batches=8,
        weight=32.0,
        loss=loss,
        grad_norm=1.0,
        learning_rate=3e-4,
        applied=skipped is None,
        skipped=skipped,
    )


def run(steps: int, seconds: float, *, terminal: bool = False, ended: bool = True) -> str:
    """Return what the console prints for a run whose steps take so long each."""
    out, clock = io.StringIO(), Clock()
    with Console(out, terminal=terminal, clock=clock) as console:
        console(RunStarted(world_size=3, steps=steps, facts={}))
        for number in range(steps):
            clock.now += seconds
            console(step(number, loss=5.0 - number))
        if ended:
            console(RunEnded(step=steps, update=steps, fingerprint="ab"))
    return out.getvalue()


def test_plain_lines_come_about_once_a_second() -> None:
    lines = run(40, 0.1).splitlines()
    assert lines[0] == "training on 3 ranks, 40 steps"
    assert lines[-1] == "done: 40 steps, 40 updates, loss -34.0000"
    numbers = [int(line.split("/")[0].split()[1]) for line in lines if line.startswith("step")]
    assert numbers[-1] == 40
    assert len(numbers) == len(set(numbers)) <= 6


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_last_step_is_printed_once(steps: int, ended: bool) -> None:
    assert run(steps, 0.01, ended=ended).count(f"step {steps}/{steps}") == 1


def test_a_line_says_speed_and_time_left() -> None:
    lines = run(10, 2.0).splitlines()
    assert lines[1] == "step  1/10  loss 5.0000  rate 3.00e-04"
    assert lines[2] == "step  2/10  loss 4.0000  rate 3.00e-04  16 samples/s  0:16 left"


def test_a_terminal_gets_one_line_that_is_redrawn() -> None:
    text = run(10, 1.0, terminal=True)
    assert "\x1b[" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert plain.count("training on 3 ranks, 10 steps") == 1
    assert plain.rstrip().endswith("done: 10 steps, 10 updates, loss -4.0000")
    assert "step 10/10" in plain


def test_warnings_are_marked_and_infos_are_not() -> None:
    out = io.StringIO()
    console = Console(out, terminal=False)
    console(Notice(level="warning", message="a [b] c"))
    console(Notice(level="info", message="fine"))
    assert out.getvalue() == "warning: a [b] c\nfine\n"


def test_a_step_without_loss_or_update_is_shown() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(out, terminal=False, clock=clock)
    console(RunStarted(world_size=1, steps=None, facts={}))
    console(step(0, loss=None, skipped="overflow"))
    assert out.getvalue() == "training on 1 rank\nstep 1  loss none  rate 3.00e-04  skipped: overflow\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (7325, "2:02:05")]
)
def test_times_are_readable(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text


EVALUATION = "evaluation after step 50: accuracy 0.5000, tiny 1.00e-05"
SAVED = CheckpointSaved(
    step=50,
    folder="c/step-00000050",
    num_bytes=12_345_678,
    stall_seconds=0.021,
    write_seconds=0.3,
    reason="every 50 steps",
)
RESUMED = Resumed(step=50, update=49, folder="c/step-00000050", world_size_before=1)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (Evaluated(step=49, metrics={"accuracy": 0.5, "tiny": 1e-5}), EVALUATION),
        (SAVED, "checkpoint at step 50 (every 50 steps): 12.3 MB, stall 0.02 s, written in 0.30 s"),
        (
            CheckpointFailed(step=50, folder="c", problem="no space."),
            "warning: no checkpoint at step 50: no space.",
        ),
        (RESUMED, "resumed at step 50 from c/step-00000050, written by 1 rank"),
        (Stopping(step=50, reason="SIGTERM"), "stopping after step 50: SIGTERM"),
        (
            Quarantined(step=50, ids=(7,), reason="a spike"),
            "quarantined after step 50: 1 sample (7): a spike",
        ),
    ],
)
@pytest.mark.parametrize("terminal", [True, False])
def test_each_event_is_one_line(event: Event, line: str, terminal: bool) -> None:
    out = io.StringIO()
    with Console(out, terminal=terminal, clock=Clock()) as console:
        console(RunStarted(world_size=1, steps=60, facts={}))
        console(event)
        console(Phases(step=49, rank=0, seconds={"data": 1.0}))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert plain.count(line) == 1
    if not terminal:
        assert plain.splitlines() == ["training on 1 rank, 60 steps", line]


def test_a_broken_key_is_named() -> None:
    out = io.StringIO()
    Console(out, terminal=False)(replace(RESUMED, broken_key={"torch": "2.13 became 2.14"}))
    assert out.getvalue().endswith("; the bits may differ from here on: torch (2.13 became 2.14)\n")


def test_many_quarantined_samples_are_counted_and_some_are_named() -> None:
    out = io.StringIO()
    Console(out, terminal=False)(Quarantined(step=1, ids=tuple(range(5000)), reason="NaN"))
    assert out.getvalue() == ("quarantined after step 1: 5,000 samples (0, 1, 2, 3, 4, 5, 6, 7, ...): NaN\n")


def test_a_stopped_run_ends_in_order_and_says_so() -> None:
    out, clock = io.StringIO(), Clock()
    with Console(out, terminal=False, clock=clock) as console:
        console(RunStarted(world_size=1, steps=60, facts={}))
        console(step(0))
        console(step(1))
        console(Stopping(step=2, reason="SIGTERM"))
        console(RunEnded(step=2, update=2, fingerprint="ab"))
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["training", "step", "step", "stopping", "stopped:"]
    assert lines[-1] == "stopped: 2 steps, 2 updates, loss 2.5000"
