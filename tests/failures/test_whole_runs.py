"""Runs of three real ranks that go wrong: told once, ended within seconds, nothing left behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from started_runs import StartedRun

pytestmark = pytest.mark.timeout(300)

GONE_S = 5.0  # from the first error until every process has ended

HEAD = """
import os, sys, time
from pathlib import Path
import torch, samestep
from samestep.testing.workloads import WORKLOADS
marks = Path(sys.argv[1])
rank = int(os.environ["SAMESTEP_RANK"])
def mark(name):
    (marks / f"{name}-{rank}.part").write_text(repr(time.time()))
    (marks / f"{name}-{rank}.part").rename(marks / f"{name}-{rank}")
load = WORKLOADS["mlp"]()
torch.manual_seed(0)
def loss(model, batch):
    return samestep.weighted(*load.values(model, batch))
def train(dataset=load.dataset, loss=loss, **changes):
    arguments = dict(
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        batching=samestep.Batching(global_batch=12, micro_batch=2), steps=100000, collate_fn=load.collate_fn,
    )
    result = samestep.train(load.make_model(), dataset, loss, **{**arguments, **changes})
    print("fingerprint:", result.fingerprint)
"""


Launch = Callable[..., StartedRun]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[StartedRun] = []

    def start(body: str, head: str = HEAD) -> StartedRun:
        (tmp_path / "script.py").write_text(head + body)
        started.append(StartedRun(tmp_path, 3, marks=tmp_path / "marks"))
        return started[-1]

    yield start
    for run in started:
        run.end()


BROKEN_SAMPLE = """
class Broken:
    def __len__(self):
        return 30
    def __getitem__(self, index):
        if index == 11:
            mark("failed")
            raise ValueError("a broken file")
        return load.dataset[index % len(load.dataset)]
train(Broken(), loader_workers=2, steps=None, epochs=1)
"""


def test_an_exception_of_the_user_s_is_shown_once_with_its_place(launch: Launch) -> None:
    launched = launch(BROKEN_SAMPLE)
    assert launched.wait() == 1
    (failed,) = launched.marks.glob("failed-?")
    assert launched.ended_at - float(failed.read_text()) < GONE_S
    assert launched.err.count("sample 11 of the data set failed") == 1
    assert launched.err.count('raise ValueError("a broken file")') == 1
    assert launched.err.count(f"rank {failed.name[-1]} of 3 on host ") == 1
    assert launched.err.count(" of 3 on host ") == 1


def test_a_mistake_that_the_message_explains_has_no_traceback(launch: Launch) -> None:
    launched = launch("train(loss=lambda model, batch: load.values(model, batch)[0].mean())")
    assert launched.wait() == 1
    assert "Traceback" not in launched.err
    assert launched.err.count("LossError: the loss returned a bare tensor") == 1
    assert launched.err.count("script.py:") == 1  # the user's own line


KILLED = """
import signal
def dying(model, batch):
    if rank == 1:
        mark("failed")
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(model, batch)
train(loss=dying)
"""


def test_a_killed_rank_is_named(launch: Launch) -> None:
    launched = launch(KILLED)
    assert launched.wait() == 1
    assert launched.ended_at - float((launched.marks / "failed-1").read_text()) < GONE_S
    assert "rank 1 of 3 on host " in launched.err
    assert "SIGKILL" in launched.err
    assert "Traceback" not in launched.err


TRAINING = """
def callback(event):
    if isinstance(event, samestep.StepReport) and event.step == 3:
        mark("training")
train(loader_workers=1, callbacks=[callback])
"""


def test_ctrl_c_while_training(launch: Launch) -> None:
    launched = launch(TRAINING)
    launched.await_marks("training-0")
    asked = time.time()
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait() == 1
    assert launched.ended_at - asked < GONE_S
    assert launched.err.startswith("samestep: SIGINT: ending all ranks")
    assert "Traceback" not in launched.err
    assert "fingerprint" not in launched.out


def test_ctrl_c_before_the_ranks_have_met(launch: Launch) -> None:
    waiting = "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'up-0').write_text('0'); time.sleep(60)"
    launched = launch(waiting, head="")
    launched.await_marks("up-0")
    asked = time.time()
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait() == 1
    assert launched.ended_at - asked < GONE_S
    assert "Traceback" not in launched.err


def test_a_script_that_forgets_samestep_is_just_run(launch: Launch) -> None:
    launched = launch("print('done')", head="")
    assert launched.wait() == 0
    assert (launched.out, launched.err) == ("done\n", "")
