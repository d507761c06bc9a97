"""Making the micro-batches of one rank from a stream that every rank reads alike."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from torch.utils.data import Dataset

from samestep.data.content import content_word
from samestep.data.fetch import collate_samples, one_thread
from samestep.data.global_batch import MicroBatch
from samestep.data.passes import Pass
from samestep.data.reading import Reading, StreamAnswer, StreamPlan, StreamRequest, at_end
from samestep.data.stream import Streamed, length_of
from samestep.errors import DataError


@final
class StreamFetch(Dataset[object]):
    """Reads on from request to request.

    Law: which samples a step owns depends on (stream, batching, quarantine, place) alone. Of the samples of
    other ranks, the first one of each step is read too: the ranks compare what it holds.
    """

    def __init__(
        self, stream: Streamed, plan: StreamPlan, *, collate_fn: Callable[[list[Any]], object] | None
    ) -> None:
        self._stream = stream
        self._plan = plan
        self._collate_fn = collate_fn
        self._length = length_of(stream)
        self._pass: Pass | None = None
        self._behind = 0  # samples of the passes before this one
        self._used = 0  # samples of this pass that went into steps
        self._is_end = False

    def __getitem__(self, request: StreamRequest) -> StreamAnswer:
        """Return the samples of a step. Raises DataError where the stream or the collation fails."""
        with one_thread():
            if request.begin is not None:
                self._go_to(request.begin)
            start = self._reading().cursor
            filled = _Filled(request, self._plan.micro_batch)
            self._fill(filled)
            after = self._after(request)
            made = [self._collate(filled, index) for index in request.run if index in filled.own]
        return StreamAnswer(
            ids=np.array(filled.ids, dtype=np.int64),
            epochs=np.array(filled.epochs, dtype=np.int64),
            start=start,
            after=after,
            word=filled.word,
            made=made,
        )

    def _fill(self, filled: _Filled) -> None:
        last = self._plan.batching.last
        while not self._is_end and filled.missing:
            reading = self._now()
            found = len(filled.ids)
            if self._extend(filled, reading):
                self._used += len(filled.ids) - found
                continue
            self._used += len(filled.ids) - found
            if last == "keep" and filled.ids:
                return
            if last == "drop":
                self._used -= len(filled.ids)
                filled.clear()
            self._next_pass(filled.request)
        if last == "drop" and filled.missing:
            filled.clear()

    def _extend(self, filled: _Filled, reading: Pass) -> bool:
        """Take the next sample, or pass over those that nobody here needs; False where the pass ended."""
        count = filled.not_needed()
        quarantine = filled.request.quarantine
        if quarantine:
            number = bisect_left(quarantine, reading.place)
            if number < len(quarantine):
                count = min(count, quarantine[number] - reading.place)
        if count:
            place = reading.place
            there = reading.skip(count)
            filled.pass_over(reading.epoch, range(place, place + there))
            return there == count
        if not self._has_more(reading, quarantine):
            return False
        filled.add(reading.epoch, reading.place, reading.take())
        return True

    def _has_more(self, reading: Pass, quarantine: Sequence[int]) -> bool:
        """Say whether a sample follows that is not in quarantine; those before it are passed over."""
        while True:
            number = bisect_left(quarantine, reading.place)
            if number == len(quarantine) or quarantine[number] != reading.place:
                return reading.has_more()
            if not reading.skip(1):
                return False

    def _after(self, request: StreamRequest) -> Reading:
        """Return where the next step begins: the next pass, where nothing is left of this one."""
        if self._is_end:
            return self._reading()
        reading = self._now()
        here = self._reading(reading.state())
        if self._has_more(reading, request.quarantine):
            return here
        self._next_pass(request)
        return self._reading()

    def _next_pass(self, request: StreamRequest) -> None:
        ended = self._now()
        if not self._used:
            raise DataError(
                f"no step can be made of pass {ended.epoch} of the stream: it gave {ended.place} samples, "
                f"{len(request.quarantine)} are in quarantine, a step takes {request.size}, and "
                f"batching.last is {self._plan.batching.last}."
            )
        if self._length is not None and ended.place != self._length:
            raise DataError(
                f"pass {ended.epoch} of the stream ended after {ended.place} samples, and len(stream) is "
                f"{self._length}. Correct __len__, or leave it out where the length is not known."
            )
        self._behind += ended.place
        self._open(ended.epoch + 1)

    def _go_to(self, begin: Reading) -> None:
        self._is_end = begin.is_end
        self._behind = begin.cursor - begin.place
        now = self._pass
        if now is None or (now.epoch, now.place) != (begin.epoch, begin.place):
            self._open(begin.epoch, place=begin.place, source=begin.source)
        if begin.place:
            self._used = 1

    def _open(self, epoch: int, *, place: int = 0, source: Any = None) -> None:
        self._used = 0
        self._is_end = self._is_end or epoch == self._plan.epochs
        self._pass = None
        if not self._is_end:
            self._pass = Pass(self._stream, seed=self._plan.seed, epoch=epoch, place=place, source=source)

    def _now(self) -> Pass:
        assert self._pass is not None
        return self._pass

    def _reading(self, source: Any = None) -> Reading:
        if self._pass is None:
            return at_end(Reading(epoch=self._plan.epochs or 0, cursor=self._behind))
        place = self._pass.place
        return Reading(
            epoch=self._pass.epoch, place=place, cursor=self._behind + place, source=source if place else None
        )

    def _collate(self, filled: _Filled, index: int) -> object:
        part = slice(index * self._plan.micro_batch, (index + 1) * self._plan.micro_batch)
        micro = MicroBatch(
            step=filled.request.step,
            index=index,
            ids=np.array(filled.ids[part], dtype=np.int64),
            epochs=np.array(filled.epochs[part], dtype=np.int64),
        )
        return collate_samples(self._plan.seed, self._collate_fn, micro, filled.own[index])


@final
class _Filled:
    """The samples of a step as far as they are read."""

    def __init__(self, request: StreamRequest, micro_batch: int) -> None:
        self.request = request
        self._micro_batch = micro_batch
        self.clear()

    def clear(self) -> None:
        self.ids: list[int] = []
        self.epochs: list[int] = []
        self.own: dict[int, list[Any]] = {}
        self.word = 0

    @property
    def missing(self) -> int:
        return self.request.size - len(self.ids)

    def not_needed(self) -> int:
        """Return how many of the next samples are another rank's; the first one of a step is read by all."""
        position, run = len(self.ids), self.request.run
        if not position or position // self._micro_batch in run:
            return 0
        first = run.start * self._micro_batch
        stop = first if run and position < first else self.request.size
        return min(stop, self.request.size) - position

    def pass_over(self, epoch: int, places: range) -> None:
        self.ids += places
        self.epochs += [epoch] * len(places)

    def add(self, epoch: int, place: int, sample: Any) -> None:
        index = len(self.ids) // self._micro_batch
        if not self.ids:
            self.word = content_word(sample)
        if index in self.request.run:
            self.own.setdefault(index, []).append(sample)
        self.ids.append(place)
        self.epochs.append(epoch)
