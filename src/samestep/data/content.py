"""Short hashes of what samples hold."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from samestep.numerics.fingerprint import raw_bytes

_DEPTH: Final = 8
_Feed: TypeAlias = Callable[[bytes | memoryview], None]


@runtime_checkable
class _Pictured(Protocol):
    """An image, or anything else that numpy reads without guessing."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


def content_hash(sample: object) -> str | None:
    """Return 16 hex digits over what a sample holds; None for kinds whose content cannot be told.

    Known are tensors, arrays, images, numbers, text, bytes, and dicts, lists and tuples of these.

    >>> content_hash({"text": "a", "label": 1}) == content_hash({"text": "a", "label": 1})
    True
    >>> content_hash(object()) is None
    True
    """
    hashed = hashlib.blake2b(digest_size=8)
    return hashed.hexdigest() if _feed(hashed.update, sample, _DEPTH) else None


def content_word(sample: object) -> int:
    """Return the hash as a number of 63 bits for a ballot; 0 where there is none."""
    told = content_hash(sample)
    return 0 if told is None else int(told, 16) >> 1


def _feed(feed: _Feed, value: object, depth: int) -> bool:
    """Feed a value with its type; say whether all of it is of a known kind."""
    feed(type(value).__name__.encode() + b"\0")
    if isinstance(value, torch.Tensor):
        return _feed_tensor(feed, value)
    if isinstance(value, np.ndarray | np.generic):
        return _feed_array(feed, np.asarray(value))
    if value is None or isinstance(value, bool | int):
        feed(repr(value).encode() + b"\0")
    elif isinstance(value, float):
        feed(struct.pack("<d", value))
    elif isinstance(value, str | bytes):
        content = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        feed(struct.pack("<q", len(content)) + content)
    elif isinstance(value, _Pictured):
        return _feed_array(feed, np.asarray(value))
    else:
        return depth > 0 and _feed_parts(feed, value, depth - 1)
    return True


def _feed_parts(feed: _Feed, value: object, depth: int) -> bool:
    if isinstance(value, Mapping):
        parts: Sequence[object] = [part for pair in value.items() for part in pair]
    elif isinstance(value, tuple | list):
        parts = value
    else:
        return False
    feed(struct.pack("<q", len(parts)))
    return all(_feed(feed, part, depth) for part in parts)


def _feed_array(feed: _Feed, array: np.ndarray[Any, Any]) -> bool:
    if array.dtype.hasobject:
        return False
    feed(f"{array.dtype.str}{array.shape}".encode())
    feed(array.tobytes())
    return True


def _feed_tensor(feed: _Feed, tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return False
    feed(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    feed(raw_bytes(tensor.detach()) if tensor.numel() else b"")
    return True
