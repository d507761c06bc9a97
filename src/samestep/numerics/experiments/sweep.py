"""Run torch's own list of operations, with torch's own sample inputs, in exact mode.

The list belongs to torch's test kit, which needs the package `expecttest`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from samestep.errors import ConfigError
from samestep.numerics.exact import CUBLAS_WORKSPACES, explain, pin

REPEATS = 6
SAMPLES = 25  # of one operation
DIRT = (3, 10, 50, 300, 1000, 5000)  # elements


def sweep(device: torch.device) -> str:
    """Run every operation forward and backward, six times each, and say which moved and which were refused.

    The heap is dirtied before each run, so that a kernel which reads memory it never wrote shows itself.
    """
    found: dict[str, set[str]] = {"moved": set(), "refused": set(), "failed": set()}
    runs, operations = 0, 0
    with pin(threads=1, device=device, cublas_workspace=CUBLAS_WORKSPACES[0]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's list warns of its own deprecated and beta operations
        for operation in _torch_operations():
            operations += 1
            for sample in _samples(operation, device):
                try:
                    results = [_run(operation, sample) for _ in range(REPEATS)]
                except RuntimeError as error:
                    # An eigenvector's gradient is not defined for every loss, and torch says so.
                    found["failed" if explain(error) is None else "refused"].add(operation.name)
                    break
                runs += REPEATS
                if any(result != results[0] for result in results):
                    found["moved"].add(operation.name)
    return f"{operations} operations, {runs} runs in exact mode. " + " ".join(
        f"{word.capitalize()}: {', '.join(sorted(names)) or 'none'}." for word, names in found.items()
    )


def _torch_operations() -> Iterator[Any]:
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        raise ConfigError(f"The sweep needs the package {error.name}: pip install {error.name}.") from error
    for operation in op_db:
        # "jiterator" operations are written in CUDA; what is not float32 is not about rounding.
        if torch.float32 in operation.dtypes and not operation.name.startswith("jiterator"):
            yield operation


def _samples(operation: Any, device: torch.device) -> list[Any]:
    samples = operation.sample_inputs(str(device), torch.float32, requires_grad=operation.supports_autograd)
    return list(samples)[:SAMPLES]


def _run(operation: Any, sample: Any) -> list[bytes]:
    for elements in DIRT:
        _ = torch.full((elements,), random.random()), torch.full((elements,), random.randint(0, 50))
    torch.manual_seed(0)
    start = sample.input
    if operation.name.endswith("_") and isinstance(start, Tensor):
        start = start.clone()
    outputs = _tensors(operation(start, *sample.args, **sample.kwargs))
    leaves = [
        value
        for value in _tensors([start, list(sample.args), list(sample.kwargs.values())])
        if value.requires_grad
    ]
    ends = [value for value in outputs if value.requires_grad]
    if leaves and ends:
        incoming = [torch.randn_like(value) for value in ends]
        gradients = torch.autograd.grad(ends, leaves, incoming, allow_unused=True)
        outputs += _tensors(list(gradients))
    return [_bits(value) for value in outputs]


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        if value.is_sparse:
            rows = value.coalesce()
            return [rows.indices(), rows.values()]
        return [value] if value.layout == torch.strided else []
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _bits(value: Tensor) -> bytes:
    plain = value.detach().resolve_conj().resolve_neg().cpu().flatten()
    plain = plain.clone(memory_format=torch.contiguous_format)
    return bytes(plain.view(torch.uint8).numpy().tobytes())
