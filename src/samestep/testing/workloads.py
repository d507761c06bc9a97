"""Small workloads, each of a kind that breaks careless gradient averaging: for tests of the law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, pad, scaled_dot_product_attention

IGNORED = -100  # a target that is not counted, as in torch's cross_entropy


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, a data set, and its loss as (values, weights)."""

    name: str
    make_model: Callable[[], nn.Module]
    dataset: Any
    values: Callable[[nn.Module, Any], tuple[Tensor, Tensor | None]]
    collate_fn: Callable[[list[Any]], Any] | None = None


@final
class Drawn:
    """A data set whose sample i is drawn from a generator seeded with i."""

    def __init__(self, num_samples: int, draw: Callable[[torch.Generator], Any]) -> None:
        self._num_samples = num_samples
        self._draw = draw

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        """Draw one sample."""
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        return self._draw(torch.Generator().manual_seed(index))


def mlp_with_dropout(num_samples: int = 37) -> Workload:
    """Regression with dropout and real-valued sample weights, some of them zero."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        weight = torch.rand((), generator=generator, dtype=torch.float64)
        return (
            torch.randn(6, generator=generator),
            torch.randn(3, generator=generator),
            torch.where(weight < 0.2, 0.0, weight),
        )

    def values(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets, weights = batch
        return mse_loss(model(inputs), targets, reduction="none").sum(1), weights

    return Workload(
        name="mlp",
        make_model=lambda: nn.Sequential(
            nn.Linear(6, 17), nn.LayerNorm(17), nn.Dropout(0.3), nn.ReLU(), nn.Linear(17, 3)
        ),
        dataset=Drawn(num_samples, draw),
        values=values,
    )


def cnn_with_batch_norm(num_samples: int = 38) -> Workload:
    """Image classification whose layers keep running statistics; needs micro-batches of two or more."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(2, 6, 6, generator=generator), torch.randint(0, 4, (), generator=generator)

    def values(model: nn.Module, batch: Any) -> tuple[Tensor, None]:
        images, labels = batch
        return cross_entropy(model(images), labels, reduction="none"), None

    return Workload(
        name="cnn",
        make_model=lambda: nn.Sequential(
            nn.Conv2d(2, 5, 3, padding=1, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Conv2d(5, 6, 3, stride=2),
            nn.BatchNorm2d(6, momentum=None),
            nn.Flatten(),
            nn.Linear(24, 4),
        ),
        dataset=Drawn(num_samples, draw),
        values=values,
    )


class TinyGpt(nn.Module):
    """One transformer block over a small vocabulary, with tied embeddings."""

    def __init__(self, vocabulary: int = 11, width: int = 8, context: int = 9) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Map (batch, length) token ids to (batch, length, vocabulary) logits."""
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        query, key, value = self.qkv(self.norm(hidden)).unsqueeze(1).chunk(3, dim=-1)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.drop(attended.squeeze(1))
        logits: Tensor = self.head(hidden + self.mlp(hidden))
        return logits


def gpt_with_ragged_lengths(num_samples: int = 29) -> Workload:
    """Language modelling over sequences of 2 to 9 tokens, each counted token weighing 1."""

    def draw(generator: torch.Generator) -> Tensor:
        length = int(torch.randint(2, 10, (), generator=generator))
        return torch.randint(0, 11, (length,), generator=generator)

    def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        longest = max(len(sample) for sample in samples)
        ids = torch.stack([pad(sample, (0, longest - len(sample))) for sample in samples])
        targets = torch.stack(
            [pad(sample[1:], (0, longest + 1 - len(sample)), value=IGNORED) for sample in samples]
        )
        return ids, targets

    def values(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        ids, targets = batch
        losses = cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="none")
        return losses, targets.flatten() != IGNORED

    return Workload(
        name="gpt", make_model=TinyGpt, dataset=Drawn(num_samples, draw), values=values, collate_fn=collate
    )


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it, and a branch that only some inputs take."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)
        self.rare = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 6) to (batch,)."""
        hidden = torch.tanh(self.base(inputs) + self.up(self.down(inputs)))
        if bool(inputs[0, 0] > 1.0):
            hidden = hidden + self.rare(hidden)
        result: Tensor = self.out(hidden).squeeze(-1)
        return result


def frozen_with_adapter(num_samples: int = 31) -> Workload:
    """Training an adapter; one branch is used by some micro-batches only, one by none."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(6, generator=generator), torch.randn((), generator=generator)

    def values(model: nn.Module, batch: Any) -> tuple[Tensor, None]:
        inputs, targets = batch
        return mse_loss(model(inputs), targets, reduction="none"), None

    return Workload(name="adapter", make_model=Adapted, dataset=Drawn(num_samples, draw), values=values)


WORKLOADS = {
    "mlp": mlp_with_dropout,
    "cnn": cnn_with_batch_norm,
    "gpt": gpt_with_ragged_lengths,
    "adapter": frozen_with_adapter,
}
