"""What a callback must leave alone, looked at cheaply before and after it.

Seen are: parameters that are written in place or whose `.data` is replaced, buffers that are written or
assigned, parameters that are frozen or not, training modes, and the settings of the optimizer's groups. Not
seen is a write through `.data` or numpy, which counts no version (ranks that come to differ by it are found
by the digest and by the fingerprint), another Parameter in a module's place, and the optimizer's own state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.optim import Optimizer


class Look(NamedTuple):
    """What a change would move: version counters and addresses, no values."""

    modes: bytes
    parameters: list[tuple[int, int, bool]]  # version, address, whether it needs a gradient
    buffers: list[tuple[int, int]]  # identity, version
    settings: list[dict[str, Any]]  # of the optimizer's groups


@final
class Unchanged:
    """Compares two looks at a model and its optimizer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._modules = list(model.modules())
        self._names, self._parameters = [], []
        for name, parameter in model.named_parameters():
            self._names.append(name)
            self._parameters.append(parameter)
        self._buffers = [
            (f"{path}.{key}".lstrip("."), module, key)
            for path, module in model.named_modules()
            for key, _ in module.named_buffers(recurse=False)
        ]

    def look(self) -> Look:
        """Return how everything is now."""
        return Look(
            modes=bytes([module.training for module in self._modules]),
            parameters=[(p._version, p.data_ptr(), p.requires_grad) for p in self._parameters],  # noqa: SLF001
            buffers=[_buffer(getattr(module, key, None)) for _, module, key in self._buffers],
            settings=[
                {key: _setting(value) for key, value in group.items() if key != "params"}
                for group in self._optimizer.param_groups
            ],
        )

    def changed(self, before: Look, after: Look) -> list[str]:
        """Name what is not as it was."""
        return [] if before == after else list(self._differing(before, after))

    def _differing(self, before: Look, after: Look) -> Iterator[str]:
        for name, was, now in zip(self._names, before.parameters, after.parameters, strict=True):
            if was != now:
                yield f"parameter {name}"
        for (name, _, _), seen, sees in zip(self._buffers, before.buffers, after.buffers, strict=True):
            if seen != sees:
                yield f"buffer {name}"
        if before.modes != after.modes:
            yield "the training modes"
        if len(before.settings) != len(after.settings):
            yield "the number of optimizer groups"
        for number, (had, has) in enumerate(zip(before.settings, after.settings, strict=False)):
            for key in dict.fromkeys([*had, *has]):
                if had.get(key) != has.get(key):
                    yield f"{key} of optimizer group {number}"


def _buffer(buffer: Tensor | None) -> tuple[int, int]:
    return (id(buffer), -1 if buffer is None else buffer._version)  # noqa: SLF001


def _setting(value: object) -> object:
    if isinstance(value, Tensor):
        return (id(value), value._version)  # noqa: SLF001
    return value if isinstance(value, int | float | str | bool | tuple | type(None)) else id(value)
