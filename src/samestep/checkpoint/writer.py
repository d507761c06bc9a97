"""Writing a checkpoint beside training: each rank its own file, then the first rank the manifest.

Threads of this process do it, which hash and write with Python's lock released. What they find is asked
for by the main thread; nothing is raised in the middle of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

from samestep.checkpoint.manifest import MANIFEST, Contribution, Manifest, join_entries
from samestep.checkpoint.shelf import Shelf
from samestep.checkpoint.snapshot import Part, entries_of, tensors_of
from samestep.checkpoint.tensor_file import sync_folder, write_tensors, write_text
from samestep.errors import SamestepError

_CONTRIBUTION: Final = "contribution-{:05}.json"
_FILE: Final = "rank-{:05}.safetensors"


@final
class Task:
    """A piece of work in a thread of its own, that ends with None or with a sentence of what went wrong."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self.problem: str | None = None
        self._work = work
        # A daemon: an interpreter that ends after an error must not wait for a slow disk.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def is_done(self, within_s: float = 0.0) -> bool:
        """Say whether it has ended, well or not; wait for it so long."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            self.problem = f"{error.strerror or str(error) or type(error).__name__}{where}"
        except SamestepError as error:
            self.problem = str(error)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"


def write_share(folder: Path, rank: int, parts: Sequence[Part], values: Mapping[str, Any]) -> Task:
    """Start to write what this rank stores."""

    def work() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = _FILE.format(rank)
        (folder / file).unlink(missing_ok=True)
        written = write_tensors(folder / file, tensors_of(parts))
        told = Contribution(file=file, written=written, tensors=entries_of(parts, file), values=dict(values))
        write_text(folder / _CONTRIBUTION.format(rank), told.text())
        sync_folder(folder)

    return Task(work, f"samestep-checkpoint-{rank}")


def finish(
    shelf: Shelf, manifest: Manifest, *, keep: int, best: Callable[[Sequence[Path]], Sequence[Path]]
) -> Task:
    """Start to join what all ranks wrote, make it a checkpoint, and remove those no longer wanted.

    `best` names, among the checkpoints that are there, those to be kept besides the newest.
    """

    def work() -> None:
        folder = shelf.unfinished(manifest.step)
        told = [_contribution(folder, rank) for rank in range(manifest.world_size)]
        whole = replace(
            manifest,
            tensors=join_entries([one.tensors for one in told]),
            values={name: value for one in told for name, value in one.values.items()},
            files={one.file: one.written for one in told},
        )
        write_text(folder / MANIFEST, whole.text())
        for rank in range(manifest.world_size):
            (folder / _CONTRIBUTION.format(rank)).unlink()
        shelf.commit(manifest.step)
        shelf.forget_after(manifest.step)  # of a run that this one took up at an earlier step
        shelf.keep_only(keep, best(shelf.whole()))

    return Task(work, "samestep-checkpoint-commit")


def _contribution(folder: Path, rank: int) -> Contribution:
    path = folder / _CONTRIBUTION.format(rank)
    try:
        return Contribution.read(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno,
            f"rank {rank} has written its part, but the first rank does not see it; "
            "checkpoints need a folder that all hosts share",
            str(path),
        ) from None
