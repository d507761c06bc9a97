"""Callbacks hear what happened, where they say, in their order; they ask, and change nothing silently."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import nn

from samestep.callbacks.callback import Callback, RunControl
from samestep.callbacks.dispatch import Callbacks
from samestep.callbacks.limit import time_limit
from samestep.errors import CallbackError, ConfigError
from samestep.events import CheckpointSaved, Evaluated, Event, Notice, RunEnded, RunStarted, StepReport
from samestep.loop.noise import StepDetails
from samestep.loop.requests import Requests


def report(step: int, **changes: Any) -> StepReport:
    told: dict[str, Any] = {
        "step": step,
        "update": step + 1,
        "epoch": 0,
        "cursor": 8 * step + 8,
        "samples": 8,
        "sample_hash": "0" * 16,
        "micro_batches": 4,
        "weight": 8.0,
        "loss": 1.0,
        "grad_norm": 1.0,
        "learning_rate": 0.1,
        "applied": True,
    }
    return StepReport(**{**told, **changes})


EVENTS: list[Event] = [
    RunStarted(world_size=1, steps=1, facts={}),
    report(0),
    Evaluated(step=0, metrics={"loss": 0.5}),
    CheckpointSaved(step=1, folder="", num_bytes=0, stall_seconds=0.0, write_seconds=0.0, reason=""),
    Notice(level="info", message="hello"),
    RunEnded(step=1, update=1, fingerprint=""),
]


def callbacks_of(
    *given: Any, rank: int = 0, world_size: int = 1, timeout_s: float = 300.0
) -> tuple[Callbacks, list[Notice]]:
    notices: list[Notice] = []
    made = Callbacks(given, rank=rank, world_size=world_size, timeout_s=timeout_s, notify=notices.append)
    return made, notices


class Recorder(Callback):
    """Writes down what it hears."""

    def __init__(self, told: list[str], name: str = "") -> None:
        self.told = told
        self.name = name

    def on_start(self, run: RunControl) -> None:
        self.told.append(f"{self.name}start {run.step}")

    def on_step(self, report: StepReport, run: RunControl) -> None:
        self.told.append(
            f"{self.name}step {report.step} {run.step} {run.update} {run.ids} {dict(run.metrics)}"
        )

    def on_evaluation(self, evaluated: Evaluated, run: RunControl) -> None:
        self.told.append(f"{self.name}evaluation {dict(run.metrics)}")

    def on_checkpoint(self, saved: CheckpointSaved, run: RunControl) -> None:
        self.told.append(f"{self.name}checkpoint {saved.step}")

    def on_end(self, run: RunControl) -> None:
        self.told.append(f"{self.name}end {run.rank} of {run.world_size} {run.first}")


class Everywhere(Recorder):
    """The same, on every rank."""

    ranks: ClassVar[Literal["all", "first"]] = "all"


def test_each_event_reaches_the_method_of_its_kind_in_the_order_of_the_list() -> None:
    told: list[str] = []
    callbacks, _ = callbacks_of(Recorder(told), lambda event: told.append(type(event).__name__))
    for event in EVENTS:
        callbacks.dispatch(event, StepDetails(ids=(3, 1)) if isinstance(event, StepReport) else None)
    assert told == [
        "start None",
        "RunStarted",
        "step 0 0 1 (3, 1) {}",
        "StepReport",
        "evaluation {'loss': 0.5}",
        "Evaluated",
        "checkpoint 1",
        "CheckpointSaved",
        "Notice",
        "end 0 of 1 True",
        "RunEnded",
    ]


def test_a_callback_runs_where_it_says_and_a_function_everywhere() -> None:
    for rank in (0, 1):
        told: list[str] = []
        callbacks, _ = callbacks_of(
            Recorder(told, "first "),
            Everywhere(told, "all "),
            lambda event, told=told: told.append("f"),
            rank=rank,
            world_size=2,
        )
        callbacks.dispatch(EVENTS[0])
        assert told == ([] if rank else ["first start None"]) + ["all start None", "f"]


class Asking(Callback):
    """Asks for everything."""

    def on_step(self, report: StepReport, run: RunControl) -> None:
        run.stop("enough")
        run.checkpoint("now")
        run.evaluate()
        run.skip(np.array([7, 3]), "bad")
        run.skip([3, 4], "worse")
        run.skip([], "nothing")
        run.tell("it was asked")


def test_requests_are_collected_with_the_callbacks_name_and_taken_once() -> None:
    callbacks, notices = callbacks_of(Asking(), Asking())
    assert not callbacks.asks
    assert not callbacks.take()
    callbacks.dispatch(report(0))
    assert callbacks.asks
    assert callbacks.take() == Requests(
        stop="Asking: enough; Asking (2): enough",
        save="Asking: now; Asking (2): now",
        evaluate=True,
        skip=(3, 4, 7),
        skip_reason="Asking: bad; Asking: worse; Asking (2): bad; Asking (2): worse",
    )
    assert not callbacks.asks
    assert not callbacks.take()
    assert [notice.message for notice in notices] == ["Asking: it was asked", "Asking (2): it was asked"]


def test_requests_travel_as_bytes() -> None:
    asked = Requests(stop="a", save="b", evaluate=True, skip=(1, 5), skip_reason="c")
    assert Requests.from_bytes(asked.to_bytes()) == asked
    assert asked
    assert not Requests()


class Counting(Callback):
    """Counts steps, and keeps the count."""

    def __init__(self) -> None:
        self.count = 0

    def on_step(self, report: StepReport, run: RunControl) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def test_states_come_back_to_the_callbacks_that_gave_them() -> None:
    before, _ = callbacks_of(Counting(), Recorder([]), Counting())
    before.dispatch(report(0))
    states = before.state()
    assert states == {"Counting": {"count": 1}, "Counting (2)": {"count": 1}}
    one = Counting()
    after, _ = callbacks_of(one)
    assert after.load_state({"Counting": {"count": 5}, "Counting (2)": {"count": 6}}) == ["Counting (2)"]
    assert one.count == 5
    broken, _ = callbacks_of(one)
    with pytest.raises(
        CallbackError, match="callback Counting on rank 0, before the first step, failed: KeyError"
    ):
        broken.load_state({"Counting": {}})


def breaks(event: Event) -> None:
    if isinstance(event, StepReport):
        raise ValueError("the callback broke")


def test_a_callback_that_raises_is_named_with_step_and_rank() -> None:
    callbacks, _ = callbacks_of(breaks, rank=2, world_size=3)
    with pytest.raises(CallbackError) as caught:
        callbacks.dispatch(report(4))
    assert str(caught.value) == "callback breaks on rank 2, at step 4, failed: ValueError: the callback broke"
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_interrupt_passes_through() -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    callbacks, _ = callbacks_of(interrupted)
    with pytest.raises(KeyboardInterrupt):
        callbacks.dispatch(report(0))


@pytest.mark.parametrize("swallows", [False, True])
def test_a_callback_that_blocks_ends_by_itself_with_its_name(swallows: bool) -> None:
    def blocks(event: Event) -> None:
        for _ in range(2 if swallows else 1):
            try:
                threading.Event().wait(60)
            except CallbackError:
                if not swallows:
                    raise

    callbacks, _ = callbacks_of(blocks, timeout_s=0.2)
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    started = time.monotonic()
    if swallows:  # it is rung for again and again
        callbacks.dispatch(report(1))
    else:
        with pytest.raises(
            CallbackError, match=r"test_a_callback_that_blocks.*blocks on rank 0, at step 1, did not"
        ):
            callbacks.dispatch(report(1))
    assert time.monotonic() - started < 10
    assert signal.getsignal(signal.SIGALRM) is handler
    remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    assert interval == timer[1]
    assert remaining <= timer[0]
    assert (remaining > 0) == (timer[0] > 0)


def test_a_timer_of_somebody_else_goes_off_in_its_time() -> None:
    rung: list[int] = []
    before, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        for limit_s in (0.02, 5.0):  # ours is sooner, and later
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with time_limit(limit_s, lambda: RuntimeError("late")):
                pass
            deadline = time.monotonic() + 10
            while not rung and time.monotonic() < deadline:
                signal.sigtimedwait([], 0.01)
            assert rung.pop()
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_in_another_thread_nothing_is_interrupted() -> None:
    handlers: list[Any] = []

    def work() -> None:
        with time_limit(0.001, lambda: RuntimeError("late")):
            handlers.append(signal.getsignal(signal.SIGALRM))

    before = signal.getsignal(signal.SIGALRM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert handlers == [before]


class Net(nn.Module):
    """A parameter, a buffer, a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(2))


def fill(net: Net, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        net.linear.weight.fill_(1.0)


def exchange(net: Net, _: torch.optim.Optimizer) -> None:
    net.linear.bias.data = torch.ones(1)


def move_buffer(net: Net, _: torch.optim.Optimizer) -> None:
    net.mean += 1


def assign_buffer(net: Net, _: torch.optim.Optimizer) -> None:
    net.mean = torch.ones(2)


def to_evaluation(net: Net, _: torch.optim.Optimizer) -> None:
    net.eval()


def set_rate(_: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def freeze(net: Net, _: torch.optim.Optimizer) -> None:
    net.linear.bias.requires_grad_(False)


CHANGES: list[tuple[Any, str]] = [
    (fill, "parameter linear.weight"),
    (exchange, "parameter linear.bias"),
    (move_buffer, "buffer mean"),
    (assign_buffer, "buffer mean"),
    (to_evaluation, "the training modes"),
    (set_rate, "lr of optimizer group 0"),
    (freeze, "parameter linear.bias"),
]


@pytest.mark.parametrize(("change", "what"), CHANGES)
def test_what_a_callback_changes_is_told_on_all_ranks_and_refused_on_one(change: Any, what: str) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    class Changing(Callback):
        def on_step(self, report: StepReport, run: RunControl) -> None:
            change(run.model, optimizer)

    class ChangingEverywhere(Changing):
        ranks: ClassVar[Literal["all", "first"]] = "all"

    callbacks, notices = callbacks_of(ChangingEverywhere(), world_size=2)
    callbacks.attach(net, optimizer)
    callbacks.dispatch(report(3))
    assert [notice.level for notice in notices] == ["warning"]
    assert f"callback ChangingEverywhere on rank 0, at step 3, changed {what}" in notices[0].message
    if change in (fill, move_buffer):  # again, and not told again
        callbacks.dispatch(report(4))
        assert len(notices) == 1

    again = Net()
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    callbacks, notices = callbacks_of(Changing(), world_size=2)
    callbacks.attach(again, optimizer)
    with pytest.raises(CallbackError, match=f'Changing on rank 0, at step 3, changed {what}.*ranks = "all"'):
        callbacks.dispatch(report(3))


def test_looking_at_the_model_is_no_change() -> None:
    net = Net()
    callbacks, notices = callbacks_of(lambda event: print(net.linear(net.mean)), world_size=2)
    callbacks.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    callbacks.dispatch(report(0))
    assert not notices


BAD: list[tuple[Any, str]] = [
    ([3], r"callbacks\[0\] is a int"),
    ([Counting], r"callbacks\[0\] is a class. Give Counting\(\.\.\.\)"),
    ("abc", "callbacks is a str. Give a list"),
    ([type("Some", (Callback,), {"ranks": "second"})()], r"callbacks\[0\], a Some, has ranks = 'second'"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_what_is_no_callback_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Callbacks(given, rank=0, world_size=1, timeout_s=1.0, notify=lambda notice: None)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda run: run.skip([1.5], "x"), "the sample id 1.5"),
        (lambda run: run.skip([-1], "x"), "the sample id -1"),
        (lambda run: run.stop(" "), "the reason is ' '"),
        (lambda run: run.model, "no model yet"),
    ],
)
def test_requests_that_mean_nothing_are_refused(ask: Any, message: str) -> None:
    class Bad(Callback):
        def on_step(self, report: StepReport, run: RunControl) -> None:
            ask(run)

    callbacks, _ = callbacks_of(Bad())
    with pytest.raises(CallbackError, match=message):
        callbacks.dispatch(report(0))
