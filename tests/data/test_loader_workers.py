"""Loader workers as processes: they end, they are lost, they send what can be sent."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import struct
import sys
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset

from samestep.data.global_batch import MicroBatch
from samestep.data.loader import Loader
from samestep.errors import DataError

pytestmark = pytest.mark.timeout(60)


class Telling(Dataset[torch.Tensor]):
    """Each sample is the process that made it; sample 1 may do something to that process."""

    def __init__(self, act: object = None) -> None:
        self._act = act

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1 and self._act is not None:
            self._act()
        return torch.tensor(os.getpid())


def single(number: int) -> MicroBatch:
    return MicroBatch(step=number, index=0, ids=np.array([number % 100]), epochs=np.array([0]))


def numbered(taken: list[int]) -> Iterator[MicroBatch]:
    for number in itertools.count():
        taken.append(number)
        yield single(number)


@pytest.fixture(autouse=True)
def _no_process_is_left():
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) == before


def test_workers_end_with_the_last_batch():
    batches = Loader(Telling(), seed=0, workers=2).load([single(number) for number in range(4)])
    makers = {next(batches).item() for _ in range(4)}
    assert len(makers) == 2
    assert os.getpid() not in makers
    assert next(batches, None) is None
    assert not multiprocessing.active_children()


def test_workers_end_when_the_iterator_is_closed():
    taken: list[int] = []
    batches = Loader(Telling(), seed=0, workers=2).load(numbered(taken))
    makers = {next(batches).item() for _ in range(4)}
    batches.close()
    assert not any(psutil.pid_exists(maker) for maker in makers)


def test_workers_end_while_the_error_that_ended_them_is_still_held():
    batches = Loader(Telling(), seed=0, workers=2).load(numbered([]))
    maker = next(batches).item()
    with pytest.raises(ZeroDivisionError) as caught:
        batches.throw(ZeroDivisionError)
    assert caught.value.__traceback__ is not None  # which holds the frames, and in them the iterator
    assert not psutil.pid_exists(maker)


def test_loading_in_workers_draws_nothing_here():
    before = torch.default_generator.get_state()
    assert len(list(Loader(Telling(), seed=0, workers=1).load([single(0)]))) == 1
    assert torch.equal(torch.default_generator.get_state(), before)


def test_nothing_starts_before_the_first_batch_is_asked_for():
    taken: list[int] = []
    batches = Loader(Telling(), seed=0, workers=2).load(numbered(taken))
    assert taken == []
    batches.close()


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (1, 3), (2, 2)])
def test_requests_are_taken_no_further_than_the_prefetch_needs(workers, prefetch):
    taken: list[int] = []
    batches = Loader(Telling(), seed=0, workers=workers, prefetch=prefetch).load(numbered(taken))
    for received in range(1, 6):
        next(batches)
        assert len(taken) == workers * prefetch + received
    batches.close()


def test_more_workers_than_cores_are_started_without_a_warning():
    count = (os.cpu_count() or 1) + 1
    filters = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        makers = {
            batch.item() for batch in Loader(Telling(), seed=0, workers=count).load(map(single, range(count)))
        }
    assert len(makers) == count
    assert caught == []
    assert list(warnings.filters) == filters


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_while_it_is_waited_for_is_named():
    batches = Loader(Telling(kill_myself), seed=0, workers=2, prefetch=1).load(numbered([]))
    with pytest.raises(
        DataError, match=r"loader worker 1 \(process \d+\) was killed by SIGKILL\. Want of memory"
    ) as caught:
        list(batches)
    assert "loader_workers=0" in str(caught.value)


def die_while_writing() -> None:
    """Leave the beginning of a result in the queue, as a worker that is killed while it sends does."""
    results = multiprocessing.current_process()._args[3]
    os.write(results._writer.fileno(), struct.pack("!i", 1 << 20) + b"begun")
    kill_myself()


def test_a_worker_that_is_killed_while_it_sends_is_not_waited_for():
    batches = Loader(Telling(die_while_writing), seed=0, workers=1).load([single(1)])
    with pytest.raises(DataError, match=r"loader worker 0 \(process \d+\) was killed by SIGKILL"):
        next(batches)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # from PyTorch's half-made iterator
def test_workers_that_started_end_where_another_cannot_be_started(monkeypatch):
    start, started = multiprocessing.process.BaseProcess.start, []

    def start_one(process: multiprocessing.process.BaseProcess) -> None:
        if started:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(process)
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start_one)
    with pytest.raises(
        DataError, match="2 loader workers could not be started: BlockingIOError: Resource"
    ) as caught:
        next(Loader(Telling(), seed=0, workers=2).load([single(0)]))
    assert isinstance(caught.value.__cause__, BlockingIOError)
    assert len(started) == 1
    started[0].join(20)
    assert not started[0].is_alive()


def test_a_worker_that_exits_is_named():
    batches = Loader(Telling(lambda: os._exit(3)), seed=0, workers=1).load(numbered([]))
    with pytest.raises(DataError, match=r"loader worker 0 \(process \d+\) ended with exit code 3"):
        list(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_leaves_the_program_is_named(workers):
    batches = Loader(Telling(lambda: sys.exit(3)), seed=0, workers=workers).load(numbered([]))
    with pytest.raises(DataError, match=r"sample 1 of the data set failed .*: SystemExit: 3"):
        list(batches)


def test_a_worker_that_is_killed_meanwhile_is_named_where_the_next_batch_is_asked_for():
    died = threading.Event()
    previous = signal.getsignal(signal.SIGCHLD)
    batches = Loader(Telling(), seed=0, workers=2).load(numbered([]))
    maker = next(batches).item()
    installed = signal.getsignal(signal.SIGCHLD)

    def seen(signum: int, frame: object) -> None:
        installed(signum, frame)  # PyTorch's: it must not raise here, in the middle of a step
        died.set()

    signal.signal(signal.SIGCHLD, seen)
    try:
        os.kill(maker, signal.SIGKILL)
        assert died.wait(20)
        with pytest.raises(DataError, match=rf"loader worker 0 \(process {maker}\) was killed by SIGKILL"):
            list(batches)
    finally:
        signal.signal(signal.SIGCHLD, installed if callable(installed) else previous)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: lambda: None, "lambda"),
        (threading.Lock, "pickle"),
        (lambda: torch.ones(2, requires_grad=True) * 2, "detach"),
        (lambda: np.array([threading.Lock()], dtype=object), "pickle"),
    ],
    ids=["function", "lock", "graph", "object array"],
)
def test_what_cannot_be_sent_is_an_error_and_not_an_endless_wait(made, reason):
    batches = Loader(Telling(), seed=0, workers=1, collate_fn=lambda _: {"part": [made()]}).load([single(5)])
    with pytest.raises(DataError, match=rf"batch of micro-batch 0 of step 5 cannot be sent .*{reason}"):
        list(batches)


def test_what_a_batch_may_hold_arrives():
    batch = {
        "tensor": torch.arange(3),
        "leaf": torch.ones(2, requires_grad=True),
        "array": np.arange(4.0),
        "objects": np.array(["a", None], dtype=object),
        "pair": (1, "two"),
        "sample": single(3),
    }
    (arrived,) = Loader(Telling(), seed=0, workers=1, collate_fn=lambda _: batch).load([single(0)])
    assert arrived.keys() == batch.keys()
    assert torch.equal(arrived["tensor"], batch["tensor"])
    assert arrived["leaf"].requires_grad
    assert np.array_equal(arrived["array"], batch["array"])
    assert arrived["objects"].tolist() == ["a", None]
    assert arrived["pair"] == (1, "two")
    assert arrived["sample"].ids.tolist() == [3]


def test_two_loaders_run_beside_each_other():
    one, other = (Loader(Telling(), seed=0, workers=1).load(map(single, range(3))) for _ in range(2))
    pairs = list(zip(one, other, strict=True))
    assert len(pairs) == 3
    assert all(first.item() != second.item() for first, second in pairs)


def test_a_rank_that_is_a_thread_has_workers_too():
    makers: list[int] = []

    def rank() -> None:
        makers.extend(
            batch.item() for batch in Loader(Telling(), seed=0, workers=1).load(map(single, range(3)))
        )

    thread = threading.Thread(target=rank)
    thread.start()
    thread.join(30)
    assert len(makers) == 3
