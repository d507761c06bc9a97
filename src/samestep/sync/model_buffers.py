"""Buffers that the forward pass changes, other than running statistics.

Which rank computes a micro-batch must not matter, so none may see what another left in a buffer: each starts
from the values at the start of the step. After the step an integer buffer (a counter) has all micro-batches'
changes added, a bool buffer (a flag) is turned where any micro-batch turned it, and any other has the value
that the last micro-batch left. Buffers that are not part of the state dict are caches: they are left alone.

Values are compared, and not only version counters, because a write to `buffer.data` counts no version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from samestep.comm.transport import Transport
from samestep.errors import ConfigError, LossError
from samestep.numerics.fingerprint import fingerprint


@dataclass(slots=True)
class _Watched:
    name: str
    module: nn.Module
    attribute: str
    tensor: Tensor
    start: Tensor  # its value at the start of the step
    version: int
    moved: bool = False  # something changed it between the last step and this one
    change: Tensor | None = None  # integers: the sum of this rank's changes; else the last leaf's value

    @property
    def counts(self) -> bool:
        return not (self.tensor.is_floating_point() or self.tensor.is_complex())

    def touched(self) -> bool:
        now = getattr(self.module, self.attribute)
        if now is not self.tensor or self.tensor._version != self.version:
            return True
        return not torch.equal(self.tensor, self.start)

    def adopt(self) -> None:
        """Take the value that the module holds now as the start of the step."""
        now = getattr(self.module, self.attribute)
        if now is None:
            raise ConfigError(
                f"buffer {self.name} is None since session.setup. Change what a model holds before that."
            )
        alike = now.shape == self.start.shape and now.dtype == self.start.dtype
        self.moved |= not (alike and torch.equal(now, self.start))
        self.tensor, self.start, self.version = now, now.clone(), now._version

    def reset(self) -> None:
        setattr(self.module, self.attribute, self.tensor)
        self.tensor.copy_(self.start)
        self.version = self.tensor._version


@final
class ModelBuffers:
    """Notices which buffers change in a step, and gives all ranks the same values."""

    def __init__(self, model: nn.Module, transport: Transport, *, besides: Iterable[Tensor]) -> None:
        self._transport = transport
        handled = {id(tensor) for tensor in besides}
        kept = {id(t) for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
        self._started = False
        self._watched: list[_Watched] = []
        for path, module in model.named_modules():
            for key, tensor in module.named_buffers(recurse=False):
                if id(tensor) in kept and id(tensor) not in handled:
                    handled.add(id(tensor))  # one that two modules share is watched once
                    name = f"{path}.{key}".lstrip(".")
                    self._watched.append(_Watched(name, module, key, tensor, tensor.clone(), tensor._version))

    @property
    def num_buffers(self) -> int:
        """How many buffers are watched."""
        return len(self._watched)

    @property
    def named(self) -> list[tuple[str, Tensor]]:
        """The watched buffers, by name: all of them, for which ones change is not seen by every rank."""
        return [(w.name, w.tensor) for w in self._watched]

    def begin(self) -> None:
        """Start a step, from the values that its first leaf finds, or else `changes`."""
        self._started = False
        for w in self._watched:
            w.change = None

    def changes(self) -> dict[str, str]:
        """Return a hash of each buffer that something changed between the last step and this one."""
        self._start()
        return {w.name: fingerprint({w.name: w.start}) for w in self._watched if w.moved}

    def before_leaf(self) -> None:
        """Let a leaf find the values of the start of the step."""
        if self._started:
            self.restore()  # a pass outside of the leaves may have changed them
        self._start()

    @torch.no_grad()
    def after_leaf(self, *, is_last: bool) -> None:
        """Take in what a leaf changed; `is_last`: it is the last one of the whole global batch."""
        for w in self._watched:
            if not w.touched():
                continue
            now = getattr(w.module, w.attribute)
            if now is None or now.shape != w.start.shape or now.dtype != w.start.dtype:
                found = "None" if now is None else f"{tuple(now.shape)} {now.dtype}"
                raise LossError(
                    f"buffer {w.name} went from {tuple(w.start.shape)} {w.start.dtype} to {found} in the "
                    "forward pass. Register it with persistent=False if it is a cache."
                )
            if w.counts:
                change = now.to(torch.int64) - w.start.to(torch.int64)
                w.change = change if w.change is None else w.change + change
            elif is_last:
                w.change = now.clone()
            w.reset()

    def changed(self) -> list[bool]:
        """Say for each watched buffer whether this rank has a change for it."""
        return [w.change is not None for w in self._watched]

    @torch.no_grad()
    def settle(self, changed_by_rank: Sequence[Sequence[bool]]) -> None:
        """Collective. Apply all ranks' changes; the argument is `changed()` of every rank."""
        self._start()
        for number, w in enumerate(self._watched):
            w.moved = False
            senders = [rank for rank, flags in enumerate(changed_by_rank) if flags[number]]
            if not senders:
                continue
            dtype = torch.int64 if w.counts else w.tensor.dtype
            parts = [
                torch.empty(w.tensor.shape, dtype=dtype, device=w.tensor.device) if rank in senders else None
                for rank in range(self._transport.world_size)
            ]
            own = w.change.contiguous() if w.change is not None else None
            if own is not None:
                parts[self._transport.rank] = own
            self._transport.gather(own, parts).wait()
            w.reset()
            present = [part for part in parts if part is not None]
            if w.tensor.dtype == torch.bool:
                w.tensor.logical_xor_(torch.stack(present).sum(0) != 0)
            elif w.counts:
                w.tensor.copy_(w.start.to(torch.int64) + torch.stack(present).sum(0))
            else:
                w.tensor.copy_(present[-1])
            w.start = w.tensor.clone()
            w.version = w.tensor._version

    def restore(self) -> None:
        """Put back the values of the start of the step, which is given up."""
        for w in self._watched:
            if w.touched():
                w.reset()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for w in self._watched:
                if w.touched():
                    w.adopt()
