"""Loading: the same bits in any process, and errors that name what failed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from samestep.config import Batching
from samestep.data.fetch import count_samples
from samestep.data.global_batch import Batches, MicroBatch
from samestep.data.loader import Loader
from samestep.errors import ConfigError, DataError

WORKERS = (0, 1, 3)


@dataclass
class Drawing(Dataset[dict[str, torch.Tensor]]):
    """Each sample is its id and one draw from every generator that a data set is used to draw from."""

    size: int = 11

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draws = [torch.rand((), dtype=torch.float64).item(), random.random(), np.random.rand()]
        return {"id": torch.tensor(index), "draws": torch.tensor(draws, dtype=torch.float64)}


def drawing_collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join samples, and draw while doing so."""
    return {
        "id": torch.stack([sample["id"] for sample in samples]),
        "draws": torch.stack([sample["draws"] for sample in samples]),
        "collated": torch.tensor(
            [torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64
        ),
    }


def requests(
    num_samples: int = 11, *, epochs: int = 2, global_batch: int = 5, seed: int = 0
) -> list[MicroBatch]:
    batching = Batching(global_batch=global_batch, micro_batch=2)
    batches = Batches(num_samples=num_samples, batching=batching, seed=seed, epochs=epochs)
    return [batch.micro(i) for batch in batches.starting_at(0) for i in range(batch.num_micro_batches)]


def bits(batches: Iterator[object]) -> list[tuple[object, ...]]:
    return [tuple((name, part.tolist()) for name, part in batch.items()) for batch in batches]


def test_any_number_of_workers_loads_the_same_bits():
    wanted = requests()
    loaded = [
        bits(Loader(Drawing(), seed=5, collate_fn=drawing_collate, workers=count).load(wanted))
        for count in WORKERS
    ]
    assert [dict(batch)["id"] for batch in loaded[0]] == [request.ids.tolist() for request in wanted]
    assert loaded[0] == loaded[1] == loaded[2]


def test_a_sample_draws_the_same_wherever_and_whenever_it_is_loaded():
    wanted = requests()
    loader = Loader(Drawing(), seed=5)
    forward = bits(loader.load(wanted))
    torch.rand(3), random.random(), np.random.rand()
    assert bits(loader.load(reversed(wanted))) == forward[::-1]
    single = MicroBatch(step=90, index=4, ids=wanted[3].ids[1:], epochs=wanted[3].epochs[1:])
    (alone,) = bits(loader.load([single]))
    assert dict(alone)["draws"] == dict(forward[3])["draws"][1:]


def test_samples_epochs_and_seeds_draw_otherwise():
    seen = {
        tuple(draws)
        for seed in (0, 1)
        for batch in bits(Loader(Drawing(), seed=seed).load(requests(epochs=3)))
        for draws in dict(batch)["draws"]
    }
    assert len(seen) == 2 * 3 * 11
    assert all(len({draws[generator] for draws in seen}) == len(seen) for generator in range(3))


def test_each_collation_has_a_stream_of_its_own():
    loaded = bits(Loader(Drawing(), seed=5, collate_fn=drawing_collate).load(requests()))
    assert len({tuple(dict(batch)["collated"]) for batch in loaded}) == len(loaded)
    samples = {draw for batch in loaded for draws in dict(batch)["draws"] for draw in draws}
    assert not samples & {draw for batch in loaded for draw in dict(batch)["collated"]}


def test_a_collation_draws_by_its_place_and_not_by_its_samples():
    epochs = np.array([0, 0])
    one, same_place, same_samples = (
        MicroBatch(step=step, index=1, ids=np.array(ids), epochs=epochs)
        for step, ids in ((4, [2, 3]), (4, [7, 8]), (5, [2, 3]))
    )
    loaded = bits(Loader(Drawing(), seed=5, collate_fn=drawing_collate).load([one, same_place, same_samples]))
    first, second, third = (dict(batch)["collated"] for batch in loaded)
    assert first == second
    assert not set(first) & set(third)


def test_several_threads_load_the_bits_of_one():
    class Summing(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            assert torch.get_num_threads() == 1
            return torch.rand(300_000).sum()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        list(Loader(Summing(), seed=0).load(requests(4)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_lists_subsets_and_the_default_collation_work():
    numbers = [torch.tensor(float(number)) for number in range(11)]
    for dataset in (numbers, Subset(numbers, list(range(11)))):
        loaded = list(Loader(dataset, seed=0).load(requests(epochs=1)))
        assert sorted(torch.cat(loaded).tolist()) == [float(number) for number in range(11)]


def test_what_the_collation_returns_is_left_alone():
    made = object()
    assert list(Loader([1, 2, 3], seed=0, collate_fn=lambda _: made).load(requests(3, epochs=1))) == [
        made,
        made,
    ]
    arrays = Loader([1, 2, 3], seed=0, collate_fn=np.array).load(requests(3, epochs=1))
    assert all(isinstance(batch, np.ndarray) for batch in arrays)


def test_without_workers_nothing_is_loaded_ahead():
    taken: list[int] = []

    def endless() -> Iterator[MicroBatch]:
        for number in itertools.count():
            taken.append(number)
            yield MicroBatch(
                step=number, index=0, ids=np.array([number % 11]), epochs=np.array([number // 11])
            )

    batches = Loader(Drawing(), seed=0, prefetch=4).load(endless())
    next(batches)
    next(batches)
    assert taken == [0, 1]
    batches.close()


@dataclass
class Failing(Dataset[torch.Tensor]):
    """Sample 7 cannot be made."""

    error: type[Exception] = ValueError
    size: int = 11

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise self.error("broken picture")
        return torch.tensor(index)


class NeedsTwoError(Exception):
    """An error that cannot be built again from its message alone."""

    def __init__(self, message: str, cause: object = None) -> None:
        if cause is None:
            raise TypeError("two arguments are needed")
        super().__init__(message)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_fails_is_named(workers):
    wanted = requests()
    number = next(i for i, request in enumerate(wanted) if 7 in request.ids)
    batches = Loader(Failing(), seed=0, workers=workers).load(wanted)
    assert [next(batches).tolist() for _ in range(number)] == [
        request.ids.tolist() for request in wanted[:number]
    ]
    with pytest.raises(DataError) as caught:
        next(batches)
    request = wanted[number]
    assert str(caught.value) == (
        f"sample 7 of the data set failed (epoch 0, step {request.step}, micro-batch {request.index}): "
        "ValueError: broken picture\n"
        "Try dataset[7] alone; correct the sample, or leave it out of the data set."
    )
    assert caught.value.__cause__ is not None
    assert "broken picture" in str(caught.value.__cause__)
    assert list(batches) == []


def test_the_first_error_is_the_cause():
    with pytest.raises(DataError) as caught:
        list(Loader(Failing(error=KeyError), seed=0).load(requests()))
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_traceback_of_a_worker_arrives():
    with pytest.raises(DataError) as caught:
        list(Loader(Failing(), seed=0, workers=1).load(requests()))
    assert 'raise self.error("broken picture")' in str(caught.value.__cause__)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_iteration_of_the_data_set_does_not_end_the_run(workers):
    with pytest.raises(DataError, match=r"sample 7 .* StopIteration: broken picture"):
        list(Loader(Failing(error=StopIteration), seed=0, workers=workers).load(requests()))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_that_does_not_travel_is_told_in_words(workers):
    class Sealed(Failing):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise NeedsTwoError("sealed", object())

    with pytest.raises(DataError, match="NeedsTwoError: sealed"):
        list(Loader(Sealed(), seed=0, workers=workers).load(requests()))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_length_that_promises_too_much_is_named(workers):
    class Short(Drawing):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"id": [torch.tensor(0)][index]}

    with pytest.raises(
        DataError, match=r"IndexError: list index out of range\nlen\(dataset\) promises 11 samples, 0 to 10"
    ):
        list(Loader(Short(), seed=0, workers=workers).load(requests()))


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_do_not_collate_are_named_with_their_shapes(workers):
    ragged = [(torch.zeros(3 if number == 4 else 2), "text") for number in range(5)]
    wanted = MicroBatch(step=6, index=2, ids=np.array([3, 4, 0]), epochs=np.zeros(3, dtype=np.int64))
    with pytest.raises(DataError) as caught:
        list(Loader(ragged, seed=0, workers=workers).load([wanted]))
    message = str(caught.value)
    assert message.startswith("samples 3, 4, 0 of micro-batch 2 of step 6 do not collate: RuntimeError: ")
    assert "They hold (float32[2], str) (3, 0), (float32[3], str) (4)." in message
    assert message.endswith("Give a collate_fn that joins such samples (that pads them, for instance).")


def test_a_collate_fn_that_fails_is_named():
    def broken(samples: list[int]) -> None:
        raise RuntimeError(f"{len(samples)} are too many")

    with pytest.raises(
        DataError, match=r"do not collate: RuntimeError: 2 are too many\n.*\nCorrect the collate_fn"
    ):
        list(Loader([1, 2, 3], seed=0, collate_fn=broken).load(requests(3, epochs=1)))


def test_samples_of_no_known_kind_are_named():
    with pytest.raises(DataError, match=r"They hold NoneType \(\d, \d\)"):
        list(Loader([None] * 4, seed=0).load(requests(4, epochs=1)))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_requests_raise_comes_through(workers):
    def some() -> Iterator[MicroBatch]:
        yield from requests()[:1]
        raise KeyError("asker")

    batches = Loader(Drawing(), seed=0, workers=workers).load(some())
    assert next(batches)["id"].tolist() == requests()[0].ids.tolist()
    with pytest.raises(KeyError, match="asker"):
        next(batches)


def test_data_sets_that_are_not_map_style_are_refused():
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    class NoLength(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    class BrokenLength(NoLength):
        def __len__(self) -> int:
            raise OSError("no such file")

    with pytest.raises(ConfigError, match=r"a Stream, which is read as a stream. samestep needs a map-style"):
        Loader(Stream(), seed=0)
    with pytest.raises(ConfigError, match=r"a NoLength, has no length \(.*\). samestep needs a map-style"):
        Loader(NoLength(), seed=0)
    with pytest.raises(
        DataError, match=r"len\(\) of the data set, a BrokenLength, failed: OSError: no such file"
    ):
        count_samples(BrokenLength())


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="loader_workers is -1"):
        Loader([1], seed=0, workers=-1)
    with pytest.raises(ConfigError, match="prefetch is 0"):
        Loader([1], seed=0, prefetch=0)


def test_pinning_without_an_accelerator_is_no_error():
    loaded = list(Loader([1.0, 2.0], seed=0, pin_memory=True).load(requests(2, epochs=1)))
    assert [batch.is_pinned() for batch in loaded] == [torch.cuda.is_available()]
