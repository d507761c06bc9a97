"""BatchNorm's running statistics: made per micro-batch, replayed in micro-batch order on every rank.

Each micro-batch is normalised by its own statistics, as in a plain loop. A running statistic is linear in
the ones that enter it, r <- (1 - m) r + m s, so a micro-batch that starts from r = 0 leaves what it adds,
and k updates in it shrink the old value by (1 - m)^k. Replaying (shrink, add) for the leaves in order gives
the same bits on every rank, for every split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.comm.transport import Transport
from samestep.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Tracked:
    module: _NormBase
    mean: Tensor
    var: Tensor
    count: Tensor
    start: int  # in the row of all statistics
    versions: list[int]  # of `mean`, when the leaf began: instance norm counts no calls

    @property
    def counts_calls(self) -> bool:
        """Whether the module counts its updates itself."""
        return not isinstance(self.module, nn.modules.instancenorm._InstanceNorm)


@final
class RunningStatistics:
    """Takes over the running statistics of a model's normalisation layers."""

    def __init__(self, model: nn.Module, transport: Transport) -> None:
        self._transport = transport
        self._tracked: list[_Tracked] = []
        width = 0
        for name, module in model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise ConfigError(
                    f"{name} is a SyncBatchNorm, whose statistics depend on the ranks. Use BatchNorm (each "
                    "micro-batch is normalised by its own statistics), GroupNorm or LayerNorm."
                )
            if isinstance(module, _NormBase) and module.running_mean is not None:
                mean, var = module.running_mean, module.running_var
                count = module.num_batches_tracked
                if var is not None and count is not None:
                    self._tracked.append(_Tracked(module, mean, var, count, width, []))
                    width += 2 * mean.numel()
        self._width = width
        self._device = self._tracked[0].mean.device if self._tracked else torch.device("cpu")
        self._rows: list[Tensor] = []
        self._running: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers that are taken care of here."""
        return [tensor for t in self._tracked for tensor in (t.mean, t.var, t.count)]

    def begin(self) -> None:
        """Start a step: remember the statistics that it starts from."""
        self._rows = []
        self._running = [(t.mean.clone(), t.var.clone(), t.count.clone()) for t in self._tracked]

    def before_leaf(self) -> None:
        """Let the training layers start from zero, so that the leaf leaves just what it adds."""
        for t in self._tracked:
            if t.module.training:
                for tensor in (t.mean, t.var, t.count):
                    tensor.zero_()
            t.versions[:] = [t.mean._version]

    def after_leaf(self) -> None:
        """Keep what the leaf left: per layer its mean and variance terms, then the number of updates."""
        if not self._tracked:
            return
        row = torch.zeros(self._width + len(self._tracked), dtype=torch.float64, device=self._device)
        for number, t in enumerate(self._tracked):
            if not t.module.training:
                continue
            size = t.mean.numel()
            row[t.start : t.start + size] = t.mean
            row[t.start + size : t.start + 2 * size] = t.var
            row[self._width + number] = self._updates(t)
        self._rows.append(row)

    def replay(self, runs: Sequence[range]) -> None:
        """Collective. Apply all leaves of the step, in order, to the statistics it started from."""
        if not self._tracked:
            return
        columns = self._width + len(self._tracked)
        by_rank = [torch.empty(len(run), columns, dtype=torch.float64, device=self._device) for run in runs]
        if self._rows:
            by_rank[self._transport.rank].copy_(torch.stack(self._rows))
        self._transport.gather(by_rank[self._transport.rank], by_rank).wait()
        for number, (t, start) in enumerate(zip(self._tracked, self._running, strict=True)):
            for tensor, value in zip((t.mean, t.var, t.count), start, strict=True):
                tensor.copy_(value)
            for row in torch.cat(by_rank):
                self._apply(t, row, updates=int(row[self._width + number]))

    def restore(self) -> None:
        """Put back the statistics of the start of the step, which is given up."""
        for t, start in zip(self._tracked, self._running, strict=True):
            for tensor, value in zip((t.mean, t.var, t.count), start, strict=True):
                tensor.copy_(value)

    def _apply(self, t: _Tracked, row: Tensor, *, updates: int) -> None:
        if not updates:
            return
        size = t.mean.numel()
        if t.module.momentum is None and t.counts_calls:  # the average over all updates so far
            seen = int(t.count)
            shrink, gain = seen / (seen + updates), updates / (seen + updates)
        else:  # instance norm takes no momentum for 0
            shrink, gain = (1 - (t.module.momentum or 0.0)) ** updates, 1.0
        t.mean.mul_(shrink).add_(row[t.start : t.start + size].to(t.mean), alpha=gain)
        t.var.mul_(shrink).add_(row[t.start + size : t.start + 2 * size].to(t.var), alpha=gain)
        if t.counts_calls:
            t.count.add_(updates)

    def _updates(self, t: _Tracked) -> int:
        return int(t.count) if t.counts_calls else t.mean._version - t.versions[0]
