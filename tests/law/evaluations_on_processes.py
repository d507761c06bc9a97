"""An evaluation with gathered rows, as one rank of several processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import samestep
from samestep.comm.connect import connect
from samestep.testing.workloads import Drawn
from samestep.topology.environment import Place


def evaluate_rows(place: Place, num_samples: int) -> dict[str, float]:
    """Gather rows of several dtypes, and a list, and return what they come to."""

    def predict(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {
            "score": model(batch)[:, 0],
            "half": batch.bfloat16(),
            "sign": batch[:, 0] > 0,
            "word": ["w" * (1 + int(value > 0)) for value in batch[:, 1]],
        }

    def joined(
        score: torch.Tensor, half: torch.Tensor, sign: torch.Tensor, word: list[str]
    ) -> dict[str, float]:
        order = torch.arange(1, len(score) + 1, dtype=torch.float64)
        return {
            "score": float((score.double() * order).sum()),
            "half": float((half.double().sum(1) * order).sum()),
            "sign": float((sign * order).sum()),
            "word": float((torch.tensor([len(one) for one in word]) * order).sum()),
        }

    transport = connect(place, device=torch.device("cpu"), timeout_s=30.0)
    torch.manual_seed(0)
    with samestep.Session(transport=transport, ema=0.9) as session:
        session.setup(nn.Linear(3, 1), lambda params: torch.optim.SGD(params, lr=0.1))
        data = Drawn(num_samples, lambda generator: torch.randn(3, generator=generator))
        return session.evaluate(
            samestep.Evaluation(dataset=data, predict=predict, gathered={"all": joined}, micro_batch=2)
        )
