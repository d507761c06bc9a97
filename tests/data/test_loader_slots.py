"""The way of a batch from worker to rank: its slots, and what it does without."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.util
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from samestep.data import loader as loader_module
from samestep.data import parcel as parcel_module
from samestep.data import slots as slots_module
from samestep.data.global_batch import MicroBatch
from samestep.data.loader import Loader
from samestep.data.send import Errand
from samestep.data.slots import Slots, make_slots
from samestep.errors import DataError

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="slots are made of Linux's files in memory"),
]

LARGE = 5_000  # numbers of 8 bytes: more than goes through the queue


class Numbers(Dataset[torch.Tensor]):
    """Sample i is so many times the number i."""

    def __init__(self, size: int = LARGE) -> None:
        self._size = size

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self._size + index,), index)


def single(number: int) -> MicroBatch:
    return MicroBatch(step=number, index=0, ids=np.array([number]), epochs=np.array([0]))


def values(batch: object) -> tuple[int, ...]:
    """Return the number that fills a batch, and how often; more where it is not filled by one."""
    return (*batch.unique().tolist(), batch.numel())


@pytest.fixture(autouse=True)
def _nothing_is_left():
    processes, files = set(multiprocessing.active_children()), open_files()
    yield
    assert set(multiprocessing.active_children()) == processes
    assert open_files() == files


def open_files() -> int:
    gc.collect()  # an error that was caught holds frames, and they hold queues of workers that ended
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the rank open no batch before the workers have written all that they were asked for.

    To be given the number of batches in all, and how many are asked for ahead.
    """
    written = multiprocessing.get_context("fork").Semaphore(0)
    counts: list[int] = []
    taken = [0, 0]  # batches opened, writes seen
    write, opened = Slots.write, loader_module._opened

    def telling(slots: Slots, slot: int, parts: list[memoryview]) -> object:
        place = write(slots, slot, parts)
        written.release()
        return place

    def late(parcel: object) -> object:
        in_all, ahead = counts
        taken[0] += 1
        while taken[1] < min(in_all, taken[0] + ahead):
            assert written.acquire(timeout=30)
            taken[1] += 1
        return opened(parcel)

    monkeypatch.setattr(Slots, "write", telling)
    monkeypatch.setattr(loader_module, "_opened", late)
    return counts


GRIDS = [(1, 1), (1, 4), (2, 1), (3, 2), (5, 3)]


@pytest.mark.parametrize(("workers", "prefetch"), GRIDS)
def test_no_slot_is_written_before_it_is_read(patient, workers, prefetch):
    patient[:] = [40, workers * prefetch]
    loader = Loader(Numbers(), seed=0, workers=workers, prefetch=prefetch)
    loaded = [values(batch) for batch in loader.load(map(single, range(40)))]
    assert loaded == [(number, LARGE + number) for number in range(40)]


@pytest.mark.parametrize(("workers", "prefetch"), GRIDS)
def test_one_slot_fewer_would_not_do(patient, monkeypatch, workers, prefetch):
    patient[:] = [20, workers * prefetch]
    dealt = iter(range(100))
    monkeypatch.setattr(
        loader_module, "Errand", lambda _, request: Errand(next(dealt) % (workers * prefetch), request)
    )
    loader = Loader(Numbers(), seed=0, workers=workers, prefetch=prefetch)
    try:
        loaded = [values(batch) for batch in loader.load(map(single, range(20)))]
    except DataError:
        return  # what was pickled for another batch
    assert loaded != [(number, LARGE + number) for number in range(20)]


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (4, 1), (4, 5)])
def test_large_and_small_batches_in_turn_arrive_whole(workers, prefetch):
    def collate(samples: list[torch.Tensor]) -> dict[str, object]:
        number = samples[0][0].item()
        size = (0, 3, 70_000, 9_000, 1_000_000)[number % 5]
        return {"x": torch.full((size,), number), "y": [np.full(size // 3, number, dtype=np.int32)]}

    loader = Loader(Numbers(1), seed=0, workers=workers, prefetch=prefetch, collate_fn=collate)
    for number, batch in enumerate(loader.load(map(single, range(60)))):
        assert values(batch["x"]) in ((number, batch["x"].numel()), (0,))
        assert batch["x"].numel() == (0, 3, 70_000, 9_000, 1_000_000)[number % 5]
        assert (batch["y"][0] == number).all()


def test_batches_that_are_kept_hold_no_files():
    batches = Loader(Numbers(), seed=0, workers=2).load(map(single, range(200)))
    kept = [next(batches)]
    before = open_files()
    kept.extend(next(batches) for _ in range(190))
    assert open_files() == before
    batches.close()
    assert [values(batch) for batch in kept] == [(number, LARGE + number) for number in range(191)]


def test_no_socket_is_made(monkeypatch):
    def none() -> None:
        raise AssertionError("a socket was to be made")

    monkeypatch.setattr(multiprocessing.util, "get_temp_dir", none)  # where its listener would be
    loaded = [values(batch) for batch in Loader(Numbers(), seed=0, workers=2).load(map(single, range(5)))]
    assert loaded == [(number, LARGE + number) for number in range(5)]


class Watching(Dataset[tuple[torch.Tensor, int]]):
    """A sample knows how much of the memory of its worker comes from /dev/shm."""

    def __init__(self) -> None:
        self._made: list[object] = []

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((LARGE,), index), Path("/proc/self/maps").read_text().count("/torch_")

    def collate(self, samples: list[tuple[torch.Tensor, int]]) -> object:
        self._made.append(torch.utils.data.default_collate(samples))  # kept, so that it shows
        return self._made[-1]


def test_workers_collate_into_memory_of_their_own():
    dataset = Watching()
    loader = Loader(dataset, seed=0, workers=1, collate_fn=dataset.collate)
    assert [seen.item() for _, seen in loader.load(map(single, range(4)))] == [0, 0, 0, 0]


@pytest.mark.parametrize("workers", [0, 1])
def test_dtypes_join_alike_in_workers_and_outside(workers):
    mixed = [torch.tensor([1]), torch.tensor([2.5])]
    wanted = MicroBatch(step=0, index=0, ids=np.array([0, 1]), epochs=np.zeros(2, dtype=np.int64))
    (batch,) = Loader(mixed, seed=0, workers=workers).load([wanted])
    assert (batch.dtype, batch.tolist()) == (torch.float32, [[1.0], [2.5]])


@pytest.mark.parametrize("workers", [0, 1])
def test_sparse_samples_are_refused_alike_in_workers_and_outside(workers):
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (2,), check_invariants=True)
    with pytest.raises(DataError, match="Batches of sparse tensors are not currently supported"):
        list(Loader([sparse] * 3, seed=0, workers=workers).load([single(0)]))


def test_reads_and_writes_that_do_a_part_are_taken_up_again(monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, part, at: pwrite(file, part[:999], at))
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: preadv(file, [parts[0][:777]], at))
    loaded = [values(batch) for batch in Loader(Numbers(), seed=0, workers=1).load(map(single, range(3)))]
    assert loaded == [(number, LARGE + number) for number in range(3)]


def test_memory_that_runs_out_is_an_error_and_not_a_dead_worker():
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        if samples[0][0] == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        return samples[0]

    batches = Loader(Numbers(), seed=0, workers=1, collate_fn=collate).load(map(single, range(9)))
    assert [values(next(batches))[0] for _ in range(2)] == [0, 1]
    with pytest.raises(
        DataError,
        match=r"of micro-batch 0 of step 2, \d+ bytes, does not fit into memory .*: .*File too large",
    ):
        next(batches)


def test_a_worker_that_is_killed_while_it_writes_is_named(monkeypatch):
    monkeypatch.setattr(Slots, "write", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(DataError, match=r"loader worker 0 \(process \d+\) was killed by SIGKILL"):
        list(Loader(Numbers(), seed=0, workers=1).load([single(0)]))


class Sealed:
    """It can be pickled, and not unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def test_a_batch_that_cannot_be_put_together_is_an_error():
    batches = Loader([1], seed=0, workers=1, collate_fn=lambda _: [Sealed()]).load([single(0)])
    with pytest.raises(DataError, match=r"cannot be put together again: ValueError: invalid literal"):
        next(batches)


def test_the_memory_is_given_back_even_where_another_process_holds_the_file():
    with make_slots() as slots:
        slots.write(3, [memoryview(b"x" * 100_000)])
        other = os.dup(slots._file)
        assert os.fstat(other).st_blocks
    assert os.fstat(other).st_blocks == 0
    os.close(other)


def test_a_slot_that_is_shorter_than_its_batch_is_an_error():
    with make_slots() as slots:
        place = slots.write(1, [memoryview(b"abc")])
        with pytest.raises(EOFError, match="a slot ends 2 bytes before"):
            place.read_into(memoryview(bytearray(5)), 0)


def test_where_there_are_no_slots_all_goes_through_the_queue(monkeypatch):
    monkeypatch.setattr(slots_module, "_slots", lambda: None)
    loaded = [values(batch) for batch in Loader(Numbers(), seed=0, workers=2).load(map(single, range(9)))]
    assert loaded == [(number, LARGE + number) for number in range(9)]


def test_there_are_no_slots_without_files_in_memory_that_may_grow(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 50, hard))
    try:
        with make_slots() as slots:
            assert slots is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.delattr(os, "memfd_create")
    with make_slots() as slots:
        assert slots is None
    monkeypatch.setattr(sys, "platform", "darwin")
    with make_slots() as slots:
        assert slots is None


def test_the_thread_that_pins_opens_the_batches(monkeypatch):
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(accelerator, "set_device_index", lambda _: None)
    memory, asked = parcel_module._memory, []

    def unpinned(num_bytes: int, pin: bool) -> torch.Tensor:
        asked.append((pin, threading.current_thread() is threading.main_thread()))
        return memory(num_bytes, False)

    monkeypatch.setattr(parcel_module, "_memory", unpinned)
    loader = Loader(Numbers(), seed=0, workers=3, prefetch=2, pin_memory=True)
    loaded = [values(batch) for batch in loader.load(map(single, range(30)))]
    assert loaded == [(number, LARGE + number) for number in range(30)]
    assert set(asked) == {(False, False), (True, False)}  # the pickle, and what is kept


SCRIPT = """
import multiprocessing, os, signal, sys
import numpy as np, torch
from samestep.data.global_batch import MicroBatch
from samestep.data.loader import Loader

class Numbers:
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return torch.full((100_000,), index)

def single(number):
    return MicroBatch(step=number, index=0, ids=np.array([number]), epochs=np.array([0]))

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    for batch in Loader(Numbers(), seed=0, workers=2).load(map(single, range(8))):
        print(batch.unique().tolist(), batch.numel(), flush=True)
        if sys.argv[2:] == ["die"] and batch.max() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def run(tmp_path: Path, *arguments: str, temporary: Path) -> subprocess.CompletedProcess[str]:
    """Run the script to the end of all its processes, which share its output."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    temporary.mkdir(parents=True)
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_have_slots_too(tmp_path, method):
    # Python's own fork server listens at a socket there, whose path must be short.
    with tempfile.TemporaryDirectory() as short:
        ended = run(tmp_path, method, temporary=Path(short) / "t")
    assert ended.stdout.splitlines() == [f"[{number}] 100000" for number in range(8)]
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_long_path_for_temporary_files_changes_nothing(tmp_path):
    ended = run(tmp_path, "fork", temporary=tmp_path.joinpath(*["a-long-name-of-a-folder"] * 6))
    assert ended.stdout.splitlines() == [f"[{number}] 100000" for number in range(8)]
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_rank_that_is_killed_leaves_nothing_behind(tmp_path):
    ended = run(tmp_path, "fork", "die", temporary=tmp_path / "temporary")
    assert ended.returncode == -signal.SIGKILL
    assert ended.stderr == ""
    assert list((tmp_path / "temporary").iterdir()) == []
