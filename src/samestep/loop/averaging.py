"""The averaged weights of a run: kept in tiles by their owners, put into the model to evaluate or export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from samestep.comm.transport import Transport, Work
from samestep.errors import ConfigError
from samestep.loop.parts import Parts
from samestep.optim.ema import EMA, average_dtype, move
from samestep.sync.layout import Slot

MOVES = "moves"


class AveragePiece(NamedTuple):
    """An owned part of one parameter's average."""

    slot: Slot
    start: int  # in the flat buffer
    stop: int
    tensor: Tensor  # 1-D, real: the memory of the average itself, to read from and to write to


@final
class Averaging:
    """Keeps the exponential moving average of the trained parameters.

    Each rank keeps the tiles that it owns, in float32 or wider, under every strategy: 1/N of the memory.
    Where there are master weights, those are averaged. What is not trained stays the model's own.
    """

    def __init__(self, ema: EMA, parts: Parts, transport: Transport) -> None:
        self._ema = ema
        self._parts = parts
        self._transport = transport
        self._owned = parts.layout.owned(transport.rank)
        self._averages = [
            parts.store.masters[flat][start:stop].to(average_dtype(parts.layout.flats[flat].dtype), copy=True)
            for flat, start, stop in self._owned
        ]
        self._buffers: dict[str, Tensor] = {}
        if ema.buffers == "average":
            self._buffers = {
                name: buffer.detach().to(
                    average_dtype(buffer.dtype), copy=True, memory_format=torch.contiguous_format
                )
                for name, buffer in self._named_buffers().items()
            }
        self.moves = 0  # how often the average has moved
        self.is_applied = False  # whether the model holds the averages at the moment

    def follow(self, update: int) -> None:
        """Take note of an applied update; `update` counts it. Skipped steps do not come here."""
        if not self._ema.due(update):
            return
        decay = self._ema.decay_at(self.moves)
        for (flat, start, stop), average in zip(self._owned, self._averages, strict=True):
            move(average, self._parts.store.masters[flat][start:stop], decay)
        if self._buffers:
            for name, buffer in self._named_buffers().items():
                move(self._buffers[name], buffer, decay)
        self.moves += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Collective, at both ends. Let the model hold the averaged weights inside the block.

        They are rounded to the parameters' dtypes. Afterwards the model has the bits it had before; master
        weights and optimizer state are never touched. What the block itself writes into parameters is lost.
        Costs one copy of the parameters. No step may be taken inside. Raises ConfigError where a
        parameter's `.data` was replaced since the last step.
        """
        store = self._parts.store
        if moved := store.moved():
            raise ConfigError(
                f"{moved[0].name}: .data was replaced since the last step, so the averaged weights cannot be "
                "put there. Change values in place (with torch.no_grad(): parameter.copy_(...))."
            )
        raw = [flat.clone() for flat in store.flats]
        buffers = self._named_buffers() if self._buffers else {}
        own = {name: buffer.clone() for name, buffer in buffers.items()}
        was_applied, self.is_applied = self.is_applied, True
        try:
            with torch.no_grad():
                self._gather_into(store.flats)
                for name, buffer in buffers.items():
                    buffer.copy_(self._buffers[name])
            yield
        finally:
            with torch.no_grad():
                for flat, before in zip(store.flats, raw, strict=True):
                    flat.copy_(before)
                for name, buffer in buffers.items():
                    buffer.copy_(own[name])
            self.is_applied = was_applied

    def gathered(self) -> dict[str, Tensor]:
        """Collective. Return the whole averages by parameter, in float32 or wider, on every rank."""
        flats = [
            torch.zeros(flat.numel, dtype=average_dtype(flat.dtype), device=self._parts.device)
            for flat in self._parts.layout.flats
        ]
        self._gather_into(flats)
        return {slot.name: slot.view(flats[slot.flat]).clone() for slot in self._parts.layout.slots}

    def pieces(self) -> Iterator[AveragePiece]:
        """Yield the owned parts of each parameter's average, for a checkpoint to store or to fill."""
        for slot in self._parts.layout.slots:
            for (flat, first, last), average in zip(self._owned, self._averages, strict=True):
                start, stop = max(slot.start, first), min(slot.stop, last)
                if flat == slot.flat and start < stop:
                    yield AveragePiece(slot, start, stop, average[start - first : stop - first])

    def averaged_buffers(self) -> dict[str, Tensor]:
        """Return the averages of buffers, whole and alike on every rank, for a checkpoint likewise."""
        return dict(self._buffers)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew from the weights as they are now."""
        for (flat, start, stop), average in zip(self._owned, self._averages, strict=True):
            average.copy_(self._parts.store.masters[flat][start:stop])
        for name, buffer in (self._named_buffers() if self._buffers else {}).items():
            self._buffers[name].copy_(buffer)
        self.moves = 0

    def state(self) -> dict[str, int]:
        """Return what a checkpoint stores besides the pieces."""
        return {MOVES: self.moves}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up the count of a stored average, whose pieces were filled."""
        self.moves = int(state[MOVES])

    def _gather_into(self, flats: list[Tensor]) -> None:
        """Collective. Write the averages of all owners into flat buffers, rounding to their dtypes."""
        for (flat, start, stop), average in zip(self._owned, self._averages, strict=True):
            flats[flat][start:stop].copy_(average)
        works: list[Work] = []
        for bucket in self._parts.layout.buckets:
            parts = [flats[bucket.flat][slice(*cut)] for cut in bucket.cuts]
            works.append(self._transport.gather(parts[self._transport.rank], parts))
        for work in works:
            work.wait()

    def _named_buffers(self) -> dict[str, Tensor]:
        named = [*self._parts.statistics.named, *self._parts.buffers.named]
        return {name: buffer for name, buffer in named if buffer.is_floating_point()}
