"""What runs in a loader worker: making a batch, and giving it to the rank as a parcel."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from torch.utils.data import Dataset

from samestep.data.global_batch import MicroBatch
from samestep.data.parcel import Parcel, take_apart
from samestep.data.reading import StreamRequest
from samestep.data.slots import Slots
from samestep.errors import DataError

Request: TypeAlias = MicroBatch | StreamRequest
_SMALL: Final = 32 * 1024  # bytes that go through the queue itself, which is no slower up to about here


@final
@dataclass(frozen=True, slots=True)
class Errand:
    """A request, and the slot for what is made of it."""

    slot: int
    request: Request


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """What a loader worker sends in place of a batch: the message, and its cause's traceback as text."""

    message: str
    trace: str


@final
class Send(Dataset[object]):
    """Make micro-batches in a worker. Nothing but bytes, numbers and text leaves it.

    A queue pickles in a thread of its own: an error there is printed, the batch is lost, and the rank waits
    for ever. So a batch is pickled here, where an error can still be told.
    """

    def __init__(self, fetch: Dataset[object], slots: Slots | None) -> None:
        """Without slots all contents go through the queue, whatever their size."""
        self._fetch = fetch
        self._slots = slots

    def __getitem__(self, errand: Errand) -> Parcel | Failed:
        """Return the micro-batch on its way, or why there is none."""
        try:
            return self._pack(errand, self._fetch[errand.request])
        except DataError as exc:
            cause = exc.__cause__
            return Failed(str(exc), "".join(traceback.format_exception(cause)) if cause else "")

    def _pack(self, errand: Errand, batch: object) -> Parcel:
        named = f"the batch of micro-batch {errand.request.index} of step {errand.request.step}"
        try:
            apart = take_apart(batch)
        except Exception as exc:
            raise DataError(
                f"{named} cannot be sent from a loader worker: {type(exc).__name__}: {exc}\nLet the data set "
                "and collate_fn return plain values, arrays and detached tensors, or set loader_workers to 0."
            ) from None
        sizes = tuple(len(part) for part in apart.parts)
        if self._slots is None or apart.num_bytes <= _SMALL:
            return Parcel(sizes, apart.of_tensors, b"".join(apart.parts))
        try:
            return Parcel(sizes, apart.of_tensors, self._slots.write(errand.slot, apart.parts))
        except OSError as exc:
            raise DataError(
                f"{named}, {apart.num_bytes} bytes, does not fit into memory shared with its loader worker: "
                f"{exc}\nUse fewer loader_workers or smaller micro-batches; loader_workers=0 shares none."
            ) from None
