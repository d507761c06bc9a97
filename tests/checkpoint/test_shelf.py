"""One rename makes a checkpoint, steps give the order, and what is not wanted goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from stored_models import store_tensors

from samestep.checkpoint.manifest import MANIFEST, Manifest
from samestep.checkpoint.shelf import Shelf, newest_at, step_folder
from samestep.errors import CheckpointError


def fill(shelf: Shelf, *steps: int, text: str = "{}") -> None:
    for step in steps:
        write(shelf, step, text)
        shelf.commit(step)


def write(shelf: Shelf, step: int, text: str = "{}") -> None:
    shelf.unfinished(step).mkdir(parents=True)
    (shelf.unfinished(step) / MANIFEST).write_text(text)


def names(shelf: Shelf) -> list[str]:
    return sorted(place.name for place in shelf.folder.iterdir())


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    made = Shelf(tmp_path / "deep" / "checkpoints")
    made.open()
    return made


def test_nothing_bears_the_name_before_the_rename(shelf: Shelf) -> None:
    write(shelf, 5)
    assert shelf.whole() == []
    assert names(shelf) == [".step-00000005.part"]
    assert shelf.commit(5) == shelf.folder / "step-00000005"
    assert names(shelf) == ["step-00000005"]


def test_a_checkpoint_of_the_same_step_is_replaced(shelf: Shelf) -> None:
    fill(shelf, 5, text="old")
    fill(shelf, 5, text="new")
    assert names(shelf) == ["step-00000005"]
    assert (shelf.folder / "step-00000005" / MANIFEST).read_text() == "new"


class Killed(Exception):
    pass


def killed_at_a_folder(place: Path, ignore_errors: bool = False) -> None:
    if place.exists():
        raise Killed


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_within_a_replacement_leaves_a_whole_one(
    renames: int, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(shelf, 4, 5, text="old")
    write(shelf, 5, text="new")
    rename, left = Path.rename, renames

    def counted(self: Path, target: Path) -> Path:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", counted)
        patched.setattr("shutil.rmtree", killed_at_a_folder)
        with pytest.raises(Killed):
            shelf.commit(5)
    for _ in range(2):  # whoever comes next puts it right, once and for all
        shelf.open()
        assert names(shelf) == ["step-00000004", "step-00000005"]
        kept = (shelf.folder / "step-00000005" / MANIFEST).read_text()
        assert kept == ("new" if renames == 2 else "old")


def test_what_an_earlier_replacement_left_does_not_block_the_next(shelf: Shelf) -> None:
    fill(shelf, 5, text="old")
    stuck = shelf.folder / ".step-00000005.replaced"
    stuck.mkdir()
    (stuck / "file").write_text("stuck")
    fill(shelf, 5, text="new")
    assert names(shelf) == ["step-00000005"]


def test_the_order_is_that_of_the_steps_not_of_a_clock(shelf: Shelf) -> None:
    fill(shelf, 30, 100000000, 9, 99999999, 20)
    for age, place in enumerate(shelf.whole()):
        os.utime(place, (age, age))  # the newest was written first, by a clock that went backwards
        os.utime(place / MANIFEST, (age, age))
    steps = [100000000, 99999999, 30, 20, 9]
    assert [place.name for place in shelf.whole()] == [step_folder(step) for step in steps]
    assert newest_at(shelf.folder) == newest_at(shelf.folder.parent) == shelf.folder / step_folder(steps[0])


def test_other_things_in_the_folder_are_left_alone(shelf: Shelf) -> None:
    fill(shelf, 1, 2, 3)
    for name in ("step-1", "step-0000000a", "notes", ".hidden", "step-00000009"):
        (shelf.folder / name).mkdir()
    shelf.keep_only(1, [])
    shelf.open()
    assert names(shelf) == [".hidden", "notes", "step-00000003", "step-00000009", "step-0000000a", "step-1"]
    assert [place.name for place in shelf.whole()] == ["step-00000003"]  # 9 has no manifest


def test_the_newest_and_those_named_besides_are_kept(shelf: Shelf) -> None:
    fill(shelf, 10, 20, 30, 40, 50)
    shelf.keep_only(2, [shelf.folder / "step-00000010"])
    assert names(shelf) == ["step-00000010", "step-00000040", "step-00000050"]
    shelf.forget_after(40)
    assert names(shelf) == ["step-00000010", "step-00000040"]


def test_a_run_that_went_back_replaces_what_lies_ahead(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        store_tensors(tmp_path, {"x": torch.full((2,), step)}, step=step)
    store_tensors(tmp_path, {"x": torch.full((2,), 15)}, step=15)
    assert [place.name for place in Shelf(tmp_path).whole()] == ["step-00000015", "step-00000010"]
    assert Manifest.read(tmp_path / "step-00000015").step == 15


def test_what_killed_writers_left_is_cleared_away(shelf: Shelf) -> None:
    fill(shelf, 1)
    write(shelf, 2)
    (shelf.folder / ".step-00000003.old").mkdir()
    shelf.give_up(7)  # which nobody has begun
    shelf.open()
    assert names(shelf) == ["step-00000001"]
    write(shelf, 2)
    shelf.give_up(2)
    assert names(shelf) == ["step-00000001"]


def test_a_folder_without_permission_is_named(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(CheckpointError, match=r"checkpoints, which cannot be written: Permission denied"):
        shelf.open()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint.folder is .*/file, which cannot be written: File"):
        Shelf(tmp_path / "file").open()
    with pytest.raises(CheckpointError, match=r"cannot be written: Not a directory. Name one where you may"):
        Shelf(tmp_path / "file" / "below").open()
    assert Shelf(tmp_path / "nowhere").whole() == []
    assert newest_at(Path("n" * 300)) == Path("n" * 300)
