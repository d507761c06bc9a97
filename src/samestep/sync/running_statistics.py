"""BatchNorm's running statistics: made per micro-batch, replayed in micro-batch order on every rank.

Each micro-batch is normalised by its own statistics, as in a plain loop, and starts from those that the step
started from: a layer in evaluation mode reads real values, and no rank sees what another left. A running
statistic is linear in the ones that enter it, r <- (1 - m) r + m s. So k updates that lead from the step's
start r0 to x lead from any r to x + (1 - m)^k (r - r0). Replaying each leaf's (x, k) in order gives the same
bits on every rank, for every split.

Nothing is hooked into the layers: what a leaf added follows from where it started and ended. A compiled
model, whose graph knows no hooks that come later, is treated like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.comm.transport import Transport
from samestep.errors import ConfigError
from samestep.numerics.fingerprint import fingerprint

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(slots=True)
class _Tracked:
    name: str
    module: _NormBase
    mean: Tensor
    var: Tensor
    count: Tensor
    version: int = 0  # of `mean`, when the leaf began: instance norm counts no calls

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.mean, self.var, self.count

    @property
    def num_values(self) -> int:
        return self.mean.numel() + self.var.numel()

    def held(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the module holds now: a loop or a forward pass may have given it other tensors."""
        mean, var, count = (getattr(self.module, key) for key in _BUFFERS)
        if mean is None or var is None or count is None or mean.shape != self.mean.shape:
            raise ConfigError(
                f"{self.name} had running statistics of {self.mean.numel()} channels at the set-up, and has "
                "none or others now. Change the layers of a model before session.setup."
            )
        return mean, var, count

    def adopt(self) -> None:
        self.mean, self.var, self.count = self.held()

    def put_back(self) -> None:
        for key, tensor in zip(_BUFFERS, self.tensors, strict=True):
            if getattr(self.module, key) is not tensor:
                setattr(self.module, key, tensor)

    def num_writes(self) -> int:
        return self.mean._version - self.version if self.module.running_mean is self.mean else 0

    def factors(self, updates: float, seen: float, first: float) -> tuple[float, float, float, float]:
        """Return those of a leaf's end, of the values before it and of the step's start; 1 where it counts.

        `updates` are the leaf's own; `seen` and `first` are the layer's count before it and at the start.
        """
        if not updates:
            return 0.0, 0.0, 0.0, 0.0
        momentum = self.module.momentum
        if momentum is None and not isinstance(self.module, nn.modules.instancenorm._InstanceNorm):
            total = seen + updates  # the average over all updates
            return (first + updates) / total, seen / total, first / total, 1.0
        shrink = (1.0 - (momentum or 0.0)) ** updates  # instance norm takes no momentum for 0
        return 1.0, shrink, shrink, 1.0


@final
class RunningStatistics:
    """Takes over the running statistics of a model's normalisation layers.

    A row holds all of them, layer by layer the mean and then the variance, and then each layer's count, in
    float64, which is exact for all that the layers hold.
    """

    def __init__(self, model: nn.Module, transport: Transport) -> None:
        self._transport = transport
        self._tracked = list(_find(model))
        sizes = [t.num_values for t in self._tracked]
        self._width = sum(sizes)
        self._device = self._tracked[0].mean.device if self._tracked else torch.device("cpu")
        layers = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
        self._layer_of = layers.to(self._device)  # of each value in a row
        self._rows: list[Tensor] = []  # of this rank's leaves: where each ended, then its writes by layer
        self._started = False
        self._agreed = self._origin = self._row()  # as the last step left them, and as this one found them

    @property
    def named(self) -> list[tuple[str, Tensor]]:
        """The buffers that are taken care of here, by name."""
        return [
            (f"{t.name}.{key}".lstrip("."), tensor)
            for t in self._tracked
            for key, tensor in zip(_BUFFERS, t.tensors, strict=True)
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers that are taken care of here."""
        return [tensor for _, tensor in self.named]

    def begin(self) -> None:
        """Start a step, from the statistics that its first leaf finds, or else `changes`."""
        self._rows = []
        self._started = False

    def changes(self) -> dict[str, str]:
        """Return a hash of each statistic that something changed between the last step and this one."""
        self._start()
        # By bits: a NaN is equal to itself here.
        if torch.equal(self._origin.view(torch.int64), self._agreed.view(torch.int64)):
            return {}
        hashes = zip(self._hashes(self._agreed), self._hashes(self._origin), strict=True)
        return {name: now for (name, before), (_, now) in hashes if now != before}

    def before_leaf(self) -> None:
        """Let a leaf start where the step started."""
        if self._started:
            self.restore()  # a pass outside of the leaves may have moved them
        self._start()
        for t in self._tracked:
            t.version = t.mean._version

    def after_leaf(self) -> None:
        """Keep where the leaf ended, and go back to the start of the step."""
        if self._tracked:
            writes = torch.tensor([t.num_writes() for t in self._tracked], dtype=torch.float64)
            self._rows.append(torch.cat([self._row(), writes.to(self._device)]))
            self.restore()

    def replay(self, runs: Sequence[range]) -> None:
        """Collective. Apply all leaves of the step, in order, to the statistics it started from."""
        if not self._tracked:
            return
        self._start()
        columns = self._width + 2 * len(self._tracked)
        by_rank = [torch.empty(len(run), columns, dtype=torch.float64, device=self._device) for run in runs]
        if self._rows:
            by_rank[self._transport.rank].copy_(torch.stack(self._rows))
        self._transport.gather(by_rank[self._transport.rank], by_rank).wait()
        rows = torch.cat(by_rank)
        origin = self._origin[: self._width]
        values = origin
        for ends, factors in zip(rows[:, : self._width], self._factors(rows), strict=True):
            end, before, start, took_part = factors[:, self._layer_of]
            moved = end * ends + (before * values - start * origin)
            values = torch.where(took_part != 0, moved, values)
        counts = self._origin[self._width :]
        updates = (rows[:, self._width : columns - len(self._tracked)] - counts).sum(0)
        self._write(torch.cat([values, counts + updates]))
        self._agreed = self._row()
        self._started = False

    def restore(self) -> None:
        """Put back the statistics of the start of the step, which is given up."""
        if self._started and self._tracked:
            self._write(self._origin)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for t in self._tracked:
                t.adopt()
            self._origin = self._row()

    def _row(self) -> Tensor:
        if not self._tracked:
            return torch.empty(0, dtype=torch.float64)
        held = [t.held() for t in self._tracked]
        values = torch.cat([tensor.detach() for mean, var, _ in held for tensor in (mean, var)])
        counts = torch.stack([count.view(()) for _, _, count in held])
        return torch.cat([values.double(), counts.double()])

    @torch.no_grad()
    def _write(self, row: Tensor) -> None:
        for t in self._tracked:
            t.put_back()
        targets = [tensor.view(-1) for t in self._tracked for tensor in t.tensors]
        torch._foreach_copy_(targets, [part.view(-1) for layer in self._split(row) for part in layer])

    def _split(self, row: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        values, counts = row[: self._width], row[self._width :]
        layers = torch.split(values, [t.num_values for t in self._tracked])
        for t, layer, count in zip(self._tracked, layers, counts, strict=True):
            yield layer[: t.mean.numel()], layer[t.mean.numel() :], count

    def _hashes(self, row: Tensor) -> list[tuple[str, str]]:
        parts = [part for layer in self._split(row) for part in layer]
        return [(name, fingerprint({name: part})) for (name, _), part in zip(self.named, parts, strict=True)]

    def _factors(self, rows: Tensor) -> Tensor:
        """Return (leaves, 4, layers): what `_Tracked.factors` says of each."""
        first = seen = self._origin[self._width :].tolist()
        by_leaf: list[list[tuple[float, float, float, float]]] = []
        for updates in self._updates(rows):
            by_leaf.append(
                [t.factors(*told) for t, *told in zip(self._tracked, updates, seen, first, strict=True)]
            )
            seen = [before + more for before, more in zip(seen, updates, strict=True)]
        shape = (len(rows), len(self._tracked), 4)
        return torch.tensor(by_leaf, dtype=torch.float64).view(shape).transpose(1, 2).to(self._device)

    def _updates(self, rows: Tensor) -> list[list[float]]:
        """Return how often each leaf updated each layer."""
        num_layers = len(self._tracked)
        calls = rows[:, self._width : -num_layers] - self._origin[self._width :]
        writes = rows[:, -num_layers:]
        differs = rows[:, : self._width] != self._origin[: self._width]
        sizes = [t.num_values for t in self._tracked]
        moved = torch.stack([layer.any(1) for layer in torch.split(differs, sizes, dim=1)], dim=1)
        # A layer of the user's own may count neither calls nor writes: one update, then.
        updates = torch.where(calls > 0, calls, torch.where(writes > 0, writes, moved.double()))
        told: list[list[float]] = updates.tolist()
        return told


def _find(model: nn.Module) -> Iterator[_Tracked]:
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"{name} is a SyncBatchNorm, whose statistics depend on the ranks. Use BatchNorm (each "
                "micro-batch is normalised by its own statistics), GroupNorm or LayerNorm."
            )
        if isinstance(module, _NormBase):
            mean, var, count = module.running_mean, module.running_var, module.num_batches_tracked
            if mean is not None and var is not None and count is not None:
                yield _Tracked(name, module, mean, var, count)
