"""Quarantine and growing batches in training: the same samples on any number of ranks, stopped or not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from walked_runs import Loss, Points, ledger, point, train

import samestep
from samestep.data.loader import Loader
from samestep.errors import DataError
from samestep.events import Notice, Quarantined, RunStarted
from samestep.precision.policy import Precision

GROWING = samestep.Batching(global_batch=6, micro_batch=2, growth={3: 10, 6: 4})
ASKS = {1: (5, 60, 7), 4: (0, 9, 31), 5: (9,)}
SKIPS = Precision(nonfinite="skip")


class Overflow(Loss):
    """Not finite in the steps that hold a sample of two."""

    def __init__(self, bad: tuple[int, ...]) -> None:
        self._bad = torch.stack([point(i) for i in bad])

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> samestep.Weighted:
        values = model(batch).square().sum(1)
        near = torch.cdist(batch, self._bad).min(dim=1).values < 0.2
        return samestep.weighted(torch.where(near, values * math.inf, values))


@pytest.mark.parametrize("last", ["keep", "wrap", "drop"])
def test_the_same_steps_on_any_number_of_ranks(last):
    batching = GROWING.model_copy(update={"last": last})
    one = train(Points(), batching, epochs=2, asks=ASKS)
    for ranks in (2, 3):
        other = train(Points(), batching, epochs=2, asks=ASKS, ranks=ranks)
        assert ledger(other) == ledger(one)
        assert other.fingerprint == one.fingerprint


@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_and_gone_on_with_at_any_step(tmp_path, workers):
    whole = train(Points(), GROWING, steps=14, asks=ASKS)
    after = 0
    for ranks, steps in [(2, 3), (3, 5), (1, 6), (2, 14)]:  # step 1's wish is stored before it is agreed
        parts = train(
            Points(),
            GROWING,
            steps=steps,
            asks=ASKS,
            ranks=ranks,
            folder=tmp_path,
            every=1,
            loader_workers=workers,
        )
        assert ledger(parts) == ledger(whole)[after:steps]
        after = steps
    assert parts.fingerprint == whole.fingerprint


def test_a_wish_that_is_not_yet_agreed_goes_along_with_a_checkpoint(tmp_path):
    whole = train(Points(), GROWING, steps=6, asks=ASKS)
    train(Points(), GROWING, steps=2, asks=ASKS, folder=tmp_path, ranks=2)
    seen = []
    rest = train(Points(), GROWING, steps=6, asks={4: ASKS[4]}, folder=tmp_path, ranks=3, seen=seen)
    assert ledger(rest) == ledger(whole)[2:]
    told = [event for event in seen if isinstance(event, Quarantined)]
    assert [(event.step, event.ids, event.reason) for event in told] == [
        (3, (5, 7, 60), "Quarantine: a test"),
        (6, (0, 9, 31), "Quarantine: a test"),
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrong_guess_of_the_loader_moves_no_bit(workers):
    bad = (3, 17, 40)  # their steps are skipped, so the sizes come later than foreseen
    runs = [
        train(
            Points(),
            GROWING,
            steps=11,
            asks=ASKS,
            loss=Overflow(bad),
            precision=SKIPS,
            ranks=ranks,
            loader_workers=workers,
        )
        for ranks in (1, 2)
    ]
    assert ledger(runs[0]) == ledger(runs[1])
    assert sum(not report.applied for report in runs[0].history) >= 1
    sizes = GROWING.sizes
    update = 0
    for report in runs[0].history:
        assert report.samples in (sizes(update), 61 % 10, 61 % 4) or report.samples < sizes(update)
        update = report.update
    assert runs[0].fingerprint == runs[1].fingerprint


def test_what_workers_made_on_a_wrong_guess_is_not_used(monkeypatch):
    bad = (3, 17, 40)
    loads: list[object] = []
    load = Loader.load
    monkeypatch.setattr(Loader, "load", lambda self, told: (loads.append(told), load(self, told))[1])
    alone, ahead = (
        train(
            Points(),
            GROWING,
            steps=11,
            asks=ASKS,
            loss=Overflow(bad),
            precision=SKIPS,
            loader_workers=workers,
        )
        for workers in (0, 2)
    )
    assert len(loads) >= 2 * 3  # each run began anew, for a size and for two quarantines at least
    assert ledger(alone) == ledger(ahead)
    assert alone.fingerprint == ahead.fingerprint


def test_quarantine_is_told_once_and_the_length_is_left_open():
    seen = []
    train(Points(), samestep.Batching(global_batch=6), epochs=2, asks=ASKS, seen=seen)
    told = [event for event in seen if isinstance(event, Quarantined)]
    assert [event.ids for event in told] == [(5, 7, 60), (0, 9, 31)]
    assert [event.steps for event in seen if isinstance(event, RunStarted)] == [22]
    seen.clear()
    train(Points(), GROWING, epochs=1, seen=seen)
    assert [event.steps for event in seen if isinstance(event, RunStarted)] == [None]


def test_nothing_left_is_an_error_on_every_rank():
    batching = samestep.Batching(global_batch=4, micro_batch=2)
    with pytest.raises(DataError, match="6 of 6 samples are in quarantine"):
        train(Points(6), batching, steps=9, ranks=2, asks={1: range(6)})


def test_changed_samples_are_told_when_a_run_goes_on(tmp_path):
    batching = samestep.Batching(global_batch=6)
    for first, expected in [(0, 0), (0, 0), (1, 1)]:
        seen = []
        train(Points(first=first), batching, steps=3 + first, folder=tmp_path, seen=seen, ranks=2)
        told = [e.message for e in seen if isinstance(e, Notice) and "the data set has changed" in e.message]
        assert len(told) == expected
    assert "sample 0 does not hold what it held (4 of 4 samples" in told[0]
