"""Options of the suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-kind",
        action="store_true",
        help="tests/law/test_gloo.py: take every kind on every number of ranks (some minutes more)",
    )
