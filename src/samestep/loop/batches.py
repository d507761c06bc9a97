"""The global batches of a session, with the data of this rank's micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from samestep.comm.transport import Transport
from samestep.data.assign import assign
from samestep.data.global_batch import GlobalBatch, MicroBatch
from samestep.data.loader import Loader
from samestep.data.reading import StreamAnswer, StreamPlan
from samestep.errors import ConfigError, InternalError
from samestep.loop.engine import Engine
from samestep.loop.leaf import LeafLoss
from samestep.loop.same_stream import batch_of, require_same_stream
from samestep.loop.walk import Walk

Weights = Callable[[Any], Mapping[str, float]]  # from a micro-batch's data: the weight of each loss term


@final
class LoadedMicroBatch:
    """One micro-batch of this rank: its samples, collated and on the device."""

    def __init__(self, engine: Engine, micro: MicroBatch, data: Any) -> None:
        self._engine = engine
        self._step = micro.step
        self.index = micro.index
        self.ids = micro.ids
        self.data = data

    def collect(self) -> AbstractContextManager[LeafLoss]:
        """Take the gradients made inside the block as this micro-batch's; yields `record(loss)`."""
        return self._engine.leaf(self.index, step=self._step)

    def counting(self) -> AbstractContextManager[None]:
        """Run the forward pass inside the block for its weights alone."""
        return self._engine.counting(self.index)


@final
class LoadedBatch:
    """One global batch: iterate over it for this rank's micro-batches, in order."""

    def __init__(
        self,
        engine: Engine,
        batch: GlobalBatch,
        runs: Sequence[range],
        rank: int,
        load: Callable[[MicroBatch], Any],
        *,
        is_last: bool,
    ) -> None:
        self._engine = engine
        self._rank = rank
        self._load = load
        self._kept: dict[int, LoadedMicroBatch] = {}
        self._latest: LoadedMicroBatch | None = None  # a first pass may break off at the first one
        self._num_loaded = 0
        self.plan = batch
        self.runs = runs
        self.is_last = is_last  # of its call of `batches`

    @property
    def step(self) -> int:
        """The number of the step, from 0."""
        return self.plan.step

    @property
    def epoch(self) -> int:
        """The epoch of its first sample, from 0."""
        return self.plan.epoch

    @property
    def num_samples(self) -> int:
        """How many samples the step has, over all ranks."""
        return self.plan.num_samples

    def __len__(self) -> int:
        """Return how many micro-batches this rank has in this step."""
        return len(self.runs[self._rank])

    def __iter__(self) -> Iterator[LoadedMicroBatch]:
        """Yield this rank's micro-batches in order; after `load_all`, as often as wished."""
        for index in self.runs[self._rank]:
            yield self._get(index)

    def load_all(self) -> None:
        """Load the micro-batches that are still to come, and keep them for another pass."""
        self._kept = {index: self._get(index) for index in self.runs[self._rank]}

    def _get(self, index: int) -> LoadedMicroBatch:
        if index in self._kept:
            return self._kept[index]
        if self._latest is None or self._latest.index != index:
            self._latest = self._next(index)
        return self._latest

    def _next(self, index: int) -> LoadedMicroBatch:
        run = self.runs[self._rank]
        if self._num_loaded >= len(run) or run[self._num_loaded] != index:
            raise ConfigError(
                f"micro-batch {index} of step {self.step} was passed already: its data are gone. Iterate "
                "over a batch once, or call batch.load_all() before the first pass."
            )
        micro = self.plan.micro(index)
        data = self._load(micro)
        self._num_loaded += 1
        return LoadedMicroBatch(self._engine, micro, data)


@final
class BatchStream:
    """Walks through the steps of a run and loads what this rank needs, ahead of time where it can.

    Note [working ahead]: the loader is asked for steps to come on the guess that every step is applied and
    no further sample goes into quarantine. Where that was wrong, what was made ahead is thrown away, and
    loading starts anew from where the walk stands.
    """

    def __init__(
        self, engine: Engine, walk: Walk, loader: Loader[Any], transport: Transport, device: torch.device
    ) -> None:
        self._engine = engine
        self._walk = walk
        self._loader = loader
        self._transport = transport
        self._device = device

    def __iter__(self) -> Iterator[LoadedBatch]:
        """Yield each global batch in turn; closing the iterator ends the loader's workers."""
        stretch = self._stretch_of_stream if isinstance(self._walk.batches, StreamPlan) else self._stretch
        while self._walk.goes_on(self._engine.update):
            if (yield from stretch()):
                return

    def _stretch(self) -> Generator[LoadedBatch, None, bool]:
        """Yield global batches until the guess was wrong; see Note [working ahead]."""
        walk, update = self._walk, self._engine.update
        quarantine = walk.quarantine
        foreseen, ahead = itertools.tee(walk.ahead(update))
        requests, told = itertools.tee(self._requests(ahead))
        with closing(self._loader.load(told)) as loaded:
            load = partial(self._load, requests, loaded)
            for planned, batch in enumerate(foreseen, start=update):
                if walk.quarantine != quarantine or not walk.holds(planned, self._engine.update):
                    break
                walk.take(batch)
                yield self._loaded(batch, self._runs(batch), load)
        return False

    def _stretch_of_stream(self) -> Generator[LoadedBatch, None, bool]:
        """Yield global batches until the stream ends, which is told, or the guess was wrong.

        Collective, also where a rank has no sample: the ranks compare where they are in the stream.
        """
        walk, update = self._walk, self._engine.update
        quarantine = walk.quarantine
        foreseen, told = itertools.tee(
            replace(request, run=self._split(request.size)[self._transport.rank])
            for request in walk.requests_ahead(update)
        )
        with closing(self._loader.load(told)) as answers:
            for planned, request in enumerate(foreseen, start=update):
                if walk.quarantine != quarantine or not walk.holds(planned, self._engine.update):
                    break
                with self._transport.turn(), self._engine.phases.during("data"):
                    answer = next(answers)
                if not isinstance(answer, StreamAnswer):
                    raise InternalError("a stream was answered with something else than its samples.")
                require_same_stream(answer, self._transport, step=request.step)
                if not len(answer.ids):
                    return True
                batch = batch_of(answer, request, micro_batch=walk.batches.micro_batch)
                walk.take(batch, answer.after)
                stop = batch.num_micro_batches
                runs = [range(min(r.start, stop), min(r.stop, stop)) for r in self._split(request.size)]
                made = dict(zip(request.run, answer.made, strict=False))
                yield self._loaded(batch, runs, partial(self._take_made, made))
        return False

    def _loaded(
        self, batch: GlobalBatch, runs: Sequence[range], load: Callable[[MicroBatch], Any]
    ) -> LoadedBatch:
        is_last = self._walk.is_last(batch, self._engine.update + 1)
        return LoadedBatch(self._engine, batch, runs, self._transport.rank, load, is_last=is_last)

    def _load(self, requests: Iterator[MicroBatch], loaded: Iterator[object], micro: MicroBatch) -> Any:
        # The loader works ahead; what a skipped batch left unread is passed over here.
        for request in requests:
            # Samples are made under their own seeds, so ranks that are threads take turns here too.
            with self._transport.turn(), self._engine.phases.during("data"):
                data = next(loaded)
            if (request.step, request.index) == (micro.step, micro.index):
                return to_device(data, self._device)
        raise InternalError(f"micro-batch {micro.index} of step {micro.step} was not asked of the loader.")

    def _take_made(self, made: dict[int, object], micro: MicroBatch) -> Any:
        return to_device(made.pop(micro.index), self._device)

    def _runs(self, batch: GlobalBatch) -> list[range]:
        return assign(batch.num_micro_batches, [1.0] * self._transport.world_size)

    def _split(self, size: int) -> list[range]:
        """Share out the micro-batches of a step of a stream, before it is known whether it comes short."""
        return assign(-(-size // self._walk.batches.micro_batch), [1.0] * self._transport.world_size)

    def _requests(self, ahead: Iterator[GlobalBatch]) -> Iterator[MicroBatch]:
        for batch in ahead:
            for index in self._runs(batch)[self._transport.rank]:
                yield batch.micro(index)


def open_stream(
    engine: Engine,
    walk: Walk,
    transport: Transport,
    device: torch.device,
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    workers: int,
) -> Iterator[LoadedBatch]:
    """Return the batches of a walk, with a loader of their own. Raises ConfigError."""
    plan = walk.batches
    loader: Loader[Any] = Loader(
        walk.dataset,
        seed=plan.seed,
        collate_fn=collate_fn,
        workers=workers,
        pin_memory=device.type == "cuda",
        plan=plan if isinstance(plan, StreamPlan) else None,
    )
    return iter(BatchStream(engine, walk, loader, transport, device))


@runtime_checkable
class Movable(Protocol):
    """A batch of the user's own class that knows how to move to a device."""

    def to(self, device: torch.device) -> Any:
        """Return the batch on the device."""


def to_device(data: Any, device: torch.device) -> Any:
    """Move a collated batch, nested in dicts, lists and tuples, to the device; on the CPU it is there."""
    if device.type == "cpu":
        return data
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, Movable):
        return data.to(device)
    if isinstance(data, Mapping):
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and type(data) is not tuple:  # a named tuple keeps its names
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device) for value in data)
    return data
