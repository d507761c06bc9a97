"""Streams and mixtures in training: the same run on any number of ranks, stopped and gone on with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from walked_runs import Points, SizedStream, Stream, ledger, train

import samestep
from samestep.data.mixture import Mixture, StreamMixture
from samestep.data.shuffled import Shuffled
from samestep.errors import CheckpointError, ConfigError, Disagreement
from samestep.events import Notice, RunStarted

IN_ORDER = samestep.Batching(global_batch=10, micro_batch=2, shuffle=False)
GROWING = IN_ORDER.model_copy(update={"growth": {4: 16, 8: 6}, "last": "wrap"})
ASKS = {1: (5, 60), 4: (0, 9)}
STREAMS = {
    "plain": Stream,
    "shuffled": lambda: Shuffled(Stream(), block=16),
    "mixed": lambda: StreamMixture([Stream(17), SizedStream(40, first=100)], [2, 1]),
}


@pytest.mark.parametrize("kind", ["plain", "mixed"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_same_steps_on_any_number_of_ranks(kind, ranks):
    one = train(STREAMS[kind](), GROWING, steps=11, asks=ASKS)
    other = train(STREAMS[kind](), GROWING, steps=11, asks=ASKS, ranks=ranks)
    assert ledger(other) == ledger(one)
    assert other.fingerprint == one.fingerprint


@pytest.mark.parametrize("last", ["keep", "drop", "wrap"])
def test_the_unknown_end_is_found_by_all(last):
    batching = IN_ORDER.model_copy(update={"last": last})
    one = train(Points(), batching, epochs=2)
    for dataset, ranks in [(Stream(), 1), (Stream(), 3), (SizedStream(), 2)]:
        other = train(dataset, batching, epochs=2, ranks=ranks)
        assert [r.sample_hash for r in other.history] == [r.sample_hash for r in one.history]
        assert other.fingerprint == one.fingerprint  # the same samples, so the same draws


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", STREAMS)
def test_stopped_and_gone_on_with_in_the_middle_of_passes(tmp_path, kind, workers):
    whole = train(STREAMS[kind](), GROWING, steps=12, asks=ASKS)
    after = 0
    for ranks, steps in [(2, 2), (3, 7), (1, 8), (2, 12)]:
        parts = train(
            STREAMS[kind](),
            GROWING,
            steps=steps,
            asks=ASKS,
            ranks=ranks,
            folder=tmp_path,
            loader_workers=workers,
        )
        assert ledger(parts) == ledger(whole)[after:steps]
        after = steps
    assert parts.fingerprint == whole.fingerprint


def test_a_mixture_of_data_sets_is_stopped_and_gone_on_with(tmp_path):
    batching = samestep.Batching(global_batch=10, micro_batch=2, growth={5: 14})

    def mixture() -> Mixture:
        return Mixture([Points(11), Points(50, first=100)], [1, 2])

    whole = train(mixture(), batching, steps=12, asks=ASKS)
    for ranks, steps in [(2, 3), (3, 8), (1, 12)]:
        parts = train(mixture(), batching, steps=steps, asks=ASKS, ranks=ranks, folder=tmp_path)
    assert parts.fingerprint == whole.fingerprint


def test_passes_asked_for_one_by_one_are_those_of_one_call():
    def seen(calls: list[int]) -> list[tuple[object, ...]]:
        stream, found = Stream(23), []
        with samestep.Session() as session:
            torch.manual_seed(0)
            model, _ = session.setup(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1))
            for epochs in calls:
                for batch in session.batches(stream, IN_ORDER, epochs=epochs):
                    for micro in batch:
                        with micro.collect() as record:
                            record(samestep.weighted(model(micro.data).square().sum(1)))
                    report = session.step(batch)
                    found.append((report.step, report.epoch, report.cursor, report.loss, batch.is_last))
        return found

    one, several = seen([3]), seen([1, 2])
    assert [row[:4] for row in one] == [row[:4] for row in several]
    assert [row[0] for row in one if row[4]] == [8]
    assert [row[0] for row in several if row[4]] == [2, 8]


def test_ranks_that_read_other_streams_are_told_so():
    with pytest.raises(
        Disagreement, match="step 5: the samples that it gave for this step: 10 on rank 0, but 7 on rank 1"
    ):
        train(lambda rank: Stream(61 - 4 * rank), IN_ORDER, epochs=1, ranks=2)
    with pytest.raises(Disagreement, match="step 0: what the first sample of this step holds"):
        train(lambda rank: Stream(first=rank), IN_ORDER, epochs=1, ranks=3)


class Unsteady:
    """A stream that samples by its own generator, which nobody seeds."""

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator()
        generator.seed()
        while True:
            yield torch.randn(4, generator=generator)


def test_a_stream_of_its_own_draws_is_noticed():
    with pytest.raises(Disagreement, match="draw only from the generators that are seeded for it"):
        train(lambda rank: Unsteady(), IN_ORDER, steps=2, ranks=2)


def test_shuffling_a_stream_is_refused_with_the_way_out():
    with pytest.raises(
        ConfigError, match=r"Set shuffle to false; to mix neighbours, give samestep.data.Shuffl"
    ):
        train(Stream(), samestep.Batching(global_batch=4), steps=1)


def test_the_length_is_told_where_it_is_known(tmp_path):
    seen = []
    train(Stream(), IN_ORDER, epochs=1, seen=seen, folder=tmp_path)
    assert [event.steps for event in seen if isinstance(event, RunStarted)] == [None]
    for last, first, steps in [("keep", 7, 14), ("drop", 6, 12), ("wrap", 7, 14)]:
        seen, place = [], tmp_path / last
        batching = IN_ORDER.model_copy(update={"last": last})
        for most in ({"steps": 3}, {"epochs": 1}, {"epochs": 2}):
            train(SizedStream(), batching, seen=seen, folder=place, **most)
        assert [event.steps for event in seen if isinstance(event, RunStarted)] == [3, first, steps]
    with pytest.raises(CheckpointError, match="the number of samples was None and is now 61"):
        train(SizedStream(), IN_ORDER, epochs=2, folder=tmp_path)


def test_a_stream_that_became_shorter_is_told_when_the_run_goes_on(tmp_path):
    train(Stream(61), IN_ORDER, steps=4, folder=tmp_path)
    with pytest.raises(samestep.DataError, match="ended after 20 samples of pass 0, and the run is to go on"):
        train(Stream(20), IN_ORDER, steps=6, folder=tmp_path)


def test_no_notice_of_changed_data_for_streams(tmp_path):
    for steps in (2, 4):
        seen = []
        train(Stream(), IN_ORDER, steps=steps, folder=tmp_path, seen=seen)
    assert not [event for event in seen if isinstance(event, Notice) and "changed" in event.message]
