"""Writing in a thread: every failure becomes a sentence, and nothing is raised in the middle of a step."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from stored_models import done, manifest_of, store_tensors

from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.reader import StoredCheckpoint
from samestep.checkpoint.shelf import Shelf
from samestep.checkpoint.snapshot import whole_part
from samestep.checkpoint.tensor_file import write_tensors
from samestep.checkpoint.writer import Task, finish, write_share
from samestep.errors import CheckpointError


def raising(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EACCES, "Permission denied", "/a/b"), "Permission denied (/a/b)"),
        (OSError(), "OSError"),
        (CheckpointError("a sentence"), "a sentence"),
        (MemoryError("much"), "MemoryError: much"),
    ],
)
def test_what_goes_wrong_is_a_sentence(error: Exception, told: str) -> None:
    task = Task(raising(error), "failing")
    assert task.is_done(within_s=10)
    assert task.problem == told


def test_a_task_is_waited_for_only_as_long_as_asked() -> None:
    release = threading.Event()
    task = Task(lambda: (release.wait(30), None)[1], "waiting")
    assert not task.is_done()
    assert not task.is_done(within_s=0.01)
    release.set()
    assert task.is_done(within_s=10)
    assert task.problem is None


def test_a_full_device_is_said(tmp_path: Path) -> None:
    class Full(type(tmp_path)):  # type: ignore[misc]
        def open(self, mode: str, buffering: int = -1) -> object:
            return open("/dev/full", "wb", buffering=buffering)

    with pytest.raises(OSError, match="No space left on device"):
        write_tensors(Full(tmp_path / "file"), {"x": torch.zeros(3)})


def test_a_limit_in_the_middle_of_a_tensor_is_said_and_the_older_ones_are_whole(tmp_path: Path) -> None:
    """The system takes a part of the last write, and refuses the rest, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    store_tensors(tmp_path, {"x": torch.ones(9)}, step=1)
    shelf = Shelf(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        parts = [whole_part("model/x", torch.zeros(50_000))]
        task = write_share(shelf.unfinished(2), 0, parts, {})
        assert task.is_done(within_s=30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert task.problem == os.strerror(errno.EFBIG)
    assert (shelf.unfinished(2) / "rank-00000.safetensors").stat().st_size == 100_000
    assert [place.name for place in shelf.whole()] == ["step-00000001"]
    done(write_share(shelf.unfinished(2), 0, parts, {}))  # over what the first try left
    done(finish(shelf, manifest_of({"x": torch.zeros(50_000)}, 2, 1), keep=3, best=lambda _: []))
    with StoredCheckpoint(shelf.whole()[0]) as stored:
        stored.require_whole(sorted(stored.manifest.files))


def test_what_another_rank_wrote_must_be_seen(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    done(write_share(shelf.unfinished(1), 0, [whole_part("model/x", torch.zeros(3))], {}))
    task = finish(shelf, manifest_of({"x": torch.zeros(3)}, 1, 2), keep=3, best=lambda _: [])
    assert task.is_done(within_s=10)
    assert task.problem is not None
    assert "rank 1 has written its part, but the first rank does not see it" in task.problem
    assert "a folder that all hosts share" in task.problem
    assert shelf.whole() == []


def test_values_of_all_ranks_are_joined(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    for rank in range(2):
        part = whole_part(f"model/{rank}", torch.zeros(rank))
        done(write_share(shelf.unfinished(1), rank, [part], {f"optimizer/{rank}/step": rank}))
    manifest = manifest_of({"0": torch.zeros(0), "1": torch.zeros(1)}, 1, 2)
    done(finish(shelf, manifest, keep=3, best=lambda _: []))
    found = Manifest.read(tmp_path / "step-00000001")
    assert found.values == {"optimizer/0/step": 0, "optimizer/1/step": 1}
    assert sorted(path.name for path in (tmp_path / "step-00000001").iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]


KILLS = 60
WRITING = """
import os, sys, threading, torch
from pathlib import Path
from samestep.checkpoint.shelf import Shelf
from samestep.checkpoint.snapshot import whole_part
from samestep.checkpoint.writer import finish, write_share
from stored_models import done, manifest_of

shelf = Shelf(Path(sys.argv[1]))
shelf.open()
first = int(shelf.whole()[0].name[5:]) + os.getpid() % 2 if shelf.whole() else 0
print("up", flush=True)
for step in range(first, 10**9):  # at times in the place of one that is there
    state = {f"{name}{rank}": torch.full((3000,), step) for name in "xyz" for rank in range(2)}
    ranks = [
        threading.Thread(target=lambda rank=rank: done(write_share(
            shelf.unfinished(step), rank,
            [whole_part(f"model/{name}", tensor) for name, tensor in state.items() if name[1] == str(rank)],
            {},
        )))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    done(finish(shelf, manifest_of(state, step, 2), keep=2, best=lambda _: []))
"""
FORKING = f"""
import os, signal, sys, time
import samestep.checkpoint.writer, samestep.checkpoint.weights, stored_models
program = compile({WRITING!r}, "writing", "exec")
for line in sys.stdin:  # how long each writer lives, from when it begins to write
    seconds = float(line)
    reading, told = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(told, 1)
        exec(program)
    os.close(told)
    assert os.read(reading, 3), "the writer ended by itself"
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(reading)
    print("killed", flush=True)
"""


@pytest.mark.timeout(110)
def test_the_newest_checkpoint_is_whole_whatever_the_moment_of_a_kill(tmp_path: Path) -> None:
    """Sixty writers, each killed at a random moment: the newest always loads, and never goes back."""
    draw = Random(3)
    forking = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(tmp_path)],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert forking.stdin is not None
    assert forking.stdout is not None
    last, left = -1, set()
    try:
        for _ in range(KILLS):
            print(draw.uniform(0.0, 0.1), file=forking.stdin, flush=True)
            assert forking.stdout.readline() == "killed\n"
            left |= {place.suffix for place in tmp_path.iterdir() if place.name.startswith(".")}
            shelf = Shelf(tmp_path)
            if not shelf.whole() and not list(tmp_path.glob(".step-*.replaced")):
                assert last < 0
                continue
            shelf.open()
            last = require_whole(shelf, at_least=last)
    finally:
        os.killpg(forking.pid, signal.SIGKILL)
        forking.communicate(timeout=30)
    assert last > 5
    assert ".part" in left  # writers were killed in the middle


def require_whole(shelf: Shelf, *, at_least: int) -> int:
    """Read every checkpoint through, and return the newest step."""
    places = shelf.whole()
    for place in places:
        with StoredCheckpoint(place) as stored:
            stored.require_whole(sorted(stored.manifest.files))
            state = stored.model_state()
            step = stored.manifest.step
        assert len(state) == 6
        assert all(torch.equal(tensor, torch.full((3000,), step)) for tensor in state.values())
    newest = int(places[0].name.removeprefix("step-"))
    assert newest >= at_least
    return newest
