"""Steps cut out of a stream: each sample once, the same for any share of the micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from samestep.config import Batching
from samestep.data.assign import assign
from samestep.data.global_batch import Batches
from samestep.data.loader import Loader
from samestep.data.planner import Planner, Standing
from samestep.data.reading import Reading, StreamAnswer, StreamPlan, StreamRequest
from samestep.data.shuffled import Shuffled
from samestep.data.stream import is_stream, length_of
from samestep.errors import ConfigError, DataError


class Plain:
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.num_samples):
            self.num_read += 1
            yield number


class Skipping(Plain):
    """Its iterator passes over samples for nothing, and can tell where it is."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.begin = 0

    def load_state(self, state: Any) -> None:
        self.begin = state

    def __iter__(self) -> Iterator[int]:
        begin, self.begin = self.begin, 0
        return _Skipping(self, begin)


class _Skipping:
    def __init__(self, stream: Skipping, begin: int) -> None:
        self._stream, self._next = stream, begin

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._next >= self._stream.num_samples:
            raise StopIteration
        self._stream.num_read += 1
        self._next += 1
        return self._next - 1

    def skip(self, count: int) -> int:
        there = min(count, self._stream.num_samples - self._next)
        self._next += there
        return there

    def state(self) -> int:
        return self._next


class Seeking(Plain):
    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.place = 0

    def seek(self, place: int) -> None:
        self.place = place

    def __iter__(self) -> Iterator[int]:
        place, self.place = self.place, 0
        self.num_read += self.num_samples - place
        return iter(range(place, self.num_samples))


def steps_of(
    stream: Any,
    plan: StreamPlan,
    *,
    run: range = range(1000),
    begin: Reading | None = None,
    first: int = 0,
    quarantine: tuple[int, ...] = (),
) -> list[StreamAnswer]:
    loader: Loader[Any] = Loader(stream, seed=0, collate_fn=list, plan=plan)

    def requests() -> Iterator[StreamRequest]:
        step, where = first, begin or Reading()
        for step in range(first, 10**6 if plan.steps is None else plan.steps):
            size = plan.batching.sizes(step)
            yield StreamRequest(
                step=step,
                size=size,
                begin=where if step == first else None,
                run=run,
                quarantine=quarantine,
            )

    answers: list[StreamAnswer] = []
    for answer in loader.load(requests()):
        assert isinstance(answer, StreamAnswer)
        if not len(answer.ids):
            break
        answers.append(answer)
    return answers


def told(answer: StreamAnswer) -> tuple[object, ...]:
    return answer.ids.tolist(), answer.epochs.tolist(), answer.after.cursor, answer.after.is_end


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, StreamPlan, tuple[int, ...]]:
    size = st.integers(1, 12)
    batching = Batching(
        global_batch=draw(size),
        last=draw(st.sampled_from(["keep", "drop", "wrap"])),
        growth=draw(st.dictionaries(st.integers(1, 5), size, max_size=2)),
        shuffle=False,
    )
    num_samples = draw(st.integers(1, 30)) + batching.sizes.largest
    most = num_samples - batching.sizes.largest
    bad = draw(st.sets(st.integers(0, num_samples - 1), max_size=most))
    plan = StreamPlan(num_samples=None, batching=batching, seed=0, epochs=draw(st.integers(0, 3)))
    return num_samples, plan, tuple(sorted(bad))


KINDS = [Plain, Skipping, Seeking]


@settings(deadline=None, max_examples=100)
@given(plans(), st.sampled_from(KINDS))
def test_a_stream_is_cut_as_map_style_data_in_their_order_are(drawn, kind):
    num_samples, plan, bad = drawn
    batches = Batches(num_samples=num_samples, batching=plan.batching, seed=0, epochs=plan.epochs)
    expected = list(Planner(batches=batches, quarantine=bad).ahead(Standing()))
    answers = steps_of(kind(num_samples), plan, quarantine=bad)
    assert [(a.ids.tolist(), a.epochs.tolist()) for a in answers] == [
        (b.ids.tolist(), b.epochs.tolist()) for b in expected
    ]
    for answer in answers:
        assert [i for made in answer.made for i in made] == answer.ids.tolist()
    if plan.batching.last != "drop":
        assert [answer.after.is_end for answer in answers] == [False] * (len(answers) - 1) + [True] * bool(
            answers
        )


@settings(deadline=None, max_examples=100)
@given(plans(), st.integers(1, 4), st.sampled_from(KINDS), st.data())
def test_any_share_of_any_rest_is_the_same(drawn, ranks, kind, data):
    num_samples, plan, bad = drawn
    whole = steps_of(Plain(num_samples), plan, quarantine=bad)
    first = data.draw(st.integers(0, len(whole)))
    begin = whole[first - 1].after if first else None
    if begin is not None and kind is Skipping and begin.place:
        begin = Reading(
            epoch=begin.epoch, place=begin.place, cursor=begin.cursor, source=begin.place, is_end=begin.is_end
        )
    largest = -(-plan.batching.sizes.largest // plan.micro_batch)
    made: list[list[Any]] = [[] for _ in whole[first:]]
    for run in assign(largest, [1.0] * ranks):
        parts = steps_of(kind(num_samples), plan, run=run, begin=begin, first=first, quarantine=bad)
        assert [told(part) for part in parts] == [told(answer) for answer in whole[first:]]
        assert [part.word for part in parts] == [answer.word for answer in whole[first:]]
        for number, part in enumerate(parts):
            made[number] += [i for micro in part.made for i in micro]
    assert made == [answer.ids.tolist() for answer in whole[first:]]


@pytest.mark.parametrize("kind", [Skipping, Seeking])
def test_what_a_stream_offers_is_used_to_go_on(kind):
    plan = StreamPlan(num_samples=None, batching=Batching(global_batch=4, shuffle=False), seed=0, steps=1000)
    stream = kind(10**9 if kind is Skipping else 100_000)
    begin = Reading(epoch=0, place=99_000, cursor=99_000, source=99_000 if kind is Skipping else None)
    (answer, *_) = steps_of(stream, plan, begin=begin, first=998)
    assert answer.ids.tolist() == [99_000, 99_001, 99_002, 99_003]
    assert stream.num_read < 2000


def test_of_the_samples_of_others_only_the_first_of_a_step_is_read():
    batching = Batching(global_batch=100, micro_batch=10, shuffle=False)
    plan = StreamPlan(num_samples=None, batching=batching, seed=0, steps=5)
    stream = Skipping(1000)
    answers = steps_of(stream, plan, run=range(7, 8))
    assert [made for answer in answers for made in answer.made] == [
        list(range(100 * step + 70, 100 * step + 80)) for step in range(5)
    ]
    assert stream.num_read == 5 * 11 + 1


@pytest.mark.parametrize("workers", [0, 3])
def test_samples_are_made_under_their_own_seeds(workers):
    class Noisy(Plain):
        def __iter__(self) -> Iterator[Any]:
            for _ in range(self.num_samples):
                yield torch.rand(2)

    batching = Batching(global_batch=6, micro_batch=2, shuffle=False)
    plan = StreamPlan(num_samples=None, batching=batching, seed=3, epochs=2)
    loaders = [Loader(Noisy(9), seed=3, plan=plan, workers=count) for count in (0, workers)]
    requests = [
        StreamRequest(step=s, size=6, run=range(1, 3), begin=Reading() if s == 0 else None) for s in range(4)
    ]
    one, other = (
        [a.made for a in loader.load(requests) if isinstance(a, StreamAnswer)] for loader in loaders
    )
    assert torch.equal(torch.cat([m for made in one for m in made]), torch.cat([m for x in other for m in x]))
    assert not torch.equal(one[0][0], one[2][0])


def test_shuffled_blocks_hold_each_sample_once_and_are_found_again():
    plan = StreamPlan(num_samples=None, batching=Batching(global_batch=5, shuffle=False), seed=0, epochs=2)
    answers = steps_of(Shuffled(Plain(43), block=10), plan)
    given = [i for a in answers for made in a.made for i in made]
    assert sorted(given[:43]) == sorted(given[43:]) == list(range(43))
    assert given[:43] != given[43:]
    assert sorted(given[:10]) == list(range(10))
    for first in (1, 3, 9, 12):
        rest = steps_of(Shuffled(Plain(43), block=10), plan, begin=answers[first - 1].after, first=first)
        assert [a.made for a in rest] == [a.made for a in answers[first:]]


class Torch(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_what_counts_as_a_stream():
    assert is_stream(Torch())
    assert is_stream(Plain(3))
    assert not is_stream([1, 2])
    assert length_of(Plain(3)) is None
    with pytest.raises(ConfigError, match="a generator, which has no length and can be read only once"):
        is_stream(i for i in range(3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batching": Batching(global_batch=4)}, "Set shuffle to false; to mix neighbours"),
        ({"steps": 1}, "both are given"),
        ({"epochs": None}, "neither is given"),
    ],
)
def test_plans_that_no_stream_can_follow(settings, message):
    good = {"num_samples": None, "batching": Batching(global_batch=4, shuffle=False), "seed": 0, "epochs": 1}
    with pytest.raises(ConfigError, match=message):
        StreamPlan(**{**good, **settings})


class Liar(Plain):
    def __len__(self) -> int:
        return self.num_samples + 1


class Failing(Plain):
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise OSError("no such file")


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (Liar(9), r"ended after 9 samples, and len\(stream\) is 10"),
        (Failing(9), "sample 1 of pass 0 of the stream failed: OSError"),
        (Plain(0), "no step can be made of pass 0 of the stream: it gave 0 samples"),
    ],
)
def test_streams_that_break_their_word(stream, message):
    plan = StreamPlan(num_samples=None, batching=Batching(global_batch=4, shuffle=False), seed=0, epochs=1)
    with pytest.raises(DataError, match=message):
        steps_of(stream, plan)


def test_a_stream_that_became_too_short():
    plan = StreamPlan(num_samples=None, batching=Batching(global_batch=4, shuffle=False), seed=0, epochs=1)
    with pytest.raises(
        DataError, match="ended after 9 samples of pass 0, and the run is to go on at sample 12"
    ):
        steps_of(Plain(9), plan, begin=Reading(place=12, cursor=12), first=3)
