"""What a callback must leave alone, looked at cheaply before and after it.

Seen are: parameters and buffers that are written in place or exchanged, training modes, and the settings of
the optimizer's groups. Not seen is a write through `.data` or numpy, which counts no version (ranks that
come to differ by it are found by the digest and by the fingerprint), nor the optimizer's own state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias, final

from torch import Tensor, nn
from torch.optim import Optimizer

Look: TypeAlias = dict[str, object]


@final
class Unchanged:
    """Compares two looks at a model and its optimizer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def look(self) -> Look:
        """Return what a change would move: version counters and addresses, no values."""
        seen: Look = {"the training modes": bytes(module.training for module in self._model.modules())}
        for kind, named in (
            ("parameter", self._model.named_parameters()),
            ("buffer", self._model.named_buffers()),
        ):
            for name, tensor in named:
                version = tensor._version  # noqa: SLF001  no public name
                seen[f"{kind} {name}"] = (id(tensor), tensor.data_ptr(), version, tensor.requires_grad)
        for number, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    seen[f"{key} of optimizer group {number}"] = _value(value)
        return seen

    def changed(self, before: Look, after: Look) -> list[str]:
        """Name what is not as it was."""
        return list(self._differing(before, after))

    def _differing(self, before: Look, after: Look) -> Iterator[str]:
        for name in dict.fromkeys([*before, *after]):
            if before.get(name) != after.get(name):
                yield name


def _value(value: object) -> object:
    if isinstance(value, Tensor):
        return (id(value), value._version)  # noqa: SLF001
    return value if isinstance(value, int | float | str | bool | tuple | type(None)) else id(value)
