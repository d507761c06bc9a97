"""What outlives a step: where a run goes on, when its state is stored, and what is asked of it.

Note [between two steps]: a step ends with its update. What the user's loop does afterwards (an evaluation,
a change of the model) belongs to it, so requests are followed, and checkpoints written, when the next batch
is asked for; all ranks come there after the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self, final

import torch

from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.reader import StoredCheckpoint
from samestep.checkpoint.shelf import Shelf
from samestep.checkpoint.snapshot import Part
from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.errors import CheckpointError, InternalError
from samestep.events import Event, Notice, Quarantined, Resumed, Stopping
from samestep.loop.engine import Engine
from samestep.loop.evidence import agree_evidence, notice_of_change
from samestep.loop.keeper import Keeper
from samestep.loop.requests import Requests, agree_requests, merge_requests
from samestep.loop.resume import broken_key, choose, require_same_data, require_shared, require_unused
from samestep.loop.run_settings import RunSettings
from samestep.loop.state import Position, RunState
from samestep.loop.walk import Walk
from samestep.processes.child import STOPPED
from samestep.processes.stop_signals import Stopped, StopSignals


class Companions(Protocol):
    """What goes along with a run outside the engine: the callbacks, their wishes and their state."""

    def take(self) -> Requests:
        """Return what is asked for on this rank, and forget it."""

    def state(self) -> Mapping[str, Any]:
        """Return the state as JSON."""

    def load_state(self, states: Mapping[str, Any]) -> Sequence[str]:
        """Go on from what `state` returned; return the names of states that nobody took up."""


@final
class Persistence:
    """The checkpoints of one session, and the requests that end or change the run."""

    def __init__(
        self,
        settings: RunSettings,
        transport: Transport,
        *,
        device: torch.device,
        notify: Callable[[Event], None],
    ) -> None:
        self._settings = settings
        self._transport = transport
        self._device = device
        self._notify = notify
        self._signals = StopSignals()
        self._keeper: Keeper | None = None
        self._stored: StoredCheckpoint | None = None
        self._state: RunState | None = None
        self._key: dict[str, str | int] = {}
        self._own = Requests()  # of this rank, not yet told
        self._agreed = Requests()  # of all ranks, not yet followed
        self._walks: list[Walk] = []
        self._walks_before: list[Mapping[str, Any]] = []  # as the checkpoint has them
        self._ended: str | None = None  # why no more steps are taken
        self._is_concluded = False
        self.metrics: dict[str, float] = {}  # of the last evaluation
        self.callbacks: Companions | None = None

    def __enter__(self) -> Self:
        """Collective. Find the checkpoint to go on from; listen to signals where states can be stored."""
        policy = self._settings.checkpoint
        shelf = Shelf(policy.folder.absolute()) if policy and policy.folder else None
        if policy is not None and shelf is not None:
            self._open(shelf)
            self._keeper = Keeper(policy, shelf, self._transport, device=self._device, notify=self._notify)
        self._stored = choose(
            shelf, self._settings.resume, self._transport, device=self._device, notify=self._notify
        )
        if self._stored is not None:
            state = self._stored.manifest.state
            self._walks_before = state["walks"]
            self.metrics = dict(self._stored.manifest.metrics)
            if self._keeper and self._stored.folder.parent == self._keeper.shelf.folder:
                self._keeper.last_step = self._stored.manifest.step
        if self._keeper is not None:
            self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, error, trace)
        if self._keeper is not None:
            self._keeper.abandon()
        if self._stored is not None:
            self._stored.close()

    @property
    def first_step(self) -> int:
        """The step at which this session begins: 0, or where the run that it goes on from stood."""
        return self._stored.manifest.step if self._stored else 0

    @property
    def keeps(self) -> bool:
        """Whether states are stored."""
        return self._keeper is not None

    @property
    def may_go_on(self) -> bool:
        """Whether a run that is there may be gone on with."""
        return str(self._settings.resume) != "never"

    def take_up(self, engine: Engine) -> None:
        """Collective. Put the stored state into the engine, where there is one."""
        self._state = RunState(engine, self._transport)
        if self._stored is not None:
            for sentence in self._state.restore(self._stored):
                self._notify(Notice(level="warning", message=f"resume: {sentence}"))
            if self.callbacks is not None:
                left = self.callbacks.load_state(self._stored.manifest.state["callbacks"])
                if left:
                    message = f"resume: there is no callback any more for the state of {', '.join(left)}."
                    self._notify(Notice(level="warning", message=message))

    def use_key(self, key: Mapping[str, str | int]) -> None:
        """Take note of the numerics key under which the next steps are taken."""
        self._key = dict(key)

    def announce(self) -> None:
        """Report that the run goes on, and whether its bits may differ from here."""
        if self._stored is None:
            return
        manifest = self._stored.manifest
        broken = broken_key(self._stored, self._key)
        event = Resumed(
            step=manifest.step,
            update=manifest.update,
            folder=str(self._stored.folder),
            world_size_before=manifest.world_size,
            broken_key=broken,
        )
        self._notify(event)
        if broken:
            told = "; ".join(f"{name}: {change}" for name, change in broken.items())
            message = f"resume under another numerics key, so bits may differ from here on: {told}."
            self._notify(Notice(level="warning", message=message))

    def next_walk(self, walk: Walk, *, in_worker: bool) -> Walk:
        """Collective. Return a walk that begins where the stored one of the same call of `batches` stood.

        With `in_worker` samples are looked at in a loader worker only.
        """
        number = len(self._walks)
        if (self._keeper or self._stored) and not walk.evidence:
            walk.evidence = agree_evidence(walk, self._transport, device=self._device, in_worker=in_worker)
        if self._stored is not None and number < len(self._walks_before):
            before = self._walks_before[number]
            require_same_data(before, walk.state(), self._stored.folder)
            walk = walk.resumed(before, is_past=number < len(self._walks_before) - 1)
            if notice := notice_of_change(before["evidence"], walk.evidence):
                self._notify(notice)
            if before["asked"] and self._transport.rank == 0:
                asked = before["asked"]
                self.ask(Requests(skip=tuple(asked["skip"]), skip_reason=asked["skip_reason"]))
        self._walks.append(walk)
        return walk

    def ask(self, requests: Requests) -> None:
        """Note what this rank asks for."""
        self._own = merge_requests([self._own, requests])

    def marks(self) -> list[int]:
        """Return this rank's words for the ballot of a step."""
        return [int(self._asks()), self._keeper.mark() if self._keeper else 0]

    def hear(self, marks: Sequence[Sequence[int]]) -> None:
        """Collective. Take in the marks of all ranks."""
        if any(asked for asked, _ in marks):
            self._agree([asked for asked, _ in marks])
        if self._keeper is not None:
            self._keeper.hear([mark for _, mark in marks])

    def decide(self) -> Requests:
        """Collective. Agree at once on what is asked for, and return all that is still to be followed."""
        asked = self._transport.ballot(torch.tensor([int(self._asks())], dtype=torch.int64))
        self._agree(asked[:, 0].tolist())
        return self._agreed

    def take_evaluation(self) -> bool:
        """Say whether an evaluation was asked for, once."""
        asked, self._agreed = self._agreed.evaluate, replace(self._agreed, evaluate=False)
        return asked

    @property
    def goes_on(self) -> bool:
        """Whether another step is to be taken, where there is one."""
        return self._ended is None

    @property
    def is_over(self) -> bool:
        """Whether the run was ended early, and a further call of `batches` is for a later one to walk."""
        return self._ended is not None and len(self._walks) >= len(self._walks_before)

    def before_steps(self) -> None:
        """Collective. Follow a wish to stop before the first step: a resumed run may be over."""
        if self.callbacks is not None:
            stop = self.decide().stop
            self._agreed = replace(self._agreed, stop=None)
            self._end(stop, self.first_step)

    def between_steps(self, walk: Walk) -> None:
        """Collective. Follow what was asked for, and store the state where that is due.

        Raises SystemExit with code 3 after a signal, once the state is stored.
        """
        asked, self._agreed = self._agreed, Requests()
        step = walk.next_step
        self._pass_over(asked, walk)
        if asked.leave is not None:
            self._leave(asked.leave, step)
        self._end(asked.stop, step)
        if self._keeper is not None:
            policy = self._keeper.policy
            reason = asked.save or (f"every {policy.every} steps" if policy.due(step) else None)
            if reason is not None:
                self._save(step, reason)

    def _pass_over(self, asked: Requests, walk: Walk) -> None:
        """Leave out samples that somebody asked to be left out, on all ranks alike."""
        if new := walk.pass_over(asked.skip):
            reason = asked.skip_reason or "somebody asked for it"
            self._notify(Quarantined(step=walk.next_step, ids=new, reason=reason))

    def conclude(self, walk: Walk | None) -> None:
        """Collective. Store the last state, and wait for what is being written; the second time nothing."""
        if self._is_concluded or walk is None:
            return
        self._is_concluded = True
        if self._keeper is None:
            return
        step = walk.next_step
        if self._keeper.policy.at_end and step > self.first_step:
            self._save(step, "the end of the run")
        self._keeper.drain()
        self._require_stored()

    def _open(self, shelf: Shelf) -> None:
        """Collective. Let the first rank make the folder; its error is raised on all ranks."""
        problem = ""
        if self._transport.rank == 0:
            try:
                shelf.open()
                if not self.may_go_on:
                    require_unused(shelf)
            except CheckpointError as error:
                problem = str(error)
        told = gather_bytes(self._transport, problem.encode(), device=self._device)[0]
        if told:
            raise CheckpointError(told.decode())
        require_shared(shelf.folder, self._transport)

    def _asks(self) -> bool:
        """Collect what is asked for on this rank, and say whether that is anything."""
        wishes = [self._own]
        if self.callbacks is not None:
            wishes.append(self.callbacks.take())
        if self._signals.requested is not None:
            wishes.append(Requests(leave=self._signals.requested))
        self._own = merge_requests(wishes)
        return bool(self._own)

    def _agree(self, asked: Sequence[int]) -> None:
        own, self._own = self._own, Requests()
        agreed = agree_requests(own, asked, self._transport, device=self._device)
        self._agreed = merge_requests([self._agreed, agreed])

    def _end(self, reason: str | None, step: int) -> None:
        if reason is not None:
            self._ended = reason
            self._notify(Stopping(step=step, reason=reason))

    def _leave(self, signal_name: str, step: int) -> None:
        self._notify(Stopping(step=step, reason=signal_name))
        self._save(step, signal_name)
        if self._keeper is not None:
            self._keeper.drain()
            self._require_stored()
        raise Stopped(STOPPED)

    def _require_stored(self) -> None:
        if self._keeper is None or self._keeper.last_problem is None:
            return
        older = self._keeper.last_step
        rest = (
            f"The newest whole one is that of step {older}."
            if older is not None
            else "There is no older one."
        )
        raise CheckpointError(
            f"the last checkpoint, of step {self._keeper.failed_step}, could not be written: "
            f"{self._keeper.last_problem}. {rest} Make room, and run the same command again."
        )

    def _note_wishes(self) -> None:
        """Collective. Let the walk tell what was asked of it after this step, and is agreed in the next.

        Else the order of the samples would depend on when checkpoints are written.
        """
        asks = torch.tensor([int(self._asks())], dtype=torch.int64)
        asked = self._transport.ballot(asks)[:, 0].tolist()
        wishes = agree_requests(self._own, asked, self._transport, device=self._device)
        if self._walks:
            told = {"skip": list(wishes.skip), "skip_reason": wishes.skip_reason}
            self._walks[-1].asked = told if wishes.skip else {}

    def _save(self, step: int, reason: str) -> None:
        if self._keeper is None or self._state is None:
            raise InternalError("a checkpoint is due, but nothing was set up that could be stored.")
        state = self._state
        self._note_wishes()
        position = Position(
            step=step,
            walks=[walk.state() for walk in self._walks],
            callbacks=self.callbacks.state() if self.callbacks else {},
            metrics=self.metrics,
        )

        def collect() -> tuple[list[Part], dict[str, Any], Manifest]:
            return state.gather(position, self._key)

        self._keeper.save(step, collect, reason)
