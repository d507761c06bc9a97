"""Loops that leave a batch without its step, or call something else before it: on ranks of any kind."""

from __future__ import annotations

from typing import Any

import torch
from failures_inputs import Data, loss
from torch import nn

import samestep
from samestep.comm.connect import connect
from samestep.comm.transport import Transport
from samestep.topology.environment import Place

LEFT_AT = (1, 3)  # steps; in step 0 no gradient is sent early


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))


def collect(session: samestep.Session, batch: Any, how_many: int = 100) -> None:
    for micro in batch:
        if micro.index >= how_many:
            break
        with micro.collect() as record:
            record(loss(session.model, micro.data))


def evaluation() -> samestep.Evaluation:
    return samestep.Evaluation(dataset=Data(7), metric=loss, micro_batch=2)


def leave(session: samestep.Session, batch: Any, what: str) -> None:
    """Do to a batch, instead of the step, what is tried out."""
    if what != "nothing collected":
        collect(session, batch, 1 if what == "one collected" else 100)
    if what == "evaluate":
        session.evaluate(evaluation())
    if what == "fingerprint":
        session.agreed_fingerprint()


def loop(transport: Transport, what: str, micro_batches: int, **settings: Any) -> str:
    """Take steps and leave out some; return the fingerprint."""
    batching = samestep.Batching(global_batch=2 * micro_batches, micro_batch=2)
    with transport.turn():
        torch.manual_seed(0)
        model = make_model()
    with samestep.Session(transport=transport, digest_every=1, **settings) as session:
        session.setup(model, lambda params: torch.optim.AdamW(params, lr=1e-2))
        for round_number in range(2):
            for batch in session.batches(Data(), batching, steps=5):
                if batch.step % 5 in LEFT_AT:
                    leave(session, batch, what)
                    if what == "break":
                        break
                    continue
                collect(session, batch)
                session.step(batch)
            if round_number == 0:
                session.evaluate(evaluation()) if what != "break" else None
        return session.fingerprint()


def loop_on_processes(place: Place, what: str, micro_batches: int) -> str:
    """Be one rank of a loop over gloo."""
    return loop(connect(place, device=torch.device("cpu"), timeout_s=30.0), what, micro_batches)
