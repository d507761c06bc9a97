"""Which samples make a step: the one setting that defines it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from samestep.config.batch_sizes import BatchSizes
from samestep.config.settings import Settings
from samestep.errors import ConfigError


class Batching(Settings):
    """Which samples make a step: the global batch, and the micro-batches it is cut into."""

    global_batch: int = Field(ge=1, description="samples in one step: the only number that defines it")
    micro_batch: int | None = Field(
        default=None, ge=1, description="samples in one forward and backward pass; chosen when left out"
    )
    last: Literal["keep", "drop", "wrap"] = Field(
        default="keep",
        description="the short end of an epoch: keep it as a step of its own, drop it, or fill it up "
        "from the next epoch",
    )
    shuffle: bool = Field(default=True, description="a new order in every epoch, from the seed")
    growth: dict[int, int] = Field(
        default_factory=dict,
        description="other sizes later on: the first update of each stretch, and its global batch",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.micro_batch is not None and self.micro_batch > self.global_batch:
            raise ValueError(
                f"batching.micro_batch is {self.micro_batch}, but the global batch is {self.global_batch} "
                f"samples. Lower micro_batch to {self.global_batch} or less, or leave it out and it will "
                "be chosen."
            )
        if self.growth.get(0, self.global_batch) != self.global_batch:
            raise ValueError(
                f"batching.growth says {self.growth[0]} samples from update 0 on, but batching.global_batch "
                f"is {self.global_batch}. Leave update 0 out of growth."
            )
        try:
            _ = self.sizes
        except ConfigError as error:
            raise ValueError(f"batching.growth is {self.growth}: {error}") from None
        return self

    @property
    def sizes(self) -> BatchSizes:
        """Return the global batch of each update."""
        return BatchSizes(tuple(sorted({0: self.global_batch, **self.growth}.items())))

    @property
    def grows(self) -> bool:
        """Say whether the global batch is not the same for all updates."""
        return self.sizes.smallest != self.sizes.largest

    def resolved(self) -> Batching:
        """Return the same settings with a micro-batch: an eighth of the global batch, rounded up.

        The rule never looks at the number of ranks, since the micro-batch is part of the numbers. An
        eighth lets up to eight ranks share a step. It stays when the global batch grows.
        """
        if self.micro_batch is not None:
            return self
        return self.model_copy(update={"micro_batch": -(-self.global_batch // 8)})
