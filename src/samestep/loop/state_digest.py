"""The digest of a run's state, and what is said where ranks hold different buffers.

Of the parameters each rank adds up what it owns. Buffers are held whole by all ranks, and each hashes its
own: the digest of one rank's copy would say nothing of the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.errors import Disagreement, InternalError
from samestep.loop.parts import Parts
from samestep.numerics.digest import MASK, Digest
from samestep.numerics.fingerprint import raw_bytes

_REMEDY = (
    "What changes buffers (a forward pass in training mode, a load of a state, a callback) must run on every "
    "rank alike, not on one alone."
)


def state_digest(parts: Parts, transport: Transport) -> str:
    """Collective. Return 16 hex digits over the trained parameters and the model's buffers.

    Raises Disagreement, on every rank alike, where ranks hold different buffers.
    """
    digest = Digest(parts.device)
    for flat, start, stop in parts.layout.owned(transport.rank):
        tile = parts.layout.flats[flat].tile
        digest.add_tiles(parts.store.flats[flat][start:stop], start // tile, tile, salt=flat)
    hashes = {
        name: _hash(tensor, salt=number)
        for number, (name, tensor) in enumerate([*parts.statistics.named, *parts.buffers.named])
    }
    own = torch.tensor([_signed(digest.value), _signed(sum(hashes.values()))], dtype=torch.int64)
    by_rank = transport.ballot(own).tolist()
    if any(buffers != by_rank[0][1] for _, buffers in by_rank):
        told = {name: str(value) for name, value in hashes.items()}
        _refuse(told, transport, "the digest", "does not have the same values", device=parts.device)
    total = Digest(parts.device)
    for parameters, _ in by_rank:
        total.add_number(parameters)
    total.add_number(by_rank[0][1])
    return total.hex()


def changed_buffers(parts: Parts) -> dict[str, str]:
    """Return a hash of each buffer that something changed between the last step and this one."""
    return parts.statistics.changes() | parts.buffers.changes()


def word_of(changes: Mapping[str, str]) -> int:
    """Return one word for the ballot, in 63 bits: 0 where nothing was changed."""
    if not changes:
        return 0
    content = json.dumps(sorted(changes.items())).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def require_same_changes(
    changes: Mapping[str, str],
    words: Sequence[int],
    transport: Transport,
    *,
    step: int,
    device: torch.device,
) -> None:
    """Collective where words differ. Raise Disagreement for changes that `word_of` told apart, by rank."""
    if any(word != words[0] for word in words):
        what = "was changed before this step, but not to the same values"
        _refuse(changes, transport, f"step {step}", what, device=device)


def _refuse(
    told: Mapping[str, str], transport: Transport, where: str, what: str, *, device: torch.device
) -> NoReturn:
    """Collective. Name the first buffer of which ranks tell different things."""
    message = json.dumps(dict(told)).encode()
    by_rank = [json.loads(text) for text in gather_bytes(transport, message, device=device)]
    for name in dict.fromkeys(name for told_there in by_rank for name in told_there):
        for rank, told_there in enumerate(by_rank):
            if told_there.get(name) != by_rank[0].get(name):
                raise Disagreement(
                    f"{where}: buffer {name} {what} on every rank: rank {rank} is unlike rank 0. {_REMEDY}"
                )
    raise InternalError("ranks brought different words for the same buffers.")


def _hash(tensor: Tensor, *, salt: int) -> int:
    content = raw_bytes(tensor) if tensor.numel() else b""
    hashed = hashlib.blake2b(content, digest_size=8, salt=salt.to_bytes(8, "little")).digest()
    return int.from_bytes(hashed, "little")


def _signed(value: int) -> int:
    value &= MASK
    return value - 2**64 if value >= 2**63 else value
