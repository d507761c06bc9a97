"""One step, as it reads: the micro-batches of this rank, then one reduction and one update."""

from __future__ import annotations

from samestep.events import StepReport
from samestep.loop.batches import LoadedBatch
from samestep.loop.leaf import NeedsWeightsError
from samestep.loop.session import Session
from samestep.loop.terms import LossFunction


def take_step(session: Session, batch: LoadedBatch, loss: LossFunction) -> StepReport:
    """Collective. Apply one update whose gradient is the weighted mean over all of `batch`.

    Nothing here knows how many ranks there are: `batch` yields the micro-batches that are computed here,
    and `step` returns the sum over all of them, wherever they were computed.
    """
    terms = session.terms
    if terms.must_be_counted:
        terms.count(batch, loss)
    try:
        _collect(session, batch, loss)
    except NeedsWeightsError as several:  # in the first step: now all ranks know
        if terms.are_known:  # then the others do not wait to hear of it
            raise
        terms.agree(several.names)
        terms.count(batch, loss)
        _collect(session, batch, loss)
    return session.step(batch, loss)


def _collect(session: Session, batch: LoadedBatch, loss: LossFunction) -> None:
    for micro in batch:
        with micro.collect() as record:
            record(loss(session.model, micro.data))
