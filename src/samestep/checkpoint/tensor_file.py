"""Writing tensors in the safetensors format, straight from their memory, and reading parts of them.

The library's own writer makes a second copy of every tensor and hides which error of the system stopped it;
here the bytes go to the file as they lie, are hashed on the way, and are on the disk at the end. Files are
read by the library, and by every other reader of the format.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.errors import InternalError

_PART: Final = 1 << 24  # bytes written and hashed at a time
_ALIGNMENT: Final = 8  # of the first tensor, as the format asks for

NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a finished file is known by."""

    num_bytes: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write contiguous CPU tensors of real dtypes to a new file, and wait until it is on the disk.

    Raises OSError as the system gives it: no space, no permission.
    """
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise InternalError(f"{name}: {tensor.dtype} on {tensor.device} is not ready to be written.")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    hashed, total = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        head = memoryview(len(text).to_bytes(8, "little") + text)
        for content in (head, *map(_bytes_of, tensors.values())):
            for start in range(0, len(content), _PART):
                part = content[start : start + _PART]
                hashed.update(part)
                total += len(part)
                taken = 0
                while taken < len(part):  # a full disk may take some, and refuse the rest the next time
                    taken += file.write(part[taken:])
        os.fsync(file.fileno())
    return Written(num_bytes=total, sha256=hashed.hexdigest())


def hash_file(path: Path) -> Written:
    """Return size and hash of what lies in a file. Raises OSError."""
    hashed, total = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(_PART):
            hashed.update(part)
            total += len(part)
    return Written(num_bytes=total, sha256=hashed.hexdigest())


def write_text(path: Path, text: str) -> None:
    """Write a small file and wait until it is on the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes_of(tensor: Tensor) -> memoryview[int]:
    if not tensor.numel():
        return memoryview(b"")
    content: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return content.data
