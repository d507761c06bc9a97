"""Asked to stop by a signal: the state is stored after the same step on all ranks, and nothing is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from started_runs import StartedRun
from stops_on_processes import asked, custom_loop, killed, train

from samestep.checkpoint.reader import StoredCheckpoint
from samestep.checkpoint.shelf import Shelf
from samestep.processes.child import STOPPED
from samestep.processes.stop_signals import STOP_SIGNALS, StopSignals
from samestep.testing.processes import run_processes

pytestmark = pytest.mark.timeout(300)

HERE = Path(__file__).parent
GONE_S = 5.0


def require_one_whole(folder: Path, step: int) -> None:
    """The newest checkpoint is that of `step`, whole, and no unfinished one lies there."""
    assert [place.name for place in folder.iterdir() if place.name.startswith(".")] == []
    with StoredCheckpoint(Shelf(folder).whole()[0]) as stored:
        stored.require_whole(sorted(stored.manifest.files))
        assert stored.manifest.step == step


def test_a_signal_to_any_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    expected = train(None, tmp_path / "one" / "run").fingerprint
    folder = tmp_path / "many" / "run"
    parts = [(3, 1, 2, signal.SIGTERM), (2, 0, 7, signal.SIGUSR1), (3, 2, 14, signal.SIGINT)]
    for world_size, rank, step, number in parts:
        ended = run_processes(asked, world_size, str(folder), rank, step, int(number), timeout_s=100)
        assert [code for code, _ in ended] == [STOPPED] * world_size
        assert ended[0][1] == [step + 2]  # the step after the signal's is the last
        require_one_whole(folder / "checkpoints", step + 2)
    assert run_processes(killed, 2, str(folder), "zero1", {}, timeout_s=100) == [expected] * 2


def test_a_second_ctrl_c_ends_at_once_and_other_signals_only_ask_once() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals() as signals:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            signal.raise_signal(number)
        assert signals.requested == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


HEAD = f"""
import os, select, signal, sys, time
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from stops_on_processes import custom_loop
place = Path(sys.argv[1])
rank = os.environ["SAMESTEP_RANK"]
reading, told = os.pipe2(os.O_NONBLOCK)
signal.set_wakeup_fd(told)
def mark(name):
    (place / f"{{name}}-{{rank}}").touch()
def wait_for_a_signal(step):
    if step == 4:
        mark("there")
        select.select([reading], [], [], 60)  # goes on after the handler
"""
LOOP = """
print("fingerprint", custom_loop(place / "checkpoints", 12, wait_for_a_signal))
"""
SLOW = """
from samestep.checkpoint import writer
def hang(*arguments):
    mark("writing")
    time.sleep(600)
writer.write_tensors = hang
custom_loop(place / "checkpoints", 12, wait_for_a_signal)
"""


Launch = Callable[[str, int], StartedRun]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[StartedRun] = []

    def start(body: str, workers: int) -> StartedRun:
        (tmp_path / "script.py").write_text(HEAD + body)
        started.append(StartedRun(tmp_path, workers, marks=tmp_path))
        return started[-1]

    yield start
    for run in started:
        run.end()


def marks(name: str, workers: int) -> list[str]:
    """Return the marks that all ranks leave under a name."""
    return [f"{name}-{rank}" for rank in range(workers)]


def test_a_loop_of_one_s_own_is_stopped_and_the_same_command_goes_on(launch: Launch, tmp_path: Path) -> None:
    first = launch(LOOP, 3)
    first.await_marks(*marks("there", 3))
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == STOPPED, first.err
    assert first.err.startswith("samestep: SIGINT: ending all ranks")
    assert "Traceback" not in first.err
    assert first.out == ""
    require_one_whole(tmp_path / "checkpoints", 6)
    second = launch(LOOP, 3)
    assert second.wait() == 0, second.err
    assert second.out == f"fingerprint {custom_loop(None, 12)}\n"
    require_one_whole(tmp_path / "checkpoints", 12)


def test_a_second_ctrl_c_does_not_wait_for_a_slow_disk(launch: Launch) -> None:
    launched = launch(SLOW, 2)
    launched.await_marks(*marks("there", 2))
    launched.process.send_signal(signal.SIGINT)
    launched.await_marks(*marks("writing", 2))
    again = time.monotonic()
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait() == 1
    assert time.monotonic() - again < GONE_S
    assert "Traceback" not in launched.err
