"""Who hears of a run: callbacks on all ranks, listeners and the run folder on the first."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import final

import torch

from samestep.callbacks.callback import Callback
from samestep.callbacks.dispatch import CallbackLike, Callbacks, require_callback_list
from samestep.errors import ConfigError
from samestep.events import Event, Notice, StepReport
from samestep.loop.batches import LoadedBatch
from samestep.loop.noise import StepDetails
from samestep.loop.session import Listener, Session
from samestep.precision.policy import Precision, resolve_precision
from samestep.track.folder import LEDGER, RunFolder, refuse_used
from samestep.track.ledger import keep_steps, ledger_line, parse_line
from samestep.track.ranks import RankFile
from samestep.track.report import Report
from samestep.track.trackers.choose import trackers


@final
class Audience:
    """Passes every event on, in order: to the callbacks first, then to who only writes it down."""

    def __init__(
        self,
        callbacks: Sequence[CallbackLike],
        listeners: Sequence[Listener],
        folder: Path | None,
        *,
        track: Sequence[str],
        timeout_s: float,
    ) -> None:
        require_callback_list(callbacks)
        if track and folder is None:
            raise ConfigError(f"track is {list(track)}, but there is no run folder. Give folder='...' too.")
        self._track = track
        self.folder = folder
        self.history: list[StepReport] = []
        self._given = callbacks
        self._given_listeners = listeners
        self._timeout_s = timeout_s
        self._callbacks: Callbacks | None = None
        self._listeners: list[Listener] = []
        self._early: list[Event] = []  # what happened before anybody could hear it
        self._ids: Sequence[int] = ()
        self._session: Session | None = None

    def __call__(self, event: Event) -> None:
        """Pass an event on."""
        if self._callbacks is None:
            self._early.append(event)
            return
        if isinstance(event, StepReport):
            self.history.append(event)
        self._callbacks.dispatch(event, self._details() if isinstance(event, StepReport) else None)
        for listener in self._listeners:
            listener(event)

    def suited(self, precision: str | Precision) -> Precision:
        """Return the precision under which every callback can do its work: one may watch skipped steps."""
        chosen = resolve_precision(precision)
        watched = any(isinstance(one, Callback) and one.skips_nonfinite for one in self._given)
        if watched and chosen.nonfinite is None:
            return chosen.model_copy(update={"nonfinite": "skip"})
        return chosen

    @contextmanager
    def attending(self, session: Session) -> Iterator[Callbacks]:
        """Open the run folder, and pass on from here what happens; the session is open, without a model."""
        with ExitStack() as opened:
            if self.folder is not None:
                self._open(self.folder, session, opened)
            if session.first:
                self._listeners += self._given_listeners
                if not self._given_listeners:
                    self._listeners.append(_warn)  # else nobody would hear of it
            self._callbacks = Callbacks(
                self._given,
                rank=session.rank,
                world_size=session.world_size,
                timeout_s=self._timeout_s,
                notify=self,
            )
            self._session, session.persistence.callbacks = session, self._callbacks
            for event in self._early:
                self(event)
            yield self._callbacks

    def expect(self, batch: LoadedBatch) -> None:
        """Take note of the batch whose step comes next."""
        self._ids = batch.plan.ids.tolist()

    def _details(self) -> StepDetails:
        if self._session is None:
            return StepDetails(ids=tuple(self._ids))
        return StepDetails(ids=tuple(self._ids), bad_ids=self._session.bad_ids, noise=self._session.noise)

    def _open(self, folder: Path, session: Session, opened: ExitStack) -> None:
        """Collective. Open what this rank writes; all ranks take over the steps that the run took before."""
        persistence = session.persistence
        if session.first:
            if persistence.keeps and persistence.may_go_on:
                self._keep_ledger(folder, persistence.first_step)
            else:
                refuse_used(folder)
            report = opened.enter_context(Report(folder))  # closed last, since it reads what the others wrote
            self._listeners.append(opened.enter_context(RunFolder(folder)))
        if persistence.first_step:
            told = "\n".join(ledger_line(report) for report in self.history).encode()
            lines = session.told_by_first(told).splitlines()
            self.history = [parse_line(line, f"{folder / LEDGER}") for line in lines]
        gpu_uuid = None
        if session.device.type == "cuda":
            gpu_uuid = str(torch.cuda.get_device_properties(session.device).uuid)
        self._listeners.append(opened.enter_context(RankFile(folder, session.rank, gpu_uuid=gpu_uuid)))
        chosen = trackers(self._track, folder)  # on all ranks, so that a missing package is told by all
        if session.first:
            self._listeners.append(report)
            for tracker in chosen:
                opened.callback(tracker.close)
                self._listeners.append(tracker)

    def _keep_ledger(self, folder: Path, first_step: int) -> None:
        ledger = folder / LEDGER
        if ledger.exists() and not first_step:
            message = f"{folder} holds a run that left no checkpoint: it starts anew."
            self._early.append(Notice(level="warning", message=message))
        self.history += keep_steps(ledger, first_step)


def _warn(event: Event) -> None:
    if isinstance(event, Notice) and event.level == "warning":
        sys.stderr.write(f"samestep: {event.message}\n")
