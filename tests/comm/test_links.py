"""What is measured between ranks: texts come whole, links are told by rank 0, clocks by who is ahead."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from samestep.comm import links
from samestep.comm.links import gather_texts, measure, measure_pair
from samestep.comm.transport import Transport
from samestep.testing.threads import run_threads
from samestep.topology.network import loopback_interface

CPU = torch.device("cpu")


def test_texts_of_unlike_length_reach_every_rank() -> None:
    texts = ["ä", "b" * 5000, "c"]
    found = run_threads(lambda transport: gather_texts(transport, texts[transport.rank], CPU), 3)
    assert found == [texts] * 3


def test_each_link_is_measured_from_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BULK", 4096)

    def part(transport: Transport) -> links.Links:
        return measure(transport, CPU)

    first, *others = run_threads(part, 4)
    assert [link.rank for link in first.links] == [1, 2, 3]
    assert all(link.latency_us > 0 and link.megabytes_per_s > 0 for link in first.links)
    # Ranks of one process have one clock: what is off is the time of a message.
    assert all(abs(link.clock_ahead_s) < 1.0 for link in first.links)
    assert all(found.links == [] and found.ballot_us > 0 for found in others)


def test_a_clock_that_is_ahead_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BULK", 64)
    true_time = time.time_ns
    of_this_thread = threading.local()

    def part(transport: Transport) -> links.Links:
        of_this_thread.ahead_ns = 5 * 10**9 * transport.rank
        return measure(transport, CPU)

    ahead = lambda: true_time() + getattr(of_this_thread, "ahead_ns", 0)  # noqa: E731
    monkeypatch.setattr("time.time_ns", ahead)
    first, _ = run_threads(part, 2)
    assert 4.0 < first.links[0].clock_ahead_s < 6.0


def test_two_ranks_of_this_machine_stand_in_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", str(loopback_interface()))
    found = measure_pair()
    assert [link.rank for link in found.links] == [1]
    assert found.plain()["links"][0]["megabytes_per_s"] > 0
