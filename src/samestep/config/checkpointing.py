"""Where checkpoints lie, when they are written, and which are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from samestep.config.settings import Settings


class Checkpointing(Settings):
    """When the state of a run is stored, and which of the stored states are kept."""

    folder: Path | None = Field(
        default=None, description="where checkpoints lie; `checkpoints` in the run folder if left out"
    )
    every: int | None = Field(
        default=None, ge=1, description="steps between two; if left out, only at the end and on request"
    )
    keep: int = Field(default=3, ge=1, description="how many of the newest are kept")
    best: str | None = Field(
        default=None, description="a metric: the checkpoint with its best value is kept besides the newest"
    )
    mode: Literal["min", "max"] = Field(default="min", description="which value of that metric is the best")
    background: bool = Field(
        default=True, description="write beside training, which stands still only for a copy of the state"
    )
    at_end: bool = Field(default=True, description="store the state after the last step too")

    @model_validator(mode="after")
    def _stores_something(self) -> Self:
        if self.every is None and not self.at_end:
            raise ValueError(
                "checkpoint.every is left out and checkpoint.at_end is false: nothing would ever be stored "
                "but on request. Give every a number of steps."
            )
        return self

    def due(self, step: int) -> bool:
        """Say whether a checkpoint is due after `step` steps of the run."""
        return self.every is not None and step % self.every == 0
