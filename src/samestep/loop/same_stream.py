"""What all ranks must see alike in a stream before a step is taken."""

from __future__ import annotations

from typing import Final

import torch

from samestep.comm.transport import Transport
from samestep.data.global_batch import GlobalBatch
from samestep.data.reading import StreamAnswer, StreamRequest
from samestep.errors import Disagreement

_TOLD: Final = (
    "the samples that it gave for this step",
    "the pass it is in afterwards",
    "the samples that were read afterwards",
    "whether it has ended",
    "what the first sample of this step holds",
)


def require_same_stream(answer: StreamAnswer, transport: Transport, *, step: int) -> None:
    """Collective. Raise Disagreement, on every rank alike, where the stream is not the same on all."""
    after = answer.after
    words = [len(answer.ids), after.epoch, after.cursor, int(after.is_end), answer.word]
    rows = transport.ballot(torch.tensor(words, dtype=torch.int64)).tolist()
    for rank, row in enumerate(rows):
        for name, first, here in zip(_TOLD, rows[0], row, strict=True):
            if here != first:
                raise Disagreement(
                    f"the stream is not the same on all ranks in step {step}: {name}: {first} on rank 0, but "
                    f"{here} on rank {rank}. Every rank must read the same samples in the same order: do not "
                    "divide the stream by rank, and draw only from the generators that are seeded for it."
                )


def batch_of(answer: StreamAnswer, request: StreamRequest, *, micro_batch: int) -> GlobalBatch:
    """Return the global batch that a stream gave."""
    for shared in (answer.ids, answer.epochs):
        shared.setflags(write=False)
    return GlobalBatch(
        step=request.step,
        epoch=int(answer.epochs[0]),
        start=answer.start,
        cursor=answer.after.cursor,
        ids=answer.ids,
        epochs=answer.epochs,
        micro_batch=micro_batch,
    )
