"""Where a run goes on: the choice of a checkpoint, the same on all ranks, and what must fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.reader import StoredCheckpoint
from samestep.checkpoint.shelf import Shelf, newest_at
from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.errors import CheckpointError, ConfigError
from samestep.events import Event, Notice
from samestep.loop.walk import MOVES


def choose(
    shelf: Shelf | None,
    resume: str | Path,
    transport: Transport,
    *,
    device: torch.device,
    notify: Callable[[Event], None],
) -> StoredCheckpoint | None:
    """Collective. Return the checkpoint from which the run goes on, read through and found whole, or None.

    "auto" takes the newest whole one on the shelf and says which damaged ones it passed over; "never" takes
    none; a path names one, and an error about it offers the next older whole one. Raises CheckpointError,
    on every rank alike.
    """
    if str(resume) == "never":
        return None
    by_hand = str(resume) != "auto"
    candidates = _told_by_first(_candidates(shelf, resume, transport), transport, device=device)
    for number, place in enumerate(candidates):
        problem = _check(Path(place), transport, device=device)
        if problem is None:
            return StoredCheckpoint(Path(place))
        if by_hand:
            older = _older(Path(place), transport, device=device)
            raise CheckpointError(problem + (f" The next older whole one is {older}." if older else ""))
        if number == len(candidates) - 1:
            raise CheckpointError(
                f"{problem} No older checkpoint is whole either. Restore the folder from a copy, or start "
                "anew in another one."
            )
        notify(Notice(level="warning", message=f"checkpoint passed over, taking the next older: {problem}"))
    return None


def _candidates(shelf: Shelf | None, resume: str | Path, transport: Transport) -> list[str]:
    if transport.rank != 0:
        return []
    if str(resume) == "auto":
        return [str(place) for place in shelf.whole()] if shelf else []
    return [str(newest_at(Path(resume).absolute()))]


def _check(place: Path, transport: Transport, *, device: torch.device) -> str | None:
    """Collective. Let the ranks share the reading of all files; return what is wrong with any, or None."""
    problem = ""
    try:
        with StoredCheckpoint(place) as stored:
            files = sorted(stored.manifest.files)
            stored.require_whole(files[transport.rank :: transport.world_size])
    except CheckpointError as error:
        problem = str(error)
    told = gather_bytes(transport, problem.encode(), device=device)
    return next((text.decode() for text in told if text), None)


def _older(place: Path, transport: Transport, *, device: torch.device) -> str | None:
    """Collective. Return the next older checkpoint beside one that is damaged, where it is whole."""
    beside = Shelf(place.parent).whole() if transport.rank == 0 else []
    length = len(place.name)  # numbers of more digits are later ones
    older = [str(other) for other in beside if (len(other.name), other.name) < (length, place.name)]
    for other in _told_by_first(older, transport, device=device):
        if _check(Path(other), transport, device=device) is None:
            return other
    return None


def _told_by_first(values: Sequence[str], transport: Transport, *, device: torch.device) -> list[str]:
    told: list[str] = json.loads(gather_bytes(transport, json.dumps(list(values)).encode(), device=device)[0])
    return told


def require_unused(shelf: Shelf) -> None:
    """Raise CheckpointError where a new run would write among the checkpoints of another one."""
    if there := shelf.whole():
        raise CheckpointError(
            f"checkpoint.folder is {shelf.folder}, which holds checkpoints of a run ({there[0].name} is the "
            "newest), and resume is 'never'. Name another folder, or remove this one."
        )


def require_shared(folder: Path, transport: Transport) -> None:
    """Collective. Raise ConfigError, on every rank, where one does not see the folder of the first."""
    sees = torch.tensor([folder.is_dir()], dtype=torch.int64)
    seen = transport.ballot(sees)[:, 0].tolist()
    if not all(seen):
        rank = seen.index(0)
        raise ConfigError(
            f"checkpoint.folder is {folder}, which rank 0 has made, but rank {rank} does not see it. Every "
            "rank writes its part there: name a folder that all hosts share."
        )


def broken_key(stored: StoredCheckpoint, key: dict[str, str | int]) -> dict[str, str]:
    """Return what of the numerics key is not as it was: the bits may differ from here on."""
    before = stored.manifest.numerics_key
    names = [name for name in {**before, **key} if str(before.get(name)) != str(key.get(name))]
    return {name: f"{before.get(name)} before, {key.get(name)} now" for name in names}


def require_same_data(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError where the order of the samples would not be the one of before."""
    for name in {**before, **now}:
        if name not in MOVES and before.get(name) != now.get(name):
            was, is_now = (state.get(name, "left out") for state in (before, now))
            raise CheckpointError(
                f"{folder}: {name} was {was} and is now {is_now}, so the samples would not come in the "
                "order of the run that was stopped: some twice, some never. Go on with the data and the "
                "batching of before, or start a run of its own: resume='never' and another folder."
            )
