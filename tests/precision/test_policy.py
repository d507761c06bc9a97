"""What a precision resolves to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep
from samestep.precision.policy import Precision, resolve_precision

CPU = torch.device("cpu")


def test_presets() -> None:
    assert resolve_precision("fp32").scale_rule is None
    assert resolve_precision("bf16").scale_rule is None
    assert resolve_precision("fp16").scale_rule == "torch"
    assert not resolve_precision("bf16").skips_nonfinite
    assert resolve_precision("fp16").skips_nonfinite
    own = Precision(compute="bf16", loss_scale="hysteresis", nonfinite="raise")
    assert resolve_precision(own) is own
    assert (own.scale_rule, own.skips_nonfinite) == ("hysteresis", False)
    assert Precision(parameters="fp16").scale_rule == "torch"


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(samestep.ConfigError, match="precision is 'float8'"):
        resolve_precision("float8")


@pytest.mark.parametrize(
    ("compute", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_forward_pass_computes_in_its_dtype(compute: str, dtype: torch.dtype) -> None:
    with resolve_precision(compute).autocast(CPU):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


def test_only_float32_parameters_are_cast() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.BatchNorm1d(2))
    Precision(parameters="bf16").cast(model)
    assert model[0].weight.dtype == torch.bfloat16
    assert model[1].weight.dtype == torch.float64
    assert model[2].running_mean.dtype == torch.float32


def test_the_dtype_of_sums() -> None:
    assert Precision().sums is None
    assert Precision(reduce_dtype="bf16").sums == torch.bfloat16
    assert Precision(reduce_dtype="fp64").sums == torch.float64
