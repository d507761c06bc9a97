"""The recipe: everything that a run from the command line is made of. Each key is described here only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, JsonValue, model_validator

from samestep.config.batching import Batching
from samestep.config.checkpointing import Checkpointing
from samestep.config.settings import Settings

Rate: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class AdamSettings(Settings):
    """Adam, or AdamW, whose weight decay stands apart from the gradient."""

    name: Literal["adamw", "adam"] = Field(description="adamw or adam")
    lr: Rate = Field(description="the base learning rate, which the schedule multiplies")
    betas: tuple[Share, Share] = Field(default=(0.9, 0.999), description="decay of both moving averages")
    eps: Rate = Field(default=1e-8, description="added to the root of the second average")
    weight_decay: NotNegative = Field(default=0.0, description="pull towards zero, in units of 1/lr updates")


class SgdSettings(Settings):
    """Stochastic gradient descent, with momentum where wanted."""

    name: Literal["sgd"] = Field(description="sgd")
    lr: Rate = Field(description="the base learning rate, which the schedule multiplies")
    momentum: Share = Field(default=0.0, description="share of the last update that is kept")
    nesterov: bool = Field(default=False, description="look ahead along the momentum")
    weight_decay: NotNegative = Field(default=0.0, description="added to the gradient, times the parameter")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError(
                "optimizer.nesterov is true, but optimizer.momentum is 0. Set a momentum, for example 0.9, "
                "or leave nesterov out."
            )
        return self


OptimizerSettings: TypeAlias = Annotated[AdamSettings | SgdSettings, Field(discriminator="name")]


class ScheduleSettings(Settings):
    """How the learning rate moves, counted in applied updates."""

    name: Literal["constant", "linear", "warmup_cosine", "inverse_sqrt", "wsd"] = Field(
        default="constant",
        description="after the warm-up: level, a line down, half a cosine down, 1/sqrt(update), or level "
        "with a line down over the last `decay` updates",
    )
    warmup: int = Field(default=0, ge=0, description="updates over which the rate climbs from 0")
    updates: int | None = Field(default=None, ge=1, description="updates in all; the run's steps if left out")
    floor: Share = Field(default=0.0, description="the least multiplier at the end")
    decay: int | None = Field(default=None, ge=1, description="wsd only: updates of the last line down")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.decay is not None) != (self.name == "wsd"):
            raise ValueError(
                f"schedule.decay is {self.decay}, with schedule.name {self.name}. The key belongs to wsd, "
                "which needs it."
            )
        if self.name == "inverse_sqrt" and self.warmup == 0:
            raise ValueError("schedule.warmup is 0, but inverse_sqrt takes its scale from it. Use 1 or more.")
        return self


class AverageSettings(Settings):
    """A moving average of the weights, which follows the applied updates."""

    decay: Share = Field(default=0.999, description="what is kept of the average in each move")
    warmup: bool = Field(default=False, description="keep less at first: (1 + moves) / (10 + moves)")
    every: int = Field(default=1, ge=1, description="updates between two moves")
    buffers: Literal["copy", "average"] = Field(
        default="copy", description="running statistics: the model's own, or averaged too"
    )


class Recipe(Settings):
    """One run: what is trained, on what, and how. Paths are relative to the recipe's file."""

    task: str = Field(description="a registered task, or a class of yours: package.module.Class")
    model: dict[str, JsonValue] = Field(default_factory=dict, description="the task's settings of the model")
    data: dict[str, JsonValue] = Field(default_factory=dict, description="the task's settings of the data")
    batching: Batching = Field(description="which samples make a step")
    optimizer: OptimizerSettings = Field(description="the rule that turns gradients into updates")
    schedule: ScheduleSettings = Field(default=ScheduleSettings(), description="how the learning rate moves")
    clip_norm: Rate | None = Field(default=None, description="the limit of the global gradient norm")
    precision: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="the dtype policy")
    strategy: Literal["replicate", "zero1"] = Field(
        default="replicate",
        description="what a rank holds: everything, or a shard of the optimizer's state",
    )
    reduction: Literal["ordered", "fast"] = Field(
        default="ordered", description="ordered: the same bits on any number of ranks; fast: no such promise"
    )
    steps: int | None = Field(default=None, ge=1, description="steps in all, or give epochs")
    epochs: int | None = Field(default=None, ge=1, description="passes over the data set, or give steps")
    ema: AverageSettings | None = Field(default=None, description="a moving average of the weights")
    checkpoint: Checkpointing | None = Field(default=None, description="when the state is stored")
    resume: str = Field(
        default="auto",
        min_length=1,
        description="auto: go on from the newest whole checkpoint of the run folder; never; or a path",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="what all randomness is made from")
    threads: int = Field(default=1, ge=1, description="CPU threads of each rank; part of the numbers")
    workers: int | None = Field(default=None, ge=1, description="ranks; all devices here if left out")
    loader_workers: int = Field(default=0, ge=0, description="processes of each rank that load samples")
    digest_every: int = Field(default=10, ge=0, description="steps between digests in the ledger; 0: never")
    track: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = Field(
        default=(), description="what else is told of the run; each is an extra of the package"
    )
    folder: Path | None = Field(default=None, description="the run folder; runs/<recipe>-<time> if left out")

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            both = "neither is set" if self.steps is None else f"steps {self.steps} and epochs {self.epochs}"
            raise ValueError(f"a recipe needs either steps or epochs, and not both: {both}.")
        return self

    def anchored(self, folder: Path) -> Self:
        """Return the same recipe, with relative paths taken as relative to `folder`."""
        anchored = super().anchored(folder)
        if anchored.checkpoint is None:
            return anchored
        return anchored.model_copy(update={"checkpoint": anchored.checkpoint.anchored(folder)})

    def written(self) -> dict[str, Any]:
        """Return every key with its value, as a recipe that stands anywhere: without the run's own folder."""
        return self.model_dump(mode="json", exclude_none=True, exclude={"folder"})
