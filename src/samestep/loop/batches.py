"""The global batches of a session, with the data of this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from samestep.comm.transport import Transport
from samestep.data.assign import assign
from samestep.data.global_batch import GlobalBatch, MicroBatch
from samestep.data.loader import Loader
from samestep.errors import ConfigError, InternalError
from samestep.loop.engine import Engine
from samestep.loop.leaf import LeafLoss
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
    """Walks through the steps of a run and loads what this rank needs, ahead of time where it can."""

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
        loaded = self._loader.load(self._requests())
        requests = self._requests()

        def load(micro: MicroBatch) -> Any:
            # The loader works ahead; what a skipped batch left unread is passed over here.
            for request in requests:
                # Samples are made under their own seeds, so ranks that are threads take turns here too.
                with self._transport.turn():
                    data = next(loaded)
                if (request.step, request.index) == (micro.step, micro.index):
                    return to_device(data, self._device)
            raise InternalError(
                f"micro-batch {micro.index} of step {micro.step} was not asked of the loader."
            )

        with closing(loaded):
            for batch in self._walk:
                self._walk.ended += 1
                yield LoadedBatch(
                    self._engine,
                    batch,
                    self._runs(batch),
                    self._transport.rank,
                    load,
                    is_last=self._walk.ended == len(self._walk.batches),
                )

    def _runs(self, batch: GlobalBatch) -> list[range]:
        return assign(batch.num_micro_batches, [1.0] * self._transport.world_size)

    def _requests(self) -> Iterator[MicroBatch]:
        for batch in self._walk:
            for index in self._runs(batch)[self._transport.rank]:
                yield batch.micro(index)


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
