"""What all ranks must hold alike at the end: one fingerprint, or the name of the tensor that differs."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.errors import Disagreement
from samestep.numerics.fingerprint import model_fingerprint, model_tensors, raw_bytes

_HASH_BYTES = 8


def agreed_fingerprint(model: nn.Module, transport: Transport, *, device: torch.device) -> str:
    """Collective. Return the model's fingerprint; raise Disagreement on every rank where they differ."""
    found = model_fingerprint(model)
    told = gather_bytes(transport, found.encode(), device=device)
    if any(other != told[0] for other in told):
        raise Disagreement(_difference(model, transport, device))
    return found


def _difference(model: nn.Module, transport: Transport, device: torch.device) -> str:
    """Collective. Say which tensors differ, and where."""
    tensors = model_tensors(model)
    by_rank = gather_bytes(transport, b"".join(_hash(tensor) for _, tensor in tensors), device=device)
    differing: list[str] = []
    where = 0  # the first rank that is unlike rank 0
    for number, (name, _) in enumerate(tensors):
        own = slice(_HASH_BYTES * number, _HASH_BYTES * (number + 1))
        unlike = [rank for rank, hashes in enumerate(by_rank) if hashes[own] != by_rank[0][own]]
        if unlike:
            where = where or unlike[0]
            differing.append(name)
    if not differing:
        return "the names, shapes or dtypes of the model's tensors are not the same on all ranks."
    more = f" ({len(differing)} tensors differ in all)" if len(differing) > 1 else ""
    return (
        f"the model is not the same on all ranks: {differing[0]} has other values on rank {where} than on "
        f"rank 0{more}. Whatever changes the model outside of session.step, a callback or a loaded state, "
        "must do the same on every rank."
    )


def _hash(tensor: Tensor) -> bytes:
    content = raw_bytes(tensor) if tensor.numel() else b""
    return hashlib.blake2b(content, digest_size=_HASH_BYTES).digest()
