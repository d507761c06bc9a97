"""What must be equal on all ranks before the first step: made equal where right, refused elsewhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.errors import Disagreement
from samestep.numerics.fingerprint import model_tensors, raw_bytes

SAME_SETTINGS = "Every rank must build the same model, optimizer and data set from the same settings."


def require_equal(
    transport: Transport,
    facts: Mapping[str, object],
    *,
    device: torch.device,
    remedy: str = SAME_SETTINGS,
) -> None:
    """Collective. Raise Disagreement, on every rank alike, where a fact differs; it names fact and ranks."""
    message = json.dumps({key: str(value) for key, value in facts.items()}).encode()
    by_rank: list[dict[str, str]] = [
        json.loads(text) for text in gather_bytes(transport, message, device=device)
    ]
    for key in dict.fromkeys(key for told in by_rank for key in told):
        values = [told.get(key, "nothing") for told in by_rank]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise Disagreement(f"{key}: {values[0]} on rank 0, but {value} on rank {rank}. {remedy}")


def make_model_equal(
    model: nn.Module,
    transport: Transport,
    *,
    beside: Sequence[tuple[str, Tensor]] = (),
    device: torch.device,
) -> list[str]:
    """Collective. Give every rank rank 0's values; return the names of tensors that differed anywhere.

    Buffers outside the state dict count too: one that is drawn at random would differ as well. `beside` are
    tensors that are trained but not the model's.
    Raises Disagreement where names, shapes or dtypes differ: there is nothing to copy then.
    """
    tensors = model_tensors(model)
    known = {id(tensor) for _, tensor in tensors}
    tensors += [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in known]
    tensors += beside
    require_equal(
        transport,
        {
            "the number of parameters and buffers": len(tensors),
            **{
                f"tensor {number} of the model": f"{name} {tuple(tensor.shape)} {tensor.dtype}".replace(
                    "torch.", ""
                )
                for number, (name, tensor) in enumerate(tensors)
            },
        },
        device=device,
    )
    hashes = b"".join(short_hash(tensor) for _, tensor in tensors)
    by_rank = gather_bytes(transport, hashes, device=device)
    differing = [
        (name, tensor)
        for number, (name, tensor) in enumerate(tensors)
        if len({told[8 * number : 8 * number + 8] for told in by_rank}) > 1
    ]
    if differing:
        _send_from_first([tensor for _, tensor in differing], transport)
    return [name for name, _ in differing]


def short_hash(tensor: Tensor) -> bytes:
    """Return 8 bytes that two tensors share where they have the same bits."""
    content = raw_bytes(tensor) if tensor.numel() else b""
    return hashlib.blake2b(content, digest_size=8).digest()


@torch.no_grad()
def _send_from_first(tensors: Sequence[Tensor], transport: Transport) -> None:
    is_first = transport.rank == 0
    for tensor in tensors:
        flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat)
        sends = [flat if is_first else None] * transport.world_size
        receives = [flat if rank == 0 and not is_first else None for rank in range(transport.world_size)]
        transport.exchange(sends, receives).wait()
        if not is_first:
            whole = torch.view_as_complex(flat) if tensor.is_complex() else flat
            tensor.detach().copy_(whole.view(tensor.shape))
