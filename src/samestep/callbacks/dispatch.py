"""Callbacks of a run: told of every event in turn, watched while they run, their requests collected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from torch import nn
from torch.optim import Optimizer

from samestep.callbacks.callback import Callback, RunControl, RunFacts
from samestep.callbacks.limit import time_limit
from samestep.callbacks.unchanged import Look, Unchanged
from samestep.config.arguments import require_callable
from samestep.errors import CallbackError, ConfigError
from samestep.events import CheckpointSaved, Evaluated, Event, Notice, RunEnded, RunStarted, StepReport
from samestep.loop.noise import StepDetails
from samestep.loop.requests import Requests, merge_requests

Listening: TypeAlias = Callable[[Event], None]
CallbackLike: TypeAlias = Callback | Listening

_SHARE: Final = 0.5  # of the limit on waiting for a rank: the blocked one must end before the others do
_USE = "each is a samestep.Callback, or a function that is given every event, on every rank"


@final
@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    told: CallbackLike
    control: RunControl
    everywhere: bool


@final
class Callbacks:
    """Dispatches events to the callbacks that run on this rank, in the order of the list.

    Functions are called with every event on every rank; a `Callback` where it says. Raises CallbackError
    with the callback's name, the step and the rank where one raises, where one takes longer than half of
    `timeout_s` (where that can be interrupted: see `limit`), or where one that runs on the first rank only
    changes the model or the optimizer. A change that is made on every rank becomes a warning, once.
    """

    def __init__(
        self,
        callbacks: Sequence[CallbackLike],
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        notify: Callable[[Notice], None],
    ) -> None:
        require_callback_list(callbacks)
        self._facts = RunFacts(rank=rank, world_size=world_size)
        self._limit_s = timeout_s * _SHARE
        self._notify = notify
        self._unchanged: Unchanged | None = None
        self._warned: set[str] = set()
        self._members = list(_members(callbacks, self._facts))
        self._here = [member for member in self._members if member.everywhere or rank == 0]

    @property
    def needs_noise(self) -> bool:
        """Whether a callback asks for the noise of the gradient; alike on all ranks."""
        return any(isinstance(m.told, Callback) and m.told.needs_noise for m in self._members)

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a callback asks to skip steps that are not finite, where the user left that open."""
        return any(isinstance(m.told, Callback) and m.told.skips_nonfinite for m in self._members)

    @property
    def asks(self) -> bool:
        """Whether a callback of this rank has asked for something that was not taken yet."""
        return any(member.control.asks for member in self._here)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Let callbacks see the model, and watch it and its optimizer while they run."""
        self._facts.model = model
        self._unchanged = Unchanged(model, optimizer)

    def dispatch(self, event: Event, details: StepDetails | None = None) -> None:
        """Tell the callbacks of an event; `details` come with the report of a step."""
        if isinstance(event, StepReport):
            self._facts.step, self._facts.update = event.step, event.update
            self._facts.details = details or StepDetails()
        elif isinstance(event, Evaluated):
            self._facts.metrics = dict(event.metrics)
        before: Look | None = None
        for member in self._here:
            told = _deed(member, event)
            if told is None:
                continue
            if before is None and self._unchanged is not None:
                before = self._unchanged.look()
            with self._guarded(member):
                told()
            before = self._compared(member, before)
            for note in member.control.notes():
                self._notify(Notice(level="info", message=note))
                before = None  # who hears of it may change something itself

    def take(self) -> Requests:
        """Return what the callbacks of this rank ask for, and forget it."""
        return merge_requests([member.control.take() for member in self._here])

    def state(self) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint is to keep, by the callbacks' names; of the first rank, which has all."""
        found: dict[str, dict[str, Any]] = {}
        for member in self._here:
            if isinstance(member.told, Callback):
                with self._guarded(member):
                    state = dict(member.told.state())
                if state:
                    found[member.name] = state
        return found

    def load_state(self, states: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Give callbacks the state they had; return the names of states that nobody took up.

        A callback without a stored state begins anew.
        """
        for member in self._here:
            if isinstance(member.told, Callback) and member.name in states:
                with self._guarded(member):
                    member.told.load_state(states[member.name])
        known = {member.name for member in self._members}
        return [name for name in states if name not in known]

    def _compared(self, member: _Member, before: Look | None) -> Look | None:
        """Report what a callback has changed, and return how everything is now."""
        if self._unchanged is None or before is None:
            return None
        after = self._unchanged.look()
        if changed := self._unchanged.changed(before, after):
            self._report(member, changed)
        return after

    @contextmanager
    def _guarded(self, member: _Member) -> Iterator[None]:
        limit_s = self._limit_s

        def blocked() -> CallbackError:
            return CallbackError(
                f"{self._where(member)} did not return within {limit_s:g} s, half of timeout_s. All ranks "
                "wait for it. Do less in it, do it in a thread of its own, or raise timeout_s."
            )

        try:
            with time_limit(limit_s, blocked):
                yield
        except CallbackError:
            raise
        except Exception as error:
            raise CallbackError(f"{self._where(member)} failed: {type(error).__name__}: {error}") from error

    def _report(self, member: _Member, changed: Sequence[str]) -> None:
        shown = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
        if not member.everywhere and self._facts.world_size > 1:
            raise CallbackError(
                f"{self._where(member)} changed {shown}. It runs on the first rank only, so the other ranks "
                "do not have that change. A callback may observe and ask; what must change the model has to "
                'run on every rank: ranks = "all".'
            )
        if member.name not in self._warned:
            self._warned.add(member.name)
            message = f"{self._where(member)} changed {shown}. The run cannot be repeated without it."
            self._notify(Notice(level="warning", message=message))

    def _where(self, member: _Member) -> str:
        step = "before the first step" if self._facts.step is None else f"at step {self._facts.step}"
        return f"callback {member.name} on rank {self._facts.rank}, {step},"


def require_callback_list(callbacks: object) -> None:
    """Raise ConfigError unless `callbacks` is a list of callbacks and functions."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise ConfigError(f"callbacks is a {type(callbacks).__name__}. Give a list of functions: {_USE}.")
    for position, callback in enumerate(callbacks):
        if isinstance(callback, type):
            raise ConfigError(f"callbacks[{position}] is a class. Give {callback.__name__}(...).")
        if isinstance(callback, Callback):
            if callback.ranks not in ("all", "first"):
                raise ConfigError(
                    f"callbacks[{position}], a {type(callback).__name__}, has ranks = {callback.ranks!r}. "
                    "Use 'all' or 'first'."
                )
        else:
            require_callable(f"callbacks[{position}]", callback, use=_USE)


def _members(callbacks: Sequence[CallbackLike], facts: RunFacts) -> Iterator[_Member]:
    count: Counter[str] = Counter()
    for callback in callbacks:
        name = _name(callback)
        count[name] += 1
        if count[name] > 1:
            name = f"{name} ({count[name]})"
        everywhere = not isinstance(callback, Callback) or callback.ranks == "all"
        yield _Member(name, callback, RunControl(name, facts), everywhere)


def _name(callback: CallbackLike) -> str:
    if isinstance(callback, Callback):
        return type(callback).__name__
    named: object = getattr(callback, "__qualname__", None)
    return str(named).replace(".<locals>", "") if named else type(callback).__name__


def _deed(member: _Member, event: Event) -> Callable[[], None] | None:
    """Return what to call for an event, None where the callback has no method for it."""
    told, run = member.told, member.control
    if not isinstance(told, Callback):
        return lambda: told(event)
    match event:
        case RunStarted():
            return lambda: told.on_start(run)
        case StepReport():
            return lambda: told.on_step(event, run)
        case Evaluated():
            return lambda: told.on_evaluation(event, run)
        case CheckpointSaved():
            return lambda: told.on_checkpoint(event, run)
        case RunEnded():
            return lambda: told.on_end(run)
    return None
