"""Taking a batch apart into bytes, and putting it together again in another process.

Note [no sockets]: torch's own way to send a tensor hands over an open file through a socket under TMPDIR,
served by a thread of the worker. A long TMPDIR, a rank that is killed meanwhile, a small /dev/shm or many
kept batches each break it, some without a word. Here a batch travels as bytes and nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from samestep.data.slots import Place


@final
@dataclass(frozen=True, slots=True)
class Apart:
    """A batch as bytes: first its pickle, then the contents of tensors and arrays, left where they are."""

    parts: list[memoryview]
    of_tensors: tuple[bool, ...]  # for each part: contents of a tensor

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of all parts."""
        return sum(len(part) for part in self.parts)


def take_apart(batch: object) -> Apart:
    """Return a batch as bytes that share its memory. Raises whatever refuses to be pickled.

    Law: what is put together holds the same values, types, strides and leaf flags. Each tensor has memory
    of its own there: two that shared some share it no longer. A tensor takes along what lies between its
    first and its last element, so that a column of a large matrix is as large as the matrix.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(batch)
    buffers = [buffer.raw() for buffer in pickler.buffers]
    of_tensors = [id(buffer) in pickler.of_tensors for buffer in pickler.buffers]
    return Apart([stream.getbuffer(), *buffers], (False, *of_tensors))


@final
@dataclass(frozen=True, slots=True)
class Parcel:
    """A batch on its way from a worker to the rank."""

    sizes: tuple[int, ...]  # in bytes, of the parts
    of_tensors: tuple[bool, ...]
    body: bytes | Place

    def open(self, *, pin: bool = False) -> object:
        """Return the batch, in memory of its own. Raises what its classes raise when unpickled.

        With `pin`, tensors and arrays come to lie in page-locked memory, wherever the batch holds them.
        """
        parts: list[object] = []
        offset = 0
        for size, of_tensor in zip(self.sizes, self.of_tensors, strict=True):
            memory = _memory(size, pin and bool(parts))  # the pickle, the first, is not kept
            view = memory.numpy().data
            if isinstance(self.body, Place):
                self.body.read_into(view, offset)
            else:
                view[:] = self.body[offset : offset + size]
            parts.append(memory if of_tensor else view)
            offset += size
        return pickle.loads(parts[0], buffers=parts[1:])  # type: ignore[arg-type]

    def pin_memory(self) -> object:
        """Return the opened batch: what DataLoader calls in its thread that pins."""
        return self.open(pin=True)


_Reduced = tuple[Callable[..., object], tuple[object, ...]]


@final
class _Pickler(pickle.Pickler):
    """A pickler that leaves the contents of tensors and arrays where they are.

    Not that of multiprocessing, on which torch has put its sockets.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.of_tensors: set[int] = set()
        # No method of its own: a pickler in a circle would hold on to the batch until that is collected.
        super().__init__(stream, protocol=5, buffer_callback=self.buffers.append)

    def reducer_override(self, value: object) -> _Reduced:
        if not isinstance(value, torch.Tensor):
            return NotImplemented  # type: ignore[no-any-return]  # it says: as without this method
        if value.requires_grad and not value.is_leaf:
            raise pickle.PicklingError("a tensor still belongs to a graph: detach() it")
        if not _is_plain(value):
            # Then torch's own pickling copies the contents into the pickle.
            return NotImplemented  # type: ignore[no-any-return]
        buffer = pickle.PickleBuffer(_span(value).numpy().data)
        self.of_tensors.add(id(buffer))
        form = (value.dtype, tuple(value.size()), value.stride(), value.requires_grad)
        return _put_together, (buffer, *form)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether dtype, size and strides tell all about the bytes of a tensor."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
    )


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes from the first to the last element, as a tensor that shares them."""
    reach = zip(tensor.size(), tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in reach) if tensor.numel() else 0
    return tensor.detach().as_strided((length,), (1,)).view(torch.uint8)


def _put_together(
    memory: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], leaf: bool
) -> torch.Tensor:
    # Not a view: a leaf that is one may not be changed in place.
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(memory.untyped_storage(), 0, size, stride)
    return tensor.requires_grad_(leaf)


def _memory(num_bytes: int, pin: bool) -> torch.Tensor:
    if pin:  # by torch's own allocator, which keeps it until copies to the device have ended
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    # Not by torch.empty, which writes all of it once where algorithms must be deterministic.
    storage = torch.UntypedStorage(num_bytes, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (num_bytes,), (1,))
