"""Small runs of which only the samples matter: what each step owned, stopped and gone on with at will."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import samestep
from samestep.callbacks.callback import Callback, RunControl
from samestep.config.checkpointing import Checkpointing
from samestep.events import Event, StepReport
from samestep.testing.threads import run_threads


def point(number: int) -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(number))


class Points:
    """Map-style; sample i is drawn from its number."""

    def __init__(self, num_samples: int = 61, first: int = 0) -> None:
        self._num_samples, self._first = num_samples, first

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        return point(self._first + index) + 0.01 * torch.randn(4)  # augmentation by position


class Stream:
    """The plainest stream: each pass from the first sample on, and nobody knows how many."""

    def __init__(self, num_samples: int = 61, first: int = 0) -> None:
        self.num_samples, self.first = num_samples, first

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.num_samples):
            yield point(self.first + number) + 0.01 * torch.randn(4)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.num_samples


class Loss:
    """Squares of a linear map; in the listed steps it overflows, so that they are skipped."""

    def __call__(self, model: nn.Module, batch: Tensor) -> samestep.Weighted:
        return samestep.weighted(model(batch).square().sum(1))


class Quarantine(Callback):
    """Asks, after given steps, for samples of that step to be passed over."""

    def __init__(self, asks: dict[int, Sequence[int]]) -> None:
        self._asks = asks

    def on_step(self, report: StepReport, run: RunControl) -> None:
        if report.step in self._asks:
            run.skip(tuple(self._asks[report.step]), "a test")


def train(
    dataset: Any,
    batching: samestep.Batching,
    *,
    ranks: int = 1,
    folder: Path | None = None,
    every: int | None = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    asks: dict[int, Sequence[int]] | None = None,
    seen: list[Event] | None = None,
    **arguments: Any,
) -> samestep.Result:
    """Train on threads; `dataset` may be a function that makes one for each rank."""

    def run(transport: Any) -> samestep.Result:
        with transport.turn():
            torch.manual_seed(0)
            model = nn.Linear(4, 3)
        checkpoint = Checkpointing(folder=folder, every=every, keep=50) if folder else None
        return samestep.train(
            model,
            dataset(transport.rank) if isinstance(dataset, type(lambda: 0)) else dataset,
            loss or Loss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            batching=batching,
            checkpoint=checkpoint,
            callbacks=[Quarantine(asks)] if asks else [],
            listeners=[seen.append] if seen is not None else [lambda event: None],
            transport=transport,
            timeout_s=30,
            **arguments,
        )

    return run_threads(run, ranks)[0]


def ledger(result: samestep.Result) -> list[tuple[object, ...]]:
    return [
        (r.step, r.update, r.epoch, r.cursor, r.samples, r.sample_hash, r.loss, r.applied)
        for r in result.history
    ]
