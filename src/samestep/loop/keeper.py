"""Keeping checkpoints of a run: copied between two steps, written beside training, agreed on by ballots.

Note [when a checkpoint is whole]: each rank writes its own file in a thread. With every ballot it tells how
far it is: `Mark`. Once all have finished, the first rank writes the manifest and renames the folder, in a
thread as well; once that is done, the next ballot tells it to all, and they report it at the same step. If
anybody fails, all give up the checkpoint and say why; training goes on, and the ones before are untouched.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, final

import torch

from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.shelf import Shelf, step_folder
from samestep.checkpoint.snapshot import Part, copied
from samestep.checkpoint.writer import Task, finish, write_share
from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.config.checkpointing import Checkpointing
from samestep.errors import CheckpointError
from samestep.events import CheckpointFailed, CheckpointSaved, Event, Notice

_LOOK_S: Final = 0.5  # between two ballots while everybody waits for a disk
_LET_GO_S: Final = 2.0  # for which the end of a run that failed waits for a disk


class Mark(IntEnum):
    """How far a rank is with the checkpoint that is being written."""

    NOTHING = 0  # none is being written, or this rank is still at it
    WRITTEN = 1  # this rank's file is on the disk
    FAILED = 2
    WHOLE = 3  # of the first rank: the checkpoint bears its name


@final
@dataclass(kw_only=True, slots=True)
class _UnderWay:
    manifest: Manifest
    reason: str
    writing: Task
    finishing: Task | None = None  # of the first rank
    stall_seconds: float = 0.0
    copied_at: float = 0.0
    began: float | None = None  # where training waits until it is whole

    def mark(self) -> Mark:
        """Say how far this rank is; never waits."""
        task = self.finishing or self.writing
        if not task.is_done():
            return Mark.NOTHING
        if task.problem is not None:
            return Mark.FAILED
        return Mark.WHOLE if self.finishing else Mark.WRITTEN


@final
class Keeper:
    """Stores the state of a run on its shelf. Every rank holds one."""

    def __init__(
        self,
        policy: Checkpointing,
        shelf: Shelf,
        transport: Transport,
        *,
        device: torch.device,
        notify: Callable[[Event], None],
    ) -> None:
        self.policy = policy
        self.shelf = shelf
        self.last_step: int | None = (
            None  # of the newest checkpoint that is whole, this run's or resumed from
        )
        self.last_problem: str | None = None  # of the last checkpoint, where it failed
        self.failed_step: int | None = None  # of that one
        self._transport = transport
        self._device = device
        self._notify = notify
        self._under_way: _UnderWay | None = None
        self._has_told = False  # that the metric of `best` is not measured

    def mark(self) -> int:
        """Return this rank's word for the ballot."""
        return int(self._under_way.mark()) if self._under_way else int(Mark.NOTHING)

    def save(
        self, step: int, collect: Callable[[], tuple[list[Part], dict[str, Any], Manifest]], reason: str
    ) -> None:
        """Collective. Copy the state, and start to write it, unless that of this step is whole already.

        An unfinished write before is waited for. `collect` gives this rank's parts as views, its values that
        are no tensors, and the manifest without the places of tensors.
        """
        began = time.monotonic()
        self.drain()
        if self.last_step == step:
            return
        parts, values, manifest = collect()
        copies = copied(parts)
        folder = self.shelf.unfinished(manifest.step)
        self._under_way = _UnderWay(
            manifest=manifest,
            reason=reason,
            writing=write_share(folder, self._transport.rank, copies, values),
        )
        self._under_way.copied_at = time.monotonic()
        if self.policy.background:
            self._under_way.stall_seconds = self._under_way.copied_at - began
            return
        self._under_way.began = began
        self.drain()

    def hear(self, marks: Sequence[int]) -> None:
        """Collective. Take the next step of the checkpoint under way, by the marks of all ranks."""
        now = self._under_way
        if now is None:
            return
        if Mark.FAILED in marks and all(marks):
            self._give_up(now)
        elif marks[0] == Mark.WHOLE:
            self._report(now)
        elif all(mark == Mark.WRITTEN for mark in marks) and self._transport.rank == 0 and not now.finishing:
            now.finishing = finish(self.shelf, now.manifest, keep=self.policy.keep, best=self._best)

    def drain(self) -> None:
        """Collective. Return when no checkpoint is under way, however slow the disk is."""
        while (now := self._under_way) is not None:
            (now.finishing or now.writing).is_done(within_s=_LOOK_S)
            words = self._transport.ballot(torch.tensor([self.mark()], dtype=torch.int64))
            self.hear(words[:, 0].tolist())

    def abandon(self) -> None:
        """Let go of what is under way after an error; the next run clears away what is left of it.

        That may begin in this very process, so the writing thread gets a moment to end.
        """
        now, self._under_way = self._under_way, None
        if now is not None:
            (now.finishing or now.writing).is_done(within_s=_LET_GO_S)

    def _report(self, now: _UnderWay) -> None:
        self._under_way, self.last_step, self.last_problem = None, now.manifest.step, None
        manifest = (
            Manifest.read(self.shelf.folder / step_folder(now.manifest.step)) if self._is_first else None
        )
        told = json.dumps(manifest.num_bytes if manifest else 0).encode()
        num_bytes = json.loads(gather_bytes(self._transport, told, device=self._device)[0])
        ended = time.monotonic()
        self._look_for_best(now.manifest.metrics)
        self._notify(
            CheckpointSaved(
                step=now.manifest.step,
                folder=str(self.shelf.folder / step_folder(now.manifest.step)),
                num_bytes=num_bytes,
                stall_seconds=now.stall_seconds if now.began is None else ended - now.began,
                write_seconds=ended - now.copied_at,
                reason=now.reason,
            )
        )

    def _give_up(self, now: _UnderWay) -> None:
        problem = (now.finishing or now.writing).problem or ""
        told = gather_bytes(self._transport, problem.encode(), device=self._device)
        failed = [(rank, text.decode()) for rank, text in enumerate(told) if text]
        rank, text = failed[0]
        if self._is_first:
            self.shelf.give_up(now.manifest.step)
        self._under_way, self.last_problem = None, f"rank {rank}: {text}"
        self.failed_step = now.manifest.step
        self._notify(
            CheckpointFailed(
                step=now.manifest.step,
                folder=str(self.shelf.folder / step_folder(now.manifest.step)),
                problem=self.last_problem,
            )
        )

    def _best(self, whole: Sequence[Path]) -> list[Path]:
        """Return the checkpoint with the best value of the metric; of equal ones the oldest."""
        if self.policy.best is None:
            return []
        found: list[tuple[float, int, Path]] = []
        for place in whole:
            try:
                manifest = Manifest.read(place)
            except CheckpointError:  # damaged since: no candidate, and not worth a failed commit
                continue
            value = manifest.metrics.get(self.policy.best)
            if value is not None and not math.isnan(value):
                found.append((value if self.policy.mode == "min" else -value, manifest.step, place))
        return [min(found)[2]] if found else []

    def _look_for_best(self, metrics: Mapping[str, float]) -> None:
        """Tell once, while it can still be corrected, where the metric of `best` is not measured."""
        best = self.policy.best
        if best is not None and metrics and best not in metrics and not self._has_told:
            self._has_told = True
            message = (
                f"checkpoint.best is {best!r}, but what is measured is {', '.join(metrics)}: no checkpoint "
                "is kept for being the best."
            )
            self._notify(Notice(level="warning", message=message))

    @property
    def _is_first(self) -> bool:
        return self._transport.rank == 0
