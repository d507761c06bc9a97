"""Run one operation under one condition after another, and name the results whose bits move."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias, TypeVar, final

import torch
from torch import Tensor

from samestep.errors import NotReproducible
from samestep.numerics.exact import CUBLAS_WORKSPACES, pin
from samestep.numerics.experiments.operation import Draw, Inputs, Operation

FRESH_THREADS = (1, 2)  # what a fresh process repeats
REPEATS = {1: 3, 2: 5, 4: 3}  # by threads
OFFSETS_BYTES = (4, 8, 16, 32)  # added to an address that is a multiple of 64

Hashes: TypeAlias = dict[str, str]  # name of a result -> SHA-256 of its bits
Cell: TypeAlias = list[str] | None  # results that moved; None where the condition does not apply

REFUSED = "refused"

T = TypeVar("T")


@final
class Experiment:
    """One operation with its inputs on one device, ready to be run under any condition."""

    def __init__(self, operation: Operation, device: torch.device) -> None:
        self._operation = operation
        self._inputs = {
            name: _placed(value, 0, device) for name, value in operation.inputs(Draw(operation.name)).items()
        }
        draw = Draw(operation.name + ", gradients")
        outputs = _outputs(operation, self._inputs)
        self._incoming = {
            name: draw.normal(*value.shape).detach().to(value)
            for name, value in outputs.items()
            if value.requires_grad
        }

    @property
    def inputs(self) -> str:
        """Describe the inputs: name, shape, and dtype where it is not float32."""
        return ", ".join(_described(name, value) for name, value in self._inputs.items())

    def run(self, inputs: Inputs | None = None, rows: slice | None = None) -> dict[str, Tensor]:
        """Return every output and every gradient by name, of all samples or of some rows."""
        leaves = dict(inputs or self._inputs)
        for name in self._operation.rows if rows else ():
            leaves[name] = leaves[name].detach()[rows].clone().requires_grad_(leaves[name].requires_grad)
        outputs = _outputs(self._operation, leaves)
        results = {name: value.detach() for name, value in outputs.items()}
        incoming = {name: value[rows] if rows else value for name, value in self._incoming.items()}
        wanted = {name: value for name, value in leaves.items() if value.requires_grad}
        if incoming and wanted:
            gradients = torch.autograd.grad(
                [outputs[name] for name in incoming],
                list(wanted.values()),
                list(incoming.values()),
                allow_unused=True,
            )
            for name, gradient in zip(wanted, gradients, strict=True):
                if gradient is not None:
                    results.update(_dense(f"grad {name}", gradient))
        return results

    def hashes(self, inputs: Inputs | None = None) -> Hashes:
        """Return the hash of every result."""
        return {name: _hash(value) for name, value in self.run(inputs).items()}

    def moved_rows(self, count: int) -> list[str]:
        """Name the results of the first `count` samples that differ from those in the whole batch."""
        rows = slice(0, count)
        whole, part = self.run(), self.run(rows=rows)
        by_sample = {f"grad {name}" for name in self._operation.rows} | set(
            _outputs(self._operation, self._inputs)
        )
        cut = {name: value[rows] for name, value in whole.items() if name in by_sample}
        return [name for name, value in cut.items() if _hash(value) != _hash(part[name])]

    @property
    def samples(self) -> int:
        """Count the samples along dim 0; 0 where there are none."""
        return self._inputs[self._operation.rows[0]].shape[0] if self._operation.rows else 0

    def at_offset(self, offset: int) -> dict[str, Tensor]:
        """Return the inputs again, each `offset` bytes after a multiple of 64 bytes."""
        return {name: _placed(value, offset, value.device) for name, value in self._inputs.items()}

    def other_layout(self) -> dict[str, Tensor] | None:
        """Return the inputs with the first one's values in another memory order, if it has two dims."""
        name, value = next(iter(self._inputs.items()))
        if value.dim() < 2:
            return None
        if value.dim() == 4:
            turned = value.detach().contiguous(memory_format=torch.channels_last)
        else:
            turned = value.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
        return {**self._inputs, name: turned.requires_grad_(value.requires_grad)}


def measure(operation: Operation, device: torch.device) -> dict[str, Cell | str]:
    """Fill the columns of one operation that need no other process.

    `run_to_run` is measured with torch as it comes, all else in exact mode, where races and memory that
    nobody wrote cannot blur what is compared. `shape`, `alignment` and `layout` have one thread.
    """
    experiment = Experiment(operation, device)
    counts = _threads(REPEATS, device)
    runs = [_with_threads(count, partial(_repeat, experiment, REPEATS[count])) for count in counts]
    cells: dict[str, Cell | str] = {"run_to_run": _union(*(_moved(*repeats) for repeats in runs))}
    try:
        pinned = [_pinned(count, device, partial(_repeat, experiment, REPEATS[count])) for count in counts]
        by_input = _pinned(1, device, partial(_by_input, experiment))
    except NotReproducible:
        return {**cells, "exact": REFUSED}
    cells["exact"] = _union(*(_moved(*repeats) for repeats in pinned))
    cells["threads"] = _moved(*(repeats[0] for repeats in pinned)) if len(counts) > 1 else None
    return {**cells, **by_input}


def fresh(operation: Operation, device: torch.device) -> dict[str, Hashes]:
    """Return the hashes that a fresh process must repeat, by condition; "exact" is left out where refused."""
    experiment = Experiment(operation, device)
    found: dict[str, Hashes] = {}
    for count in _threads(FRESH_THREADS, device):
        found[f"{count} threads"] = _with_threads(count, experiment.hashes)
        with suppress(NotReproducible):
            found[f"{count} threads, exact"] = _pinned(count, device, experiment.hashes)
    return found


def moved_between(one: Mapping[str, Hashes], other: Mapping[str, Hashes], ending: str) -> list[str]:
    """Name the results that differ between two processes, under the conditions with this ending."""
    conditions = [condition for condition in one if condition.endswith(ending)]
    return _union(*(_moved(one[condition], other[condition]) for condition in conditions))


def _threads(counts: Iterable[int], device: torch.device) -> list[int]:
    return [count for count in counts if device.type == "cpu" or count == 1]


def _by_input(experiment: Experiment) -> dict[str, Cell | str]:
    first = experiment.hashes()
    turned = experiment.other_layout()
    samples = experiment.samples
    shape = {count: experiment.moved_rows(count) for count in (1, samples // 2) if samples}
    moved_rows = [f"{name} ({count} of {samples})" for count, names in shape.items() for name in names]
    return {
        "shape": moved_rows if shape else None,
        "alignment": _moved(
            first, *(experiment.hashes(experiment.at_offset(offset)) for offset in OFFSETS_BYTES)
        ),
        "layout": None if turned is None else _moved(first, experiment.hashes(turned)),
    }


def _repeat(experiment: Experiment, times: int) -> list[Hashes]:
    repeats, clutter = [], []
    for repeat in range(times):
        repeats.append(experiment.hashes())
        clutter.append(torch.randn(1000 + 4567 * repeat))  # so that the next run gets other, used addresses
    return repeats


def _described(name: str, value: Tensor) -> str:
    shape = "×".join(str(size) for size in value.shape) or "1"
    dtype = (
        "" if value.dtype in (torch.float32, torch.int64) else f" {str(value.dtype).removeprefix('torch.')}"
    )
    return f"{name} {shape}{dtype}"


def _outputs(operation: Operation, inputs: Inputs) -> dict[str, Tensor]:
    returned = operation.run(inputs)
    values = returned if isinstance(returned, tuple) else (returned,)
    names = ("out",) if len(values) == 1 else tuple(f"out {place}" for place in range(len(values)))
    return dict(zip(names, values, strict=True))


def _placed(value: Tensor, offset: int, device: torch.device) -> Tensor:
    """Copy to an address that is `offset` bytes after a multiple of 64, or the next that the dtype allows."""
    size = value.element_size()
    memory = torch.empty(value.numel() * size + 128, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 64 + max(offset, offset and size)
    place = memory[start : start + value.numel() * size].view(value.dtype).view(value.shape)
    return place.copy_(value.detach()).requires_grad_(value.requires_grad)


def _dense(name: str, value: Tensor) -> dict[str, Tensor]:
    if not value.is_sparse:
        return {name: value}
    rows = value.coalesce()
    return {f"{name} (rows)": rows.indices(), f"{name} (values)": rows.values()}


def _hash(value: Tensor) -> str:
    bits = value.detach().cpu().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()


def _moved(first: Hashes, *others: Hashes) -> list[str]:
    return [name for name in first if any(other.get(name) != first[name] for other in others)]


def _union(*lists: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _with_threads(count: int, run: Callable[[], T]) -> T:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


def _pinned(count: int, device: torch.device, run: Callable[[], T]) -> T:
    with pin(threads=count, device=device, cublas_workspace=CUBLAS_WORKSPACES[0]):
        return run()
