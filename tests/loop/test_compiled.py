"""A compiled model: the same bits on any number of ranks, under the names of the model itself."""

from __future__ import annotations

import pytest
import torch
from compiled_run import train_compiled
from torch import nn

from samestep.numerics.fingerprint import model_fingerprint, model_tensors
from samestep.testing.processes import run_processes


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_any_number_of_ranks(backend: str) -> None:
    (alone,) = run_processes(train_compiled, 1, backend, timeout_s=250)
    assert len(set(alone[1])) == 3
    assert run_processes(train_compiled, 3, backend, timeout_s=250) == [alone] * 3


@pytest.mark.timeout(300)
def test_the_plain_graph_changes_no_bit() -> None:
    (compiled,) = run_processes(train_compiled, 1, "aot_eager", timeout_s=250)
    (plain,) = run_processes(train_compiled, 1, None)
    assert compiled == plain


def test_names_are_those_of_the_model_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    compiled = torch.compile(model, backend="eager")
    assert [name for name, _ in model_tensors(compiled)] == [name for name, _ in model_tensors(model)]
    assert model_fingerprint(compiled) == model_fingerprint(model)
