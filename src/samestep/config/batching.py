"""Which samples make a step: the one setting that defines it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from samestep.config.settings import Settings


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

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.micro_batch is not None and self.micro_batch > self.global_batch:
            raise ValueError(
                f"batching.micro_batch is {self.micro_batch}, but the global batch is {self.global_batch} "
                f"samples. Lower micro_batch to {self.global_batch} or less, or leave it out and it will "
                "be chosen."
            )
        return self

    def resolved(self) -> Batching:
        """Return the same settings with a micro-batch: an eighth of the global batch, rounded up.

        The rule never looks at the number of ranks, since the micro-batch is part of the numbers. An
        eighth lets up to eight ranks share a step.
        """
        if self.micro_batch is not None:
            return self
        return self.model_copy(update={"micro_batch": -(-self.global_batch // 8)})
