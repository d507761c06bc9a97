"""Loading micro-batches, in this process or in workers, with the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Final, Generic, TypeVar, cast, final

import torch
from torch.utils.data import DataLoader, Dataset

from samestep.config.arguments import require_callable, require_count
from samestep.data.fetch import Fetch, MapDataset
from samestep.data.parcel import Parcel
from samestep.data.reading import StreamPlan
from samestep.data.send import Errand, Failed, Request, Send
from samestep.data.slots import make_slots
from samestep.data.stream import Streamed
from samestep.data.stream_fetch import StreamFetch
from samestep.data.workers import Workers, collate_in_own_memory
from samestep.errors import ConfigError, DataError

Sample = TypeVar("Sample")
_ENDING_S: Final = 5.0  # what a worker was sending breaks off before its process is gone


@final
class RemoteError(Exception):
    """An error of a loader worker: its traceback as text, since the error itself may not travel."""


@final
class Loader(Generic[Sample]):
    """Turn micro-batches of ids into collated batches, with PyTorch's DataLoader underneath.

    Law: what a micro-batch holds depends on (data set, seed, collate_fn, request) alone: not on the number
    of workers, nor on what was loaded or drawn before. That covers what is drawn from PyTorch's default
    CPU generator, Python's `random` and numpy's global generator; a generator that the data set keeps is
    its own affair. Samples are asked for one by one, by [i].

    Without workers, loading seeds the generators of this process and leaves them so: whoever draws from
    them afterwards must seed them first.
    """

    def __init__(
        self,
        dataset: MapDataset[Sample] | Streamed,
        *,
        seed: int,
        collate_fn: Callable[[list[Sample]], object] | None = None,
        workers: int = 0,
        pin_memory: bool = False,
        prefetch: int = 2,
        plan: StreamPlan | None = None,
    ) -> None:
        """Check the settings; nothing starts yet.

        With a `plan` the data set is a stream, which one worker reads from end to end, however many are
        allowed: its requests are steps, and StreamAnswers come back.

        `prefetch` is how many micro-batches each worker makes ahead. `pin_memory` has no effect where there
        is no accelerator that could use it. Raises ConfigError.
        """
        require_count("loader_workers", workers, least=0)
        if collate_fn is not None:
            require_callable("collate_fn", collate_fn, use="it joins a list of samples into one batch")
        if prefetch < 1:
            raise ConfigError(
                f"prefetch is {prefetch}. Give the micro-batches made ahead per worker: 1 or more."
            )
        self._fetch: Dataset[object]
        if plan is None:
            self._fetch = Fetch(cast("MapDataset[Sample]", dataset), seed=seed, collate_fn=collate_fn)
        else:
            self._fetch = StreamFetch(cast("Streamed", dataset), plan, collate_fn=collate_fn)
        self._num_workers = workers if plan is None else min(workers, 1)
        self._prefetch = prefetch
        self._pin_memory = pin_memory and _can_pin()

    def load(self, requests: Iterable[Request]) -> Generator[object, None, None]:
        """Yield the batches of the requests, in their order; workers live as long as this generator.

        Requests are taken as they are needed: `workers` x `prefetch` at the start, then one per batch, so
        they may be without end. Close the generator to end the workers early. Raises DataError where a
        sample, the collation or a worker failed; what the requests raise comes through as it is.
        """
        relay = _Relay(requests)
        yield from self._in_workers(relay) if self._num_workers else self._loader(self._fetch, relay)
        if relay.raised is not None:
            raise relay.raised

    def _in_workers(self, relay: _Relay) -> Iterator[object]:
        with make_slots() as slots:
            # Note [a slot for each batch under way] says why these are enough.
            dealt = itertools.cycle(range(self._num_workers * self._prefetch + 1))
            try:
                workers = Workers(lambda: self._loader(Send(self._fetch, slots), map(Errand, dealt, relay)))
            except Exception as exc:
                raise DataError(
                    f"{self._num_workers} loader workers could not be started: {type(exc).__name__}: {exc}\n"
                    "Where processes are spawned, not forked, the data set and collate_fn must be picklable. "
                    "With loader_workers=0 no process is needed."
                ) from exc.with_traceback(None)  # whose frames would keep alive the workers that did start
            try:
                yield from _received(workers)
            finally:
                workers.end()

    def _loader(self, dataset: Dataset[object], asked: Iterable[object]) -> DataLoader[object]:
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=asked,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch if self._num_workers else None,
            pin_memory=self._pin_memory,
            collate_fn=_as_it_is,
            worker_init_fn=collate_in_own_memory,
            generator=torch.Generator(),  # else a draw is taken from the default generator
        )


@final
class _Relay:
    """The requests up to the first error of the asker, kept until all batches before it are delivered."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests
        self.raised: Exception | None = None

    def __iter__(self) -> Iterator[Request]:
        try:
            yield from self._requests
        except Exception as exc:
            self.raised = exc


def _received(workers: Workers) -> Iterator[object]:
    """Yield what the workers send, until the last batch or the first failure."""
    while True:
        try:
            batch = workers.receive()
        except StopIteration:
            return
        except Exception as exc:
            raise DataError(_loss(workers.lost(within_s=_ENDING_S) or [f"loading failed: {exc}"])) from exc
        if isinstance(batch, Failed):
            raise DataError(batch.message) from (RemoteError(f"\n{batch.trace}") if batch.trace else None)
        yield _opened(batch) if isinstance(batch, Parcel) else batch  # the thread that pins has opened it


def _opened(parcel: Parcel) -> object:
    try:
        return parcel.open()
    except Exception as exc:
        raise DataError(
            f"a batch of a loader worker cannot be put together again: {type(exc).__name__}: {exc}\n"
            "What the collate_fn returns must stand pickling; with loader_workers=0 it is not pickled."
        ) from exc


def _loss(events: list[str]) -> str:
    return (
        f"{'; '.join(events)}. Want of memory is the usual reason, or a library that crashes. Use "
        "fewer loader_workers or smaller micro-batches; loader_workers=0 loads in the training process and "
        "shows where it fails."
    )


def _as_it_is(batch: object) -> object:
    return batch


def _can_pin() -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type != "mps"  # DataLoader warns, and pins nothing
