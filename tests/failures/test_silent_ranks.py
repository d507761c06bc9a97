"""A rank that dies, or stops answering, in the middle of a step: named, and nobody waits for ever."""

from __future__ import annotations

import time

import pytest
from failures_on_processes import train_and

from samestep.errors import PeerLost, TimedOut
from samestep.testing.processes import run_processes

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(("what", "words"), [("exit", "exit code 7"), ("kill", "SIGKILL")])
def test_a_rank_that_dies_without_a_word_is_named(what: str, words: str) -> None:
    with pytest.raises(PeerLost, match=rf"rank 1 of 3 on host \S+ failed: .*{words}"):
        run_processes(train_and, 3, what, 60.0)


def test_a_rank_that_stops_answering_is_named_within_the_limit() -> None:
    started = time.monotonic()
    with pytest.raises(TimedOut, match=r"waited 3 s for rank 1: no answer\. It may hang, be stopped"):
        run_processes(train_and, 3, "stop", 3.0, timeout_s=60)
    assert time.monotonic() - started < 60


def test_a_rank_that_stays_is_the_same_as_ever() -> None:
    assert len(set(run_processes(train_and, 3, "nothing", 60.0))) == 1
