"""Metrics that need all predictions together: computed once, from all rows, and told to every rank."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from samestep.comm.messages import gather_bytes
from samestep.comm.transport import Transport
from samestep.errors import LossError
from samestep.loop.metrics_rows import Column


@runtime_checkable
class Accumulating(Protocol):
    """A metric that is fed piece by piece, such as those of torchmetrics."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Take in some rows."""

    def compute(self) -> Any:
        """Return the value over all rows."""

    def reset(self) -> None:
        """Forget all rows."""


@runtime_checkable
class _MeetsByItself(Protocol):
    """A metric that would call collectives of its own where a process group is there."""

    distributed_available_fn: Callable[[], bool]


GatheredMetric: TypeAlias = Callable[..., Any] | Accumulating


@final
class Gathered:
    """Computes the metrics of all rows on the first rank, and gives every rank the same numbers.

    Equal kernels on all ranks are not needed for that, since only one rank computes.
    """

    def __init__(
        self,
        metrics: Mapping[str, GatheredMetric],
        transport: Transport,
        *,
        rows_at_once: int,
        device: torch.device,
    ) -> None:
        self._metrics = metrics
        self._transport = transport
        self._rows_at_once = rows_at_once
        self._device = device
        self._cause: Exception | None = None

    def values(self, rows: Mapping[str, Column] | None) -> bytes:
        """Compute the metrics, where `rows` are: on the first rank. Return what `shared` tells the others.

        An Accumulating metric is copied, reset, and fed the rows in sample order, `rows_at_once` at a time:
        what a plain loop over the data would do.
        """
        if rows is None:
            return b""
        told: dict[str, float] = {}
        for name, metric in self._metrics.items():
            try:
                told |= _numbers(name, self._value(name, metric, rows))
            except Exception as error:  # told to all ranks, which raise it alike
                self._cause = error
                return json.dumps({name: f"{type(error).__name__}: {error}"}).encode()
        return json.dumps(told).encode()

    def shared(self, message: bytes) -> dict[str, float]:
        """Collective. Return the values on every rank; LossError, on all alike, where a metric failed."""
        told = json.loads(gather_bytes(self._transport, message, device=self._device)[0])
        for name, value in told.items():
            if isinstance(value, str):
                raise LossError(f"metric {name} failed over the gathered rows: {value}") from self._cause
        return dict(told)

    def _value(self, name: str, metric: GatheredMetric, rows: Mapping[str, Column]) -> Any:
        if not isinstance(metric, Accumulating):
            return metric(**_asked(name, metric, rows))
        fresh = _alone(copy.deepcopy(metric))
        fresh.reset()
        wanted = _asked(name, fresh.update, rows)
        num_rows = len(next(iter(rows.values())))
        for start in range(0, num_rows, self._rows_at_once):
            fresh.update(**{key: rows[start : start + self._rows_at_once] for key, rows in wanted.items()})
        return fresh.compute()


def _alone(metric: Accumulating) -> Accumulating:
    """Keep a metric and its parts from meeting other ranks, which are not called here."""
    parts = list(metric.modules()) if isinstance(metric, nn.Module) else [metric]
    for part in parts:
        if isinstance(part, _MeetsByItself):
            part.distributed_available_fn = _never
    if isinstance(metric, nn.Module):
        metric.to("cpu")  # where the rows are
    return metric


def _never() -> bool:
    return False


def _asked(name: str, function: Callable[..., Any], rows: Mapping[str, Column]) -> dict[str, Column]:
    """Return the rows that a function names among its parameters; all, where it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-in functions do not tell
        return dict(rows)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(rows)
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if missing := [wanted for wanted in required if wanted not in rows]:
        raise LossError(
            f"it takes {', '.join(required)}, but predict returns {', '.join(rows)}. Name the rows as metric "
            f"{name} names its parameters ({', '.join(missing)}), or wrap it in a function of your names."
        )
    return {parameter.name: rows[parameter.name] for parameter in parameters if parameter.name in rows}


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Return a metric's numbers by name: one, or those of a dict under names with a slash."""
    if isinstance(value, Mapping):
        return {
            key: one
            for part, inner in value.items()
            for key, one in _numbers(f"{name}/{part}", inner).items()
        }
    if isinstance(value, Tensor | np.ndarray | np.generic) and np.prod(value.shape) == 1:
        return {name: float(value.item())}
    if isinstance(value, Real):
        return {name: float(value)}
    raise LossError(f"it returned a {type(value).__name__}. Return a number, or a dict of numbers by name.")
