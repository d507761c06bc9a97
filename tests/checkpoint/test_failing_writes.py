"""A disk that is full or refuses: said on all ranks at the same step, and the older checkpoints are whole."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import DATA, STEPS, loss, of_kind, steps_on, train, warnings_of
from torch import Tensor, nn

import samestep
from samestep.checkpoint import writer
from samestep.checkpoint.reader import StoredCheckpoint
from samestep.checkpoint.shelf import Shelf
from samestep.checkpoint.tensor_file import Written, write_tensors
from samestep.errors import CheckpointError


def told(events: list[samestep.Event]) -> list[tuple[Any, ...]]:
    """Return the checkpoint events of a rank, each with the last step before it."""
    found, step = [], -1
    for event in events:
        if isinstance(event, samestep.StepReport):
            step = event.step
        if isinstance(event, samestep.CheckpointSaved):
            found.append(("saved", event.step, step))
        if isinstance(event, samestep.CheckpointFailed):
            found.append(("failed", event.step, step, event.problem))
    return found


def require_whole(folder: Path) -> None:
    for place in Shelf(folder).whole():
        with StoredCheckpoint(place) as stored:
            stored.require_whole(sorted(stored.manifest.files))
    assert [place for place in folder.iterdir() if place.name.startswith(".")] == []


class Faulty:
    """Refuses the files of one rank at some steps."""

    def __init__(self, code: int, steps: tuple[int, ...], rank: int) -> None:
        self.code = code
        self.names = {(f".step-{step:08}.part", f"rank-{rank:05}.safetensors") for step in steps}

    def __call__(self, path: Path, tensors: Mapping[str, Tensor]) -> Written:
        if (path.parent.name, path.name) in self.names:
            raise OSError(self.code, os.strerror(self.code), str(path))
        return write_tensors(path, tensors)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(("code", "rank"), [(errno.ENOSPC, 2), (errno.EACCES, 0)])
def test_all_ranks_hear_of_a_failure_after_the_same_step_and_train_on(
    code: int, rank: int, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(None)
    monkeypatch.setattr(writer, "write_tensors", Faulty(code, (4, 6), rank))
    events: list[list[samestep.Event]] = []
    policy = samestep.Checkpointing(folder=tmp_path, every=2, background=background)
    result = train(tmp_path, 3, events=events, checkpoint=policy)
    assert result.fingerprint == expected.fingerprint
    assert told(events[0]) == told(events[1]) == told(events[2])
    assert [line[:2] for line in told(events[0])] == [
        ("saved", 2),
        ("failed", 4),
        ("failed", 6),
        ("saved", 8),
    ]
    for _, step, _, problem in [line for line in told(events[0]) if line[0] == "failed"]:
        assert problem.startswith(f"rank {rank}: {os.strerror(code)} ({tmp_path}/.step-{step:08}.part/rank-")
    assert steps_on(tmp_path) == [8, 2]
    require_whole(tmp_path)


def test_a_last_checkpoint_that_fails_is_an_error_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(None)
    with monkeypatch.context() as patched:
        patched.setattr(writer, "write_tensors", Faulty(errno.ENOSPC, (STEPS,), 1))
        with pytest.raises(CheckpointError) as raised:
            train(tmp_path, 2)
    text = str(raised.value)
    assert text.startswith(
        f"the last checkpoint, of step {STEPS}, could not be written: rank 1: No space left"
    )
    assert "The newest whole one is that of step 6. Make room, and run the same command again." in text
    require_whole(tmp_path)
    events: list[list[samestep.Event]] = []
    assert train(tmp_path, 2, events=events).fingerprint == expected.fingerprint
    assert [event.step for event in of_kind(events[1], samestep.Resumed)] == [6]


def test_a_last_checkpoint_on_a_schedule_that_fails_is_an_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "write_tensors", Faulty(errno.ENOSPC, (2, 4, 6, 8), 0))
    policy = samestep.Checkpointing(folder=tmp_path, every=2, at_end=False)
    with pytest.raises(CheckpointError, match=r"the last checkpoint, of step 8, .* There is no older one."):
        train(tmp_path, checkpoint=policy)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk of 1 MB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("this user may not mount a disk; a limit of the file size is tested in its place")
    yield place
    subprocess.run(["umount", str(place)], check=True, timeout=20)


def test_a_full_disk(small_disk: Path) -> None:
    """The disk fills up after step 3 and is emptied after step 5."""
    filler = small_disk / "filler"

    def fill(event: samestep.Event) -> None:
        if isinstance(event, samestep.StepReport) and event.step == 2:
            with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(b"0" * 4096)
        if isinstance(event, samestep.CheckpointFailed):
            filler.unlink()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2000), nn.Tanh(), nn.Linear(2000, 1))

    expected = train(None, make=make)
    events: list[list[samestep.Event]] = []
    folder = small_disk / "checkpoints"
    policy = samestep.Checkpointing(folder=folder, every=2, background=False)
    result = train(folder, 2, make=make, callback=fill, events=events, checkpoint=policy)
    assert result.fingerprint == expected.fingerprint
    assert told(events[0]) == told(events[1])
    assert [line[:2] for line in told(events[0])] == [("saved", 2), ("failed", 4), ("saved", 6), ("saved", 8)]
    assert "No space left on device" in told(events[0])[1][3]
    assert steps_on(folder) == [8, 6, 2]
    require_whole(folder)


def test_a_disk_that_may_only_be_read_is_an_error_at_once(small_disk: Path) -> None:
    (small_disk / "there").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=20)
    for folder, reason in {"there": "Permission denied", "new": "Read-only file system"}.items():
        told = f"checkpoint.folder is {small_disk / folder}, which cannot be written: {reason}. Name one"
        with pytest.raises(CheckpointError, match=told):
            train(small_disk / folder, 2)


def test_training_that_waits_says_how_long(tmp_path: Path) -> None:
    """Without `background` all of the writing is a stall; with it only the copy is."""
    for background in (True, False):
        events: list[list[samestep.Event]] = []
        folder = tmp_path / str(background)
        policy = samestep.Checkpointing(folder=folder, every=4, background=background)
        train(folder, 2, events=events, checkpoint=policy)
        for rank in events:
            saved = of_kind(rank, samestep.CheckpointSaved)
            assert [(event.step, event.reason) for event in saved] == [
                (4, "every 4 steps"),
                (8, "every 4 steps"),
            ]
            for event in saved:
                assert 0 < event.write_seconds < 30
                assert 0 < event.stall_seconds < 30
                assert (event.stall_seconds > event.write_seconds) == (not background)
                files = (Path(event.folder) / f"rank-{rank:05}.safetensors" for rank in range(2))
                assert event.num_bytes == sum(file.stat().st_size for file in files)


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    """The metric is best at step 4 and a NaN is never the best."""
    values = iter([3.0, float("nan"), 1.0, 2.0, 5.0, 4.0, 6.0, 7.0])

    def metric(model: nn.Module, batch: Any) -> samestep.Weighted:
        return samestep.weighted(torch.full((1,), next(values)))

    evaluation = samestep.Evaluation(dataset=[(torch.zeros(3), torch.zeros(()))], metric=metric, every=1)
    policy = samestep.Checkpointing(folder=tmp_path, every=1, keep=2, best="metric")
    train(tmp_path, evaluate=evaluation, checkpoint=policy)
    assert steps_on(tmp_path) == [8, 7, 3]


def test_a_best_that_is_not_measured_is_said_once(tmp_path: Path) -> None:
    evaluation = samestep.Evaluation(dataset=DATA, metric=loss, every=1)
    policy = samestep.Checkpointing(folder=tmp_path, every=1, best="los")
    events: list[list[samestep.Event]] = []
    train(tmp_path, 2, evaluate=evaluation, checkpoint=policy, events=events)
    for rank in events:
        (told,) = warnings_of(rank)
        assert told.startswith("checkpoint.best is 'los', but what is measured is metric: no checkpoint")
