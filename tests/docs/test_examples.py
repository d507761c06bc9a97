"""The examples: each prints the same fingerprint on one rank and on three."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import HEX, ROOT

NAMES = ("train", "custom_loop", "several_terms", "ragged_tokens")
ALL = """
import runpy
for path in {paths}:
    runpy.run_path(path)
"""


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(NAMES)


@pytest.mark.timeout(300)
def test_examples_end_in_the_same_bits_on_one_rank_and_on_three(tmp_path: Path) -> None:
    paths = [str(ROOT / "examples" / f"{name}.py") for name in NAMES]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for path in paths:
            runpy.run_path(path)
    fingerprints = HEX.findall(printed.getvalue())
    assert len(set(fingerprints)) == len(NAMES)

    # One start for all four: it also shows that the ranks of one process can meet again and again.
    (tmp_path / "all.py").write_text(ALL.format(paths=paths))
    command = [sys.executable, "-m", "samestep", "run", "--workers", "3", str(tmp_path / "all.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed.getvalue()
