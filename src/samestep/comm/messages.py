"""Short messages of any length between all ranks: for agreements, not for gradients."""

from __future__ import annotations

import torch

from samestep.comm.transport import Transport


def gather_bytes(transport: Transport, message: bytes, *, device: torch.device) -> list[bytes]:
    """Collective. Return the messages of all ranks, by rank."""
    lengths = transport.ballot(torch.tensor([len(message)], dtype=torch.int64)).flatten().tolist()
    parts = [torch.empty(length, dtype=torch.uint8, device=device) for length in lengths]
    if message:
        parts[transport.rank].copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    transport.gather(parts[transport.rank], parts).wait()
    return [bytes(part.cpu().numpy()) for part in parts]
