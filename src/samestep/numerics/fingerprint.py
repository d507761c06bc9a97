"""The fingerprint: one SHA-256 by which two states are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order of its dims, whatever its strides."""
    flat = tensor.detach().cpu().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    return flat.reshape(-1).view(torch.uint8).numpy().data


def fingerprint(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """Hash names, dtypes, shapes and bytes, in the order given: 64 hex digits.

    Equal fingerprints mean equal bits. -0.0 and 0.0 differ, and so do NaNs with other payloads.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def model_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters, then the buffers of the state dict, each under its first name, tied ones once.

    torch.compile's wrapper adds a prefix to names, which is taken off: a compiled model is the same model.
    """
    kept = {id(t) for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    named: list[tuple[str, Tensor]] = list(model.named_parameters())
    named += [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) in kept]
    return [(name.replace("_orig_mod.", ""), tensor) for name, tensor in named]


def model_fingerprint(model: nn.Module) -> str:
    """Hash a model's parameters and the buffers of its state dict."""
    return fingerprint(model_tensors(model))
