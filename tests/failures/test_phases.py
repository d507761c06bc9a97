"""A batch that is left without its step, and calls in the middle of one: nothing crosses, nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from failures_inputs import Data, loss
from phases_on_processes import collect, evaluation, loop, loop_on_processes, make_model
from torch import nn

import samestep
from samestep import ConfigError, LossError
from samestep.comm.alone import Alone
from samestep.comm.transport import Transport
from samestep.testing.processes import run_processes
from samestep.testing.threads import run_threads

pytestmark = pytest.mark.timeout(90)

LEAVING = ("all collected", "one collected", "nothing collected", "break")
REFUSED = {"evaluate": r"session\.evaluate", "fingerprint": r"session\.agreed_fingerprint"}


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
@pytest.mark.parametrize("micro_batches", [2, 6])
@pytest.mark.parametrize("what", LEAVING)
def test_a_batch_without_its_step_is_as_if_it_never_was(what: str, micro_batches: int, strategy: str) -> None:
    wanted = loop(Alone(), "break" if what == "break" else "nothing collected", micro_batches)
    for world_size in (1, 2, 3, 5):  # of three ranks with two micro-batches, one has none
        ended = run_threads(
            lambda t: loop(t, what, micro_batches, strategy=strategy), world_size, timeout_s=20
        )
        assert ended == [wanted] * world_size


def test_with_the_sum_of_the_backend() -> None:
    for micro_batches in (2, 6):
        ended = run_threads(
            lambda t, n=micro_batches: loop(t, "all collected", n, reduction="fast"), 3, timeout_s=20
        )
        assert len(set(ended)) == 1


@pytest.mark.parametrize("micro_batches", [2, 6])
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_cross_the_gradients_is_refused(what: str, micro_batches: int) -> None:
    words = rf"{REFUSED[what]} was called while step 1 is being collected.*after session\.step"
    for world_size in (1, 3):
        with pytest.raises(ConfigError, match=words):
            run_threads(lambda t: loop(t, what, micro_batches), world_size, timeout_s=20)


@pytest.mark.parametrize("what", ["all collected", "break", "evaluate"])
@pytest.mark.parametrize("micro_batches", [2, 6])
def test_over_real_links(what: str, micro_batches: int) -> None:
    if what in REFUSED:
        with pytest.raises(ConfigError, match=f"{REFUSED[what]} was called while step 1 is being collected"):
            run_processes(loop_on_processes, 3, what, micro_batches, timeout_s=60)
        return
    wanted = loop(Alone(), what, micro_batches)
    assert run_processes(loop_on_processes, 3, what, micro_batches, timeout_s=60) == [wanted] * 3


def stepped(
    transport: Transport,
    body: Callable[[samestep.Session, Any], object],
    *,
    micro_batches: int = 6,
    **settings: Any,
) -> str:
    """Take four steps of a loop with this body."""
    with transport.turn():
        torch.manual_seed(0)
        model = make_model()
    batching = samestep.Batching(global_batch=2 * micro_batches, micro_batch=2)
    with samestep.Session(transport=transport, digest_every=1, **settings) as session:
        session.setup(model, lambda params: torch.optim.AdamW(params, lr=1e-2))
        for batch in session.batches(Data(), batching, steps=4):
            body(session, batch)
        return session.agreed_fingerprint()


def plain(session: samestep.Session, batch: Any) -> None:
    collect(session, batch)
    session.step(batch)


def test_after_a_refusal_the_step_goes_on() -> None:
    def body(session: samestep.Session, batch: Any) -> None:
        collect(session, batch)
        with pytest.raises(ConfigError, match="is being collected"):
            session.evaluate(evaluation())
        session.step(batch)

    wanted = stepped(Alone(), plain)
    for world_size in (1, 3, 5):
        assert run_threads(lambda t: stepped(t, body), world_size, timeout_s=20) == [wanted] * world_size


def test_before_the_first_micro_batch_all_is_allowed() -> None:
    def body(session: samestep.Session, batch: Any) -> None:
        session.evaluate(evaluation())
        session.agreed_fingerprint()
        plain(session, batch)

    for micro_batches in (2, 6):
        wanted = stepped(Alone(), plain, micro_batches=micro_batches)
        for world_size in (1, 3, 5):
            ended = run_threads(
                lambda t, n=micro_batches: stepped(t, body, micro_batches=n), world_size, timeout_s=20
            )
            assert ended == [wanted] * world_size


def step_inside(session: samestep.Session, batch: Any) -> None:
    for micro in batch:
        with micro.collect() as record:
            record(loss(session.model, micro.data))
            session.step(batch)


def evaluate_inside(session: samestep.Session, batch: Any) -> None:
    for micro in batch:
        with micro.collect():
            session.evaluate(evaluation())


def nested(session: samestep.Session, batch: Any) -> None:
    for micro in batch:
        with micro.collect(), micro.collect():
            pass


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (step_inside, r"session\.step was called inside the block of a micro-batch of step 0"),
        (evaluate_inside, r"session\.evaluate was called while step 0 is being collected"),
        (nested, r"micro-batch \d of step 0 was begun inside the block of another"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_calls_inside_a_micro_batch_are_refused(
    body: Callable[[samestep.Session, Any], object], words: str, world_size: int
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_threads(lambda t: stepped(t, body), world_size, timeout_s=20)


def test_a_batch_with_a_failed_micro_batch_can_only_be_dropped() -> None:
    def body(session: samestep.Session, batch: Any) -> None:
        if batch.step != 1:
            return plain(session, batch)
        micros = iter(batch)
        micro = next(micros)
        with pytest.raises(KeyError), micro.collect() as record:
            record(loss(session.model, micro.data))
            raise KeyError
        for micro in micros:
            with pytest.raises(LossError, match="failed after its loss was recorded"), micro.collect():
                pass
        with pytest.raises(LossError, match=r"the sums of this step are void\. Take the next batch"):
            session.step(batch)
        with pytest.raises(ConfigError, match="is being collected"):
            session.agreed_fingerprint()
        return None

    def without(session: samestep.Session, batch: Any) -> None:
        if batch.step != 1:
            plain(session, batch)

    wanted = stepped(Alone(), without)
    for world_size in (1, 2, 3, 5):
        assert run_threads(lambda t: stepped(t, body), world_size, timeout_s=20) == [wanted] * world_size


def test_a_step_that_came_too_early_can_be_made_good() -> None:
    def body(session: samestep.Session, batch: Any) -> None:
        with pytest.raises(LossError, match=r"of this rank\. Collect every micro-batch"):
            session.step(batch)
        plain(session, batch)

    wanted = stepped(Alone(), plain)
    for world_size in (1, 3, 5):
        assert run_threads(lambda t: stepped(t, body), world_size, timeout_s=20) == [wanted] * world_size


def test_a_set_up_that_fails_leaves_nothing_on_the_model() -> None:
    def work(transport: Transport) -> None:
        with transport.turn():
            torch.manual_seed(0)
            model = nn.Linear(4, 1)
        addresses = [p.data_ptr() for p in model.parameters()]
        with samestep.Session(
            transport=transport, precision=samestep.Precision(parameters="bf16")
        ) as session:
            with pytest.raises(ConfigError, match=r"schedule\(0\) returned 'quick'"):
                session.setup(model, lambda params: torch.optim.SGD(params, lr=0.1), lambda update: "quick")
            assert [p.data_ptr() for p in model.parameters()] == addresses
            assert all(p.dtype == torch.float32 for p in model.parameters())
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
            session.setup(model, lambda params: torch.optim.SGD(params, lr=0.1))
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())

    run_threads(work, 3, timeout_s=20)
