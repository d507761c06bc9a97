"""Evidence of a data set's content, stored with checkpoints: a run that goes on says where it changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.data.identity import changed_samples, look_at
from samestep.data.reading import StreamPlan
from samestep.events import Notice
from samestep.loop.walk import Walk


def agree_evidence(
    walk: Walk, transport: Transport, *, device: torch.device, in_worker: bool
) -> dict[str, str]:
    """Collective. Let the first rank look at a few samples, and return what it found; nothing of a stream."""
    found: dict[str, str] = {}
    if transport.rank == 0 and not isinstance(walk.batches, StreamPlan):
        with transport.turn():  # samples are made under their own seeds
            found = look_at(walk.dataset, in_worker=in_worker)
    told = gather_bytes(transport, json.dumps(found).encode(), device=device)[0]
    agreed: dict[str, str] = json.loads(told)
    return agreed


def notice_of_change(before: Mapping[str, Any], now: Mapping[str, str]) -> Notice | None:
    """Return what to tell where samples do not hold what they held when the state was stored."""
    changed = changed_samples(before, now)
    if not changed:
        return None
    message = (
        f"resume: the data set has changed since the checkpoint: sample {changed[0]} does not hold what it "
        f"held ({len(changed)} of {len(now)} samples that were looked at have changed). The run goes on with "
        "the data as they are now, and its numbers are not those of an undisturbed run."
    )
    return Notice(level="warning", message=message)
