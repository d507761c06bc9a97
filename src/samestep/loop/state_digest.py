"""The digest of a run's state, each rank adding up what it owns."""

from __future__ import annotations

import hashlib

import torch

from samestep.comm.transport import Transport
from samestep.loop.parts import Parts
from samestep.numerics.digest import Digest
from samestep.numerics.fingerprint import raw_bytes


def state_digest(parts: Parts, transport: Transport) -> str:
    """Collective. Return 16 hex digits over the trained parameters and the model's buffers."""
    digest = Digest(parts.device)
    for flat, start, stop in parts.layout.owned(transport.rank):
        tile = parts.layout.flats[flat].tile
        digest.add_tiles(parts.store.flats[flat][start:stop], start // tile, tile, salt=flat)
    if transport.rank == 0:
        for number, tensor in enumerate([*parts.statistics.tensors, *parts.buffers.tensors]):
            content = raw_bytes(tensor) if tensor.numel() else b""
            hashed = hashlib.blake2b(content, digest_size=8, salt=number.to_bytes(8, "little")).digest()
            digest.add_number(int.from_bytes(hashed, "little"))
    own = digest.value - 2**64 if digest.value >= 2**63 else digest.value
    total = Digest(parts.device)
    for value in transport.ballot(torch.tensor([own], dtype=torch.int64)).flatten().tolist():
        total.add_number(value)
    return total.hex()
