"""The fingerprint sees every bit, every name, dtype and shape, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from samestep.numerics.fingerprint import fingerprint, model_fingerprint, model_tensors

BASE = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    "other",
    [
        BASE.reshape(4, 3),
        BASE.double(),
        BASE.to(torch.int32),
        torch.where(BASE == 5, torch.tensor(math.nextafter(5, 6)).float() + 1e-6, BASE),
        torch.where(BASE == 0, torch.tensor(-0.0), BASE),
    ],
)
def test_any_difference_shows(other: Tensor) -> None:
    assert fingerprint({"a": BASE}) != fingerprint({"a": other})
    assert fingerprint({"a": BASE}) != fingerprint({"b": BASE})


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.bool, torch.int64, torch.float64]
)
def test_strides_and_storage_do_not_matter(dtype: torch.dtype) -> None:
    tensor = (torch.rand(3, 4) > 0.5).to(dtype)
    spread = torch.zeros(6, 8, dtype=dtype)[::2, ::2]
    spread.copy_(tensor)
    assert fingerprint({"a": tensor}) == fingerprint({"a": spread})
    assert fingerprint({"a": tensor.t().contiguous().t()}) == fingerprint({"a": tensor})


def test_zero_dim_and_empty_tensors_have_fingerprints() -> None:
    assert fingerprint({"a": torch.tensor(1.0)}) != fingerprint({"a": torch.tensor([1.0])})
    assert fingerprint({"a": torch.empty(0, 2)}) != fingerprint({"a": torch.empty(0, 3)})


def test_a_tied_tensor_counts_once_and_caches_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("cache", torch.ones(1), persistent=False)
    assert [name for name, _ in model_tensors(model)] == ["0.weight", "0.bias", "1.bias", "kept"]
    before = model_fingerprint(model)
    model.cache.add_(1)
    assert model_fingerprint(model) == before
    model.kept.add_(1)
    assert model_fingerprint(model) != before
