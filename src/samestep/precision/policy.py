"""The dtype policy of a run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from samestep.config import Settings
from samestep.config.settings import nearest
from samestep.errors import ConfigError

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Precision(Settings):
    """In which dtypes a run computes, stores and adds.

    The presets: `"fp32"` computes in the parameters' own dtypes; `"bf16"` and `"fp16"` run the forward pass
    under autocast, fp16 with a dynamic loss scale.
    """

    compute: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="autocast dtype of the forward pass; fp32: none"
    )
    parameters: Literal["bf16", "fp16"] | None = Field(
        default=None, description="cast the model's float32 parameters to this dtype"
    )
    masters: bool = Field(
        default=True,
        description="keep float32 copies of 16-bit parameters, which the optimizer updates; without them "
        "an update smaller than half a unit in the last place is lost",
    )
    loss_scale: Literal["torch", "hysteresis"] | None = Field(
        default=None, description="rule of the dynamic loss scale; left out: torch for fp16, else none"
    )
    reduce_dtype: Literal["fp64", "fp32", "bf16"] | None = Field(
        default=None,
        description="dtype of gradient sums, in memory and on the wire; left out: float32 or the "
        "parameters' dtype where that is wider. bf16 halves the traffic and rounds after each addition",
    )
    nonfinite: Literal["raise", "skip"] | None = Field(
        default=None,
        description="an infinity or NaN in the gradient: raise an error, or skip the step on all ranks; "
        "left out: skip where there is a loss scale, else raise",
    )

    @property
    def scale_rule(self) -> Literal["torch", "hysteresis"] | None:
        """The loss scale's rule, resolved."""
        if self.loss_scale is None and "fp16" in (self.compute, self.parameters):
            return "torch"
        return self.loss_scale

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a non-finite gradient skips its step."""
        return self.nonfinite == "skip" if self.nonfinite else self.scale_rule is not None

    @property
    def sums(self) -> torch.dtype | None:
        """The dtype of gradient sums where it was chosen."""
        return _DTYPES[self.reduce_dtype] if self.reduce_dtype else None

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context of one forward pass."""
        if self.compute == "fp32":
            return nullcontext()
        return torch.autocast(device.type, dtype=_DTYPES[self.compute])

    def cast(self, model: nn.Module) -> None:
        """Cast the model's float32 parameters, where asked; buffers keep their dtypes."""
        if self.parameters is None:
            return
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(_DTYPES[self.parameters])


def resolve_precision(value: str | Precision) -> Precision:
    """Turn a preset's name into its policy; ConfigError for an unknown one."""
    if isinstance(value, Precision):
        return value
    if value not in ("fp32", "bf16", "fp16"):
        hint = nearest(str(value), ("fp32", "bf16", "fp16"))
        raise ConfigError(
            f"precision is {value!r}.{hint} Use 'fp32', 'bf16', 'fp16', or samestep.Precision(...)."
        )
    return Precision(compute=value)
