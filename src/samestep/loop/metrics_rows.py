"""The rows that an evaluation predicts, one per sample, brought to the first rank in sample order.

Every rank keeps the rows of its own micro-batches in host memory, the first rank in the end those of all
samples. They travel in parts of a bounded size, to the first rank only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.errors import LossError

Column: TypeAlias = Tensor | list[Any]  # by sample: rows of a tensor on the CPU, or whatever JSON can hold

_PART: Final = 4 << 20  # bytes that one rank sends at a time
_LISTS: Final = "list"
_ROWS = (
    "predict(model, batch) must return a dict of names to one row per sample: tensors or arrays whose first "
    "dim runs over the samples of the micro-batch, or lists."
)


@final
class Rows:
    """Takes in what `predict` returned for this rank's micro-batches, in their order."""

    def __init__(self, transport: Transport, *, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._columns: dict[str, list[Column]] = {}
        self._num_rows = 0
        self._kinds: dict[str, int] = {}  # the first micro-batch of each kind of result

    def add(self, index: int, num_samples: int, result: object) -> None:
        """Take in the rows of one micro-batch. Raises LossError unless there is one for each sample."""
        if not isinstance(result, Mapping) or not result:
            raise LossError(f"predict returned a {type(result).__name__} for micro-batch {index}. {_ROWS}")
        columns = {str(name): _column(str(name), value, index) for name, value in result.items()}
        for name, column in columns.items():
            if len(column) != num_samples:
                raise LossError(
                    f"predict returned {len(column)} rows of {name} for micro-batch {index}, which has "
                    f"{num_samples} samples. {_ROWS}"
                )
            self._columns.setdefault(name, []).append(column)
        kind = json.dumps({name: _kind(column) for name, column in columns.items()})
        self._kinds.setdefault(kind, index)
        self._num_rows += num_samples

    def gathered(self) -> dict[str, Column] | None:
        """Collective. Return all rows in sample order on the first rank, None on the others.

        Raises LossError, on every rank alike, where micro-batches have rows of different kinds.
        """
        own = {name: _joined(parts) for name, parts in self._columns.items()}
        self._columns = {}
        packed = {name: _packed(name, column) for name, column in own.items()}
        sizes = {name: len(data) for name, data in packed.items()}
        message = json.dumps({"kinds": self._kinds, "sizes": sizes, "rows": self._num_rows}).encode()
        told = [json.loads(text) for text in gather_bytes(self._transport, message, device=self._device)]
        kinds = _agreed([one["kinds"] for one in told])
        columns: dict[str, Column] = {}
        for name, kind in kinds.items():
            by_rank = [one["sizes"].get(name, 0) for one in told]
            data = packed.pop(name, torch.empty(0, dtype=torch.uint8))
            parts = self._bring(data, by_rank)
            if parts is not None:
                columns[name] = _unpacked(parts, kind, num_rows=sum(one["rows"] for one in told))
        return columns if self._transport.rank == 0 else None

    def _bring(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor] | None:
        """Collective. Return every rank's bytes on the first rank."""
        world_size, is_first = self._transport.world_size, self._transport.rank == 0
        parts = [own, *(torch.empty(size, dtype=torch.uint8) for size in sizes[1:])] if is_first else None
        nothing: list[Tensor | None] = [None] * world_size
        for start in range(0, max(sizes[1:], default=0), _PART):
            if parts is None:
                part = own[start : start + _PART].to(self._device)
                self._transport.exchange([part, *nothing[1:]], nothing).wait()
                continue
            arriving = [
                torch.empty(_share(size, start), dtype=torch.uint8, device=self._device) for size in sizes
            ]
            self._transport.exchange(nothing, [None, *arriving[1:]]).wait()
            for part, arrived in zip(parts[1:], arriving[1:], strict=True):
                part[start : start + len(arrived)].copy_(arrived)
        return parts


def _share(size: int, start: int) -> int:
    return max(0, min(size, start + _PART) - start)


def _column(name: str, value: object, index: int) -> Column:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    if isinstance(value, Tensor) and value.dim() > 0:
        # A copy, for the memory of a batch serves the next one.
        return value.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()
    if isinstance(value, list | tuple):
        return list(value)
    found = "a tensor without dims" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise LossError(f"predict returned {found} as {name} for micro-batch {index}. {_ROWS}")


def _kind(column: Column) -> list[Any]:
    if isinstance(column, Tensor):
        return [str(column.dtype).removeprefix("torch."), list(column.shape[1:])]
    return [_LISTS, []]


def _joined(parts: Sequence[Column]) -> Column:
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) < len(parts):
        return [row for part in parts for row in part]
    if len({(part.dtype, part.shape[1:]) for part in tensors}) > 1:
        return tensors[0]  # refused on all ranks, by its kinds
    return torch.cat(tensors)


def _packed(name: str, column: Column) -> Tensor:
    """Return the bytes of a column: of lists as JSON, on any number of ranks alike."""
    if isinstance(column, Tensor):
        real = torch.view_as_real(column) if column.is_complex() else column
        return real.reshape(-1).view(torch.uint8)
    try:
        text = json.dumps(column).encode()
    except TypeError as error:
        raise LossError(
            f"predict returned a list as {name} whose entries cannot be stored as JSON ({error}). Rows in a "
            "list are strings, numbers, or lists of them: write tensor.tolist() for a tensor."
        ) from error
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _unpacked(parts: Sequence[Tensor], kind: Sequence[Any], *, num_rows: int) -> Column:
    dtype_name, tail = kind
    if dtype_name == _LISTS:
        return [row for part in parts if len(part) for row in json.loads(bytes(part.numpy()))]
    dtype: torch.dtype = getattr(torch, dtype_name)
    joined = torch.cat(list(parts))
    if dtype.is_complex:
        real = joined.view(dtype.to_real())
        return torch.view_as_complex(real.reshape(num_rows, *tail, 2))
    return joined.view(dtype).reshape(num_rows, *tail)


def _agreed(kinds_by_rank: Sequence[Mapping[str, int]]) -> dict[str, list[Any]]:
    found = [(index, json.loads(kind)) for kinds in kinds_by_rank for kind, index in kinds.items()]
    first_index, first = found[0]
    for index, other in found[1:]:
        if other != first:
            raise LossError(
                f"predict returned {_told(first)} for micro-batch {first_index}, but {_told(other)} for "
                f"micro-batch {index}. Rows must be alike in all micro-batches: pad them to one length, or "
                "return lists, whose rows may differ."
            )
    return dict(first)


def _told(kinds: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(
        f"{name} as a list" if dtype == _LISTS else f"{name} as {dtype} rows of shape {tuple(tail)}"
        for name, (dtype, tail) in kinds.items()
    )
