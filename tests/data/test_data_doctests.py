"""The examples in the docstrings of the data layer and the seeds."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "data.assign",
        "data.content",
        "data.describe",
        "data.global_batch",
        "data.identity",
        "data.mixture",
        "data.order",
        "numerics.seeds",
    ],
)
def test_examples(name):
    module = importlib.import_module(f"samestep.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
