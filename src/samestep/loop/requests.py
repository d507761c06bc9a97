"""What callbacks, signals and loops ask of a run, and what the requests of all ranks come to.

Any rank may ask at any time. The ballot of the next step carries one word that says whether it does; only
then do the ranks exchange what. So all of them do the same after the same step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Self, final

import torch

from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """What is asked of a run after a step; false where nothing is."""

    stop: str | None = None  # the reason to end the run
    leave: str | None = None  # the signal that asks to store the state and go, to be resumed later
    save: str | None = None  # the reason to write a checkpoint
    evaluate: bool = False
    skip: tuple[int, ...] = ()  # ids of samples that the run is to pass over from now on, rising
    skip_reason: str | None = None

    def __bool__(self) -> bool:
        """Say whether anything is asked."""
        return self != Requests()

    def to_bytes(self) -> bytes:
        """Return a message for the other ranks."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, message: bytes) -> Self:
        """Read another rank's message."""
        told = json.loads(message)
        return cls(**{**told, "skip": tuple(told["skip"])})


def merge_requests(by_rank: Sequence[Requests]) -> Requests:
    """Join what the ranks ask for. Law: a pure function of all requests in rank order, so alike everywhere.

    >>> merge_requests([Requests(skip=(4, 1)), Requests(stop="a"), Requests(stop="b", skip=(1, 2))])
    Requests(stop='a; b', leave=None, save=None, evaluate=False, skip=(1, 2, 4), skip_reason=None)
    """
    return Requests(
        stop=_reasons(request.stop for request in by_rank),
        leave=_reasons(request.leave for request in by_rank),
        save=_reasons(request.save for request in by_rank),
        evaluate=any(request.evaluate for request in by_rank),
        skip=tuple(sorted({sample for request in by_rank for sample in request.skip})),
        skip_reason=_reasons(request.skip_reason for request in by_rank),
    )


def agree_requests(
    own: Requests, asked: Sequence[int], transport: Transport, *, device: torch.device
) -> Requests:
    """Collective where a rank asked, by `asked`, the words of all. Return what all ranks will do."""
    if not any(asked):
        return Requests()
    told = gather_bytes(transport, own.to_bytes(), device=device)
    return merge_requests([Requests.from_bytes(message) for message in told])


def _reasons(given: Iterable[str | None]) -> str | None:
    """Join reasons, each once: a callback that runs on every rank gives the same one on each."""
    return "; ".join(dict.fromkeys(reason for reason in given if reason)) or None
