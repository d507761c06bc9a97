"""The folder of checkpoints: names, the one rename that makes a checkpoint whole, and what is thrown away.

Law: a folder `step-00000050` is whole from the moment it bears that name: it was written under another one,
every byte of it was on the disk, and then it was renamed. So whatever the moment of a kill, what lies under
such a name can be loaded, unless something damaged it afterwards, which the hashes in its manifest tell.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final, final

from samestep.checkpoint.manifest import MANIFEST
from samestep.checkpoint.tensor_file import sync_folder
from samestep.errors import CheckpointError

CHECKPOINTS: Final = "checkpoints"  # in a run folder

_NAME: Final = re.compile(r"step-(\d{8,})")
_UNFINISHED: Final = ".part"
_LEAVING: Final = ".old"
_REPLACED: Final = ".replaced"


def step_folder(step: int) -> str:
    """Return the name of a checkpoint.

    >>> step_folder(50)
    'step-00000050'
    """
    return f"step-{step:08}"


def newest_at(path: Path) -> Path:
    """Return the newest checkpoint of a run folder or of a folder of checkpoints, else the path itself."""
    try:
        if (path / MANIFEST).is_file():
            return path
        for folder in (path, path / CHECKPOINTS):
            if whole := Shelf(folder).whole():
                return whole[0]
    except OSError:  # a name that the system does not take, a folder that may not be read: as if not there
        return path
    return path


@final
class Shelf:
    """One folder that holds the checkpoints of one run. Only the first rank changes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> None:
        """Make the folder, and clear away what killed writers left. Raises CheckpointError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):  # else it would be known after hours
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            for rest in sorted(self.folder.glob(".step-*")):
                place = self.folder / rest.name.removeprefix(".").removesuffix(rest.suffix)
                if rest.suffix == _REPLACED and not place.exists():
                    rest.rename(place)  # the writer was killed between the two renames of `commit`
                elif rest.suffix in (_UNFINISHED, _LEAVING, _REPLACED):
                    shutil.rmtree(rest)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.folder is {self.folder}, which cannot be written: {error.strerror}. Name one "
                "where you may write."
            ) from None

    def unfinished(self, step: int) -> Path:
        """Return the folder in which all ranks write a checkpoint before it is whole."""
        return self.folder / f".{step_folder(step)}{_UNFINISHED}"

    def commit(self, step: int) -> Path:
        """Make what was written a checkpoint, in the place of one of the same step. Raises OSError."""
        unfinished, place = self.unfinished(step), self.folder / step_folder(step)
        replaced = place.with_name(f".{place.name}{_REPLACED}")
        sync_folder(unfinished)
        if place.exists():  # of a run that was resumed before this step
            shutil.rmtree(replaced, ignore_errors=True)  # what an earlier commit could not remove
            place.rename(replaced)
        unfinished.rename(place)
        sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return place

    def give_up(self, step: int) -> None:
        """Remove what was written of a checkpoint that failed."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def whole(self) -> list[Path]:
        """Return the checkpoints, the newest first: by their step, since clocks may go backwards."""
        if not self.folder.is_dir():
            return []
        found = [
            (int(match[1]), place)
            for place in self.folder.iterdir()
            if (match := _NAME.fullmatch(place.name)) and (place / MANIFEST).is_file()
        ]
        return [place for _, place in sorted(found, reverse=True)]

    def keep_only(self, newest: int, besides: Iterable[Path]) -> None:
        """Remove all but the newest checkpoints and those named besides. Raises OSError."""
        kept = {place.resolve() for place in besides}
        for place in self.whole()[newest:]:
            if place.resolve() not in kept:
                self._leave(place)

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints behind a step: a run that goes on from it makes its own. Raises OSError."""
        for place in self.whole():
            if int(place.name.removeprefix("step-")) > step:
                self._leave(place)

    def _leave(self, place: Path) -> None:
        # Under another name first: a checkpoint that is half removed must not be taken for a whole one.
        leaving = place.with_name(f".{place.name}{_LEAVING}")
        shutil.rmtree(leaving, ignore_errors=True)
        place.rename(leaving)
        shutil.rmtree(leaving)
